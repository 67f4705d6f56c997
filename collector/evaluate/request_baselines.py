"""TTFT and TPOT of single requests: the client's ``config.request`` beside what routers learn from request features.

All learn from the requests delivered before the cut and are judged on the last half of those after it, per request:

    request              TTFT at what the request met on arrival, TPOT at the mean batch it met while it decoded
    request at arrival   both at what it met on arrival, which is what the baselines are told
    trees                gradient-boosted trees on ``ROUTER_FEATURES`` at arrival
    ridge                Bayesian ridge on the same, standardized

The client is asked with the mean output of the learned requests: nobody knows an answer's length before it ends. Both
baselines are scikit-learn's, with its default settings and a fixed seed; without it only the client is scored.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

import tracefit
from online import Floats

from .captures import ServedRequest, ServedRequests, by_column

LEARNED_MIN = 100
JUDGED_MIN = 20
NOT_INSTALLED = "the baselines trees and ridge need scikit-learn: install tracefit's extra evaluate"
BASELINES = ("trees", "ridge")


class RequestScore(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of one model over single requests, ratios."""

    model: str
    ttft_median: float
    ttft_p90: float
    tpot_median: float
    tpot_p90: float


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every model on the requests of one capture; ``note`` says why one is missing."""

    learned: int
    judged: int
    scores: list[RequestScore]
    note: str = ""


class Times(NamedTuple):
    """Predicted times of each request, us."""

    ttft_us: Floats
    tpot_us: Floats


def judge_requests(
    requests: list[ServedRequest], config: tracefit.Config | None, cut_ns: int, end_ns: int
) -> RequestReport | None:
    """Every model side by side; None where there are too few requests, or nothing was learned of steps."""
    served = by_column(requests)
    learned = served.delivered_ns <= cut_ns
    judged = served.delivered_ns > cut_ns + (end_ns - cut_ns) // 2
    several = served.output_tokens > 1
    learned, judged = learned & several, judged & several
    if config is None or learned.sum() < LEARNED_MIN or judged.sum() < JUDGED_MIN:
        return None
    met = served.met_at_arrival(float(config.limits.kv_tokens or 0))
    output = float(served.output_tokens[learned].mean())
    try:
        at_arrival = asked(config, served.prompt_tokens[judged], output, 1.0 + met[judged, 1] + met[judged, 2])
        decoding = asked(config, served.prompt_tokens[judged], output, served.met_while_decoding()[judged])
    except tracefit.TracefitError as error:
        return RequestReport(learned=int(learned.sum()), judged=int(judged.sum()), scores=[], note=str(error))
    times = {
        "request": Times(at_arrival.ttft_us, decoding.tpot_us),
        "request at arrival": at_arrival,
    }
    note = NOT_INSTALLED
    if importlib.util.find_spec("sklearn") is not None:
        from threadpoolctl import threadpool_limits  # noqa: PLC0415 - comes with scikit-learn

        note = ""
        with threadpool_limits(1):  # threads that wait for a core cost more than they bring
            for name in BASELINES:
                model = fitted(name, met[learned], served, learned)
                times[name] = Times(*(one.predict(met[judged]) for one in model))
    scores = [_score(name, each, served, judged) for name, each in times.items()]
    return RequestReport(learned=int(learned.sum()), judged=int(judged.sum()), scores=scores, note=note)


def asked(config: tracefit.Config, prompt_tokens: Floats, output: float, concurrency: Floats) -> Times:
    """What the client says of each."""
    said = [
        config.request(prompt_tokens=prompt, output_tokens=output, concurrency=met)
        for prompt, met in zip(prompt_tokens.tolist(), concurrency.tolist(), strict=True)
    ]
    return Times(np.array([each.ttft.us for each in said]), np.array([each.itl.us for each in said]))


def fitted(name: str, features: Floats, served: ServedRequests, learned: NDArray[np.bool_]) -> tuple[Any, Any]:
    """A baseline for TTFT and one for TPOT."""
    one, two = _regressor(name), _regressor(name)
    return one.fit(features, served.ttft_us[learned]), two.fit(features, served.tpot_us[learned])


def _regressor(name: str) -> Any:
    if name == "trees":
        from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415 - an extra, and a second to import

        return HistGradientBoostingRegressor(random_state=0)
    from sklearn.linear_model import BayesianRidge  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    return make_pipeline(StandardScaler(), BayesianRidge())


def _score(model: str, times: Times, served: ServedRequests, judged: NDArray[np.bool_]) -> RequestScore:
    ttft, tpot = (
        np.abs(predicted / observed[judged] - 1.0)
        for predicted, observed in ((times.ttft_us, served.ttft_us), (times.tpot_us, served.tpot_us))
    )
    return RequestScore(
        model=model,
        ttft_median=float(np.median(ttft)),
        ttft_p90=float(np.quantile(ttft, 0.9)),
        tpot_median=float(np.median(tpot)),
        tpot_p90=float(np.quantile(tpot, 0.9)),
    )
