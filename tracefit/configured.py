"""One configuration of a snapshot: what a caller asks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property

from .closed_loop import Workload
from .document import STEP_TIME, Coefficient, ConfigDocument, Target, Verdict, judged
from .exceptions import BadInputError, NoCoefficientsError, checked
from .plan import Plan, planned
from .request_times import RequestEstimate, RequestTimes
from .step_model import Limits, Prediction, StepModel, computable_model

_LIMIT_MAX = 1e12
"""No engine holds more of anything."""
_LEAST = {"max_num_batched_tokens": 2}
"""A step holds a decode, and one token of a prompt."""


class Config:
    """One configuration: a model on a GPU with its settings.

    Attributes:
        config_id: its name in metrics and files.
        name: what people call it: model, GPU and TP; what tells it from others of its snapshot that are called the
            same; since when it is silent, if others were heard of later.
        facts: what is known of it: model, gpu, tensor_parallel_size, …
        limits: what the engine can hold and do, as far as ``facts`` tell; see :meth:`assuming`.
        targets: everything published about each kind of time, ``step_time`` above all.
        engines: how many share these coefficients; ``telemetry``: how good their signals are.
        prefix_hits_hidden: its telemetry does not tell prefix hits, so usual ones are in the price of a prompt's token.
        last_heard_unix_nano: when the newest telemetry of its engines was made, 0 where nobody said.
        at_unix_nano: the moment that it answers for, None for any; see :meth:`now`.
    """

    def __init__(
        self,
        document: ConfigDocument,
        limits: Limits | None = None,
        *,
        name: str = "",
        at_unix_nano: int | None = None,
    ) -> None:
        self.config_id = document.config_id
        self.name = name
        self.facts: Mapping[str, str | int | float | bool] = document.facts
        self.limits = _limits(document) if limits is None else limits
        self.targets: Mapping[str, Target] = document.targets
        self.engines = document.engines
        self.telemetry = document.telemetry
        self.prefix_hits_hidden = document.prefix_hits_hidden
        self.last_heard_unix_nano = document.last_heard_unix_nano
        self._described = document
        self.at_unix_nano = at_unix_nano

    def __repr__(self) -> str:
        return f"<tracefit.Config {self.config_id} {self.model or 'unknown model'} on {self.gpu or 'unknown GPU'}>"

    @property
    def model(self) -> str:
        """Name of the model, empty if nobody said."""
        return str(self.facts.get("model", ""))

    @property
    def gpu(self) -> str:
        """Name of the GPU, empty if nobody said."""
        return str(self.facts.get("gpu", ""))

    @property
    def verdict(self) -> Verdict:
        """Whether its numbers may be used, how good they are, what changed: what every report reads."""
        try:
            return judged(self._described, self._model.reasons, self._model.model)
        except NoCoefficientsError as error:
            return judged(self._described, self._described.doubts or (str(error),), None)

    @property
    def usable(self) -> bool:
        """Whether its predictions may be used where something was seen; ``reasons`` says why not."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it should not be used yet, one clause each; empty if it may."""
        return self.verdict.reasons

    @property
    def missing(self) -> tuple[str, ...]:
        """Times outside of the steps that nothing was learned of, by their target: no TTFT or E2E has them in it."""
        models = [(name, model) for name, target in self.targets.items() for model in target.models.values()]
        learned = {name for name, model in models if model.coefficients}
        return tuple(name for name in ("api_queueing", "post_decode") if name not in learned)

    def mean_context(self, requests: float) -> float:
        """Tokens of decode context that a step of so many decoding requests usually has; 0 where nobody said.

        That of the batch if it was seen, else what a request usually has.
        """
        step = self.targets.get(STEP_TIME)
        shape = None if step is None else step.shapes.get(f"decode:{requests:.0f}")
        if shape is not None and shape.usual is not None and shape.usual.requests > 0.0:
            return requests * shape.usual.decode_context_tokens / shape.usual.requests
        try:
            means = {each.name: each.mean or 0.0 for each in self.coefficients()}
        except NoCoefficientsError:
            return 0.0
        per_step = means.get("requests", 0.0)
        return requests * means.get("decode_context_tokens", 0.0) / per_step if per_step > 0.0 else 0.0

    def coefficients(self, target: str = STEP_TIME) -> tuple[Coefficient, ...]:
        """What predictions are made with, in the order they are published.

        Raises:
            NoCoefficientsError: nothing was learned about that target.
        """
        return computable_model(self._described, target).coefficients

    def assuming(
        self,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        kv_tokens: int | None = None,
    ) -> Config:
        """The same with limits that its telemetry did not tell, or other ones."""
        given = zip(Limits._fields, (max_num_seqs, max_num_batched_tokens, kv_tokens), strict=True)
        stated = [(name, value) for name, value in given if value is not None]
        checks = {name: int(checked(name, value, _LEAST.get(name, 1), _LIMIT_MAX)) for name, value in stated}
        limits = self.limits._replace(**checks)
        return Config(self._described, limits, name=self.name, at_unix_nano=self.at_unix_nano)

    def now(self, at_unix_nano: int | None = None) -> Config:
        """The same for the next seconds: steps are multiplied by the level of the last ones, where that is fresh.

        Args:
            at_unix_nano: the moment; by default this machine's clock says it, which should be the engines'.
        """
        moment = time.time_ns() if at_unix_nano is None else at_unix_nano
        return Config(self._described, self.limits, name=self.name, at_unix_nano=moment)

    @property
    def level(self) -> tuple[float, float]:
        """What steps without and with prefill are multiplied by; 1 but for :meth:`now`, and where it is too old."""
        return self._model.level

    def step_time(self, *, prefill_tokens: float = 0, requests: float, decode_context_tokens: float = 0) -> Prediction:
        """Time of a step.

        Args:
            prefill_tokens: prompt tokens computed in the step, without those found in the prefix cache.
            requests: requests in the step, prefilling and decoding.
            decode_context_tokens: for each request that decodes, its tokens computed before and those of this step.

        Raises:
            BadInputError: a number is negative, not finite or absurd; it names the parameter.
            NoCoefficientsError: there is nothing to predict with.
        """
        return self._model.predict(prefill_tokens, requests, decode_context_tokens)

    def request(
        self,
        *,
        prompt_tokens: float,
        output_tokens: float,
        concurrency: float = 1,
        prefix_hit: float = 0.0,
    ) -> RequestEstimate:
        """TTFT, ITL and E2E of equal requests when ``concurrency`` of them are in flight all the time.

        Args:
            prompt_tokens: mean length of the prompt, cached or not.
            output_tokens: mean length of the answer.
            concurrency: in flight, this one included; need not be whole.
            prefix_hit: share of the prompt found in the prefix cache, 0 to 1; 0 where ``prefix_hits_hidden``.

        Raises:
            BadInputError, NoCoefficientsError: as :meth:`step_time`.
        """
        work = self._workload(prompt_tokens, output_tokens, prefix_hit)
        return self._times.estimate(work, concurrency)

    def plan(
        self,
        *,
        prompt_tokens: float,
        output_tokens: float,
        itl_ms: float | None = None,
        ttft_ms: float | None = None,
        rate: float | None = None,
        prefix_hit: float = 0.0,
        safe: bool = False,
    ) -> Plan:
        """The largest concurrency within the targets, and what limits it.

        Args:
            prompt_tokens: mean length of the prompt, cached or not.
            output_tokens: mean length of the answer.
            itl_ms: target for the mean time between tokens; None for no target.
            ttft_ms: target for the mean time to the first token; None for no target.
            rate: requests per second that should be served.
            prefix_hit: share of the prompt found in the prefix cache, 0 to 1; 0 where ``prefix_hits_hidden``.
            safe: hold the upper end of the band against the targets.

        Raises:
            BadInputError, NoCoefficientsError: as :meth:`step_time`.
        """
        work = self._workload(prompt_tokens, output_tokens, prefix_hit)
        return planned(self._times, work, itl_ms, ttft_ms, rate, safe=safe)

    def _workload(self, prompt_tokens: object, output_tokens: object, prefix_hit: object) -> Workload:
        work = Workload.of(prompt_tokens, output_tokens, prefix_hit)
        if self.prefix_hits_hidden and prefix_hit:
            raise BadInputError(
                "prefix_hit",
                "the telemetry of this configuration hides prefix hits, so the usual ones are in the price of a "
                "prompt's token already; ask without it",
            )
        return work

    @cached_property
    def _model(self) -> StepModel:
        return StepModel(self._described, self.limits, self.at_unix_nano)

    @cached_property
    def _times(self) -> RequestTimes:
        return RequestTimes(self._model, self._described)


def _limits(document: ConfigDocument) -> Limits:
    """From the facts, where they are whole and positive."""

    def fact(name: str) -> int | None:
        value = document.facts.get(name)
        return value if type(value) is int and _LEAST.get(name, 1) <= value <= _LIMIT_MAX else None

    blocks, block_size = fact("num_gpu_blocks"), fact("block_size")
    return Limits(
        fact("max_num_seqs"),
        fact("max_num_batched_tokens"),
        blocks * block_size if blocks and block_size else None,
    )
