"""Advice from the coefficients, as metrics: what requests should see at the load of the last minutes, how many fit.

    predicted ITL, TTFT         tracefit.Config.request at the mix, beside what was observed of the same requests
    concurrency of a target     tracefit.Config.plan: most requests in flight whose mean ITL keeps it, for that mix
    its safe end                the same plan with the upper end of the band held against the target
    usable                      the client's verdict; its reasons are on the status page and in /predict

Asked of the client once a generation, when the page is first rendered. Where coefficients should not be used yet there
is no advice: an autoscaler without a metric stays as it is. So it is for a concurrency whose point is not usable, or
that lies beyond BATCH_REACH times the largest batch seen. Such a concurrency is left out and not capped: capped, it
would follow the load of the past. A pod that met its usual load would then look full, new pods would meet less, look
full at less, and the autoscaler would go on to its limit. Observed TTFT is QUEUED -> FIRST_TOKEN plus the learned
means of what comes before and after, as the predicted one has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from exporters.client_view import ClientView
from exporters.what_if import Mix, MixOf
from exporters.wording import US_PER_S
from online import ConfigSnapshot, Snapshot
from tracefit import Config, TracefitError

_API_TARGETS = ("api_queueing", "first_response")
BATCH_REACH = 1.25
"""Times the largest batch seen: a plan that needs more is a guess about steps that nobody has met."""

_CONCURRENCY_FAMILIES = (("tracefit_slo_concurrency", False), ("tracefit_slo_concurrency_safe", True))


class AdvisorySample(NamedTuple):
    """A value of a family; ``labels`` come after ``config``."""

    family: str
    value: float
    labels: tuple[str, ...] = ()


AdviceOf = Callable[[Snapshot, ConfigSnapshot], Iterator[AdvisorySample]]


class Advisory:
    """Advice on each configuration.

    Args:
        view: predicts.
        mix_of: what a configuration was asked lately.
        itl_ms: targets for the mean time between tokens.
    """

    def __init__(self, view: ClientView, mix_of: MixOf, itl_ms: Sequence[float] = ()) -> None:
        self._view = view
        self._mix_of = mix_of
        self._itl_ms = itl_ms

    def samples(self, snapshot: Snapshot, config: ConfigSnapshot) -> Iterator[AdvisorySample]:
        """Everything that can be said of one configuration; nothing of one whose server sends another one now."""
        if config.replaced_by:
            return
        try:
            client = self._view.config(snapshot, config.config_id)
        except (LookupError, TracefitError):
            return
        yield AdvisorySample("tracefit_usable", float(client.usable))
        mix = self._mix_of(config.config_id)
        if mix is None:
            return
        yield from _observed(config, mix)
        if client.usable:
            try:
                yield from self._advised(client, mix)
            except TracefitError:  # a mix that the engine cannot hold, or that makes no sense: no advice
                return

    def _advised(self, client: Config, mix: Mix) -> Iterator[AdvisorySample]:
        prompt, output, hit = mix.prompt_tokens, mix.output_tokens, mix.prefix_hit
        seen = client.request(prompt_tokens=prompt, output_tokens=output, prefix_hit=hit, concurrency=mix.concurrency)
        if mix.itl_us is not None:
            yield AdvisorySample("tracefit_predicted_itl_seconds", seen.itl.us / US_PER_S)
        yield AdvisorySample("tracefit_predicted_ttft_seconds", seen.ttft.us / US_PER_S)
        for itl_ms in self._itl_ms:
            for family, safe in _CONCURRENCY_FAMILIES:
                plan = client.plan(prompt_tokens=prompt, output_tokens=output, prefix_hit=hit, itl_ms=itl_ms, safe=safe)
                if plan.at.usable and plan.concurrency <= BATCH_REACH * _largest_batch(client):
                    yield AdvisorySample(family, plan.concurrency, (f"{itl_ms / 1e3:.6g}",))


def _largest_batch(client: Config) -> float:
    """Most requests in a step that was learned from; 0 where nobody said."""
    seen = client.targets["step_time"].seen
    return 0.0 if seen is None else seen.features.get("requests", (0.0, 0.0))[1]


def _observed(config: ConfigSnapshot, mix: Mix) -> Iterator[AdvisorySample]:
    if mix.itl_us is not None:
        yield AdvisorySample("tracefit_observed_itl_seconds", mix.itl_us / US_PER_S)
    if mix.ttft_us is not None:
        targets = (config.targets.get(name) for name in _API_TARGETS)
        api_us = sum(target.mean_us or 0.0 for target in targets if target is not None)
        yield AdvisorySample("tracefit_observed_ttft_seconds", (mix.ttft_us + api_us) / US_PER_S)
    yield AdvisorySample("tracefit_load", mix.concurrency, ("concurrency",))
    yield AdvisorySample("tracefit_load", mix.prompt_tokens, ("prompt_tokens",))
    yield AdvisorySample("tracefit_load", mix.output_tokens, ("output_tokens",))
    yield AdvisorySample("tracefit_load", mix.prefix_hit, ("prefix_hit_ratio",))
