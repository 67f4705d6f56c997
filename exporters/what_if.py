"""What the coefficients say of today's load: the newest snapshot as the client reads it, and advice made of it.

Whatever predicts asks the client, by way of the newest snapshot as a document, so that nothing here predicts by sums
of its own. What is made of one generation is kept until the next.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import msgspec

import tracefit
from online import ConfigSnapshot, Snapshot
from tracefit import Config, Identity, RequestEstimate, TracefitError, Verdict

Value = TypeVar("Value")


class PerGeneration(Generic[Value]):
    """Things made of the configurations of one generation, by their ids; those of an earlier one are dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._made: dict[str, Value] = {}

    def get(self, snapshot: Snapshot, config_id: str, make: Callable[[], Value]) -> Value:
        """What ``make`` makes; what it raises is not kept."""
        with self._lock:
            if snapshot is not self._snapshot:
                self._snapshot, self._made = snapshot, {}
            if config_id not in self._made:
                self._made[config_id] = make()
            return self._made[config_id]


def identities_of(configs: Sequence[ConfigSnapshot]) -> list[Identity]:
    """What the client chooses and names each by."""
    return [
        Identity(each.config_id, each.config, each.last_heard_unix_nano, bool(each.replaced_by)) for each in configs
    ]


def meant_config(snapshot: Snapshot, which: str) -> ConfigSnapshot:
    """The only configuration that is meant; NotFoundError if none is, or several that are alive."""
    meant = next((each for each in snapshot.configs if each.config_id == which), None)
    return meant or snapshot.configs[tracefit.find_config(identities_of(snapshot.configs), which)]


class WorkloadProfile(NamedTuple):
    """The requests of the last minute, in the mean, per engine.

    Attributes:
        prompt_tokens, output_tokens: of a finished request.
        prefix_hit: share of prompt tokens that were never computed; 0 where that is not known.
        concurrency: requests in flight, as a decoding request meets them, itself included.
        running: those of them that are in the batch.
        itl_us: between the tokens of a request, by tokens; None where nothing was observed.
        ttft_us: from queued in the engine to the first token; None where nothing was observed.
    """

    prompt_tokens: float
    output_tokens: float
    prefix_hit: float
    concurrency: float
    running: float
    itl_us: float | None
    ttft_us: float | None


WorkloadOf = Callable[[str], WorkloadProfile | None]
"""Of a configuration by its id; None where nothing was finished lately."""


BATCH_REACH = 1.25
"""Times the largest batch seen: a plan that needs more is a guess about steps that nobody has met."""


class Fit(NamedTuple):
    """Most requests in flight that keep an ITL; ``safe`` with the upper end of its band; None beyond what was seen."""

    itl_ms: float
    concurrency: int | None
    safe: int | None


class Predicted(NamedTuple):
    """Mean ITL and TTFT that requests of a mix should see."""

    itl_us: float
    ttft_us: float


class LoadView(NamedTuple):
    """The client's verdict on a configuration, and what its coefficients say of the load of the last minute.

    ``workload``: what was observed, None where nothing was finished. ``predicted``: what its requests should have seen,
    None where the coefficients should not be used. ``fits``: per target for ITL.
    """

    verdict: Verdict
    workload: WorkloadProfile | None
    predicted: Predicted | None = None
    fits: tuple[Fit, ...] = ()


class Advisory:
    """What the client says of each configuration, kept for a generation, and advice on the load of the last minute.

    Where coefficients should not be used yet there is no advice: an autoscaler without a metric stays as it is. So it
    is for a concurrency whose point is not usable, or that lies beyond BATCH_REACH times the largest batch seen. Such a
    concurrency is left out and not capped: capped, it would follow the load of the past. A pod that met its usual load
    would then look full, new pods would meet less, look full at less, and the autoscaler would go on to its limit.

    Args:
        observed: the requests of a configuration in the last minute.
        itl_ms: targets for the mean time between tokens.
    """

    def __init__(self, observed: WorkloadOf = lambda _: None, itl_ms: Sequence[float] = ()) -> None:
        self._observed = observed
        self._itl_ms = itl_ms
        self._configs = PerGeneration[Config]()
        self._made = PerGeneration[LoadView]()

    def meant(self, snapshot: Snapshot, which: str = "") -> Config:
        """The only configuration that is meant, as ``find_config`` of the client understands it.

        Raises:
            NotFoundError: none is, or several that are alive.
            LoadError: the client cannot read it.
        """
        return self.config(snapshot, meant_config(snapshot, which))

    def config(self, snapshot: Snapshot, config: ConfigSnapshot) -> Config:
        """One configuration, by way of the document that the client reads; LoadError if it cannot read it."""
        document = msgspec.structs.replace(snapshot, configs=[config])
        return self._configs.get(snapshot, config.config_id, lambda: tracefit.load(document.to_json()).configs[0])

    def verdict(self, snapshot: Snapshot, config: ConfigSnapshot) -> Verdict:
        """The client's verdict on one configuration; one that it cannot read is not usable."""
        try:
            return self.config(snapshot, config).verdict
        except TracefitError as error:
            return Verdict(usable=False, reasons=(str(error),))

    def of(self, snapshot: Snapshot, config: ConfigSnapshot) -> LoadView:
        """What can be said of one configuration; one that the client cannot read is not usable."""
        return self._made.get(snapshot, config.config_id, partial(self._of, snapshot, config))

    def _of(self, snapshot: Snapshot, config: ConfigSnapshot) -> LoadView:
        mix, verdict = self._observed(config.config_id), self.verdict(snapshot, config)
        if mix is None or not verdict.usable:
            return LoadView(verdict, mix)
        try:
            client = self.config(snapshot, config)
            predicted = _predicted(client, mix)
            fits = tuple(
                Fit(itl_ms, *(_fitting(client, mix, itl_ms, safe=safe) for safe in (False, True)))
                for itl_ms in self._itl_ms
            )
        except TracefitError:  # a mix that the engine cannot hold, or that makes no sense: no advice
            return LoadView(verdict, mix)
        return LoadView(verdict, mix, predicted, fits)


def _request(mix: WorkloadProfile) -> dict[str, float]:
    """The mean request of a mix, as the client asks for it."""
    return {name: getattr(mix, name) for name in ("prompt_tokens", "output_tokens", "prefix_hit")}


def _predicted(client: Config, mix: WorkloadProfile) -> Predicted | None:
    """What was observed is a mean of the last minute, so no level of the last seconds is in it.

    Where some wait, the engine ran no more: whatever said so, a limit, its memory or its owner. None where rows of such
    batches are not learned yet: a load is known before the journeys that its rows wait for.
    """
    seen = client.request(concurrency=mix.running, **_request(mix))
    if not _within_reach(client, seen):
        return None
    itl_us = seen.itl.us
    if mix.concurrency > mix.running:
        limited = client.assuming(max_num_seqs=math.ceil(mix.running))
        seen = limited.request(concurrency=mix.concurrency, **_request(mix))
    return Predicted(itl_us, seen.ttft.us)


def _fitting(client: Config, mix: WorkloadProfile, itl_ms: float, *, safe: bool) -> int | None:
    plan = client.plan(itl_ms=itl_ms, safe=safe, **_request(mix))
    return plan.concurrency if _within_reach(client, plan.at) else None


def _within_reach(client: Config, seen: RequestEstimate) -> bool:
    """Whether an answer may be published: it is usable, and its batch not far beyond the largest one seen."""
    return seen.usable and seen.running <= BATCH_REACH * client.verdict.seen.get("requests", (0.0, 0.0))[1]
