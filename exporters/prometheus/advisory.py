"""Advice from the coefficients, as metrics: what requests should see at the load of the last minutes, how many fit.

    predicted ITL, TTFT         tracefit.Config.request at the mix, beside what was observed of the same requests
    concurrency of a target     tracefit.Config.plan: most requests in flight whose mean ITL keeps it, for that mix
    usable                      the client's verdict; its reasons are on the status page and in /predict

Asked of the client once a generation, when the page is first rendered. Where coefficients should not be used yet there
is no advice: an autoscaler without a metric stays as it is. Observed TTFT is QUEUED -> FIRST_TOKEN plus the learned
means of what comes before and after, as the predicted one has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from exporters.client_view import ClientView
from exporters.labels import US_PER_S
from exporters.what_if import Mix, MixOf
from online import ConfigSnapshot, Snapshot
from tracefit import Config, TracefitError

_API_TARGETS = ("api_queueing", "first_response")


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
        """Everything that can be said of one configuration."""
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
            plan = client.plan(prompt_tokens=prompt, output_tokens=output, prefix_hit=hit, itl_ms=itl_ms)
            yield AdvisorySample("tracefit_slo_concurrency", plan.concurrency, (f"{itl_ms / 1e3:.6g}",))


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
