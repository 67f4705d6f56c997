"""Single requests: what tracefit says of them beside what routers learn.

All learn from those delivered before the cut and are judged on the last half of those after it:

    request              TTFT at what the request met on arrival, TPOT at the mean batch it met while it decoded
    request at arrival   both at what it met on arrival, which is what the baselines know
    trees                gradient-boosted trees on ``ROUTER_FEATURES`` at arrival
    ridge                Bayesian ridge on the same, standardized

The client is asked with the mean output of the learned requests: nobody knows an answer's length before it ends. Both
baselines are scikit-learn's, with its default settings and a fixed seed; without it only the client is scored.

A request met, of the others at its arrival A_i, F first and E last token, N output tokens:

    running   #{j : F_j <= A_i < E_j}           waiting   #{j : A_j < A_i < F_j}
    tokens so far   sum over the running of N_j (A_i - F_j) / (E_j - F_j)
    KV usage        (their prompts + tokens so far) / capacity, 0 where nobody said the capacity

and while it decoded the mean of #{j : F_j <= t < E_j} over F_i <= t < E_i, itself included. Counted from the spans of
finished requests: those that never ended are missing in all columns alike.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import tracefit
from online import Floats, Mask

from .systems import Score, ape

ROUTER_FEATURES = ("prompt tokens", "running", "waiting", "KV usage", "tokens so far")


class ServedRequests:
    """Many of them by column, in order of arrival; times in seconds since the first, TTFT and TPOT in microseconds."""

    def __init__(self, requests: NDArray[Any]) -> None:
        arrived_ns = requests["first_token_ns"]
        for name in ("queued_ns", "arrived_ns"):  # as far as that was seen
            arrived_ns = np.where(requests[name] > 0, requests[name], arrived_ns)
        order = np.lexsort((requests["delivered_ns"], arrived_ns))
        stamps = np.array([arrived_ns, requests["first_token_ns"], requests["finished_ns"]])[:, order]
        usable = (stamps[0] < stamps[1]) & (stamps[1] <= stamps[2])
        stamps, kept = stamps[:, usable], requests[order][usable]
        self.arrived_s, self.first_s, self.last_s = (stamps - stamps.min(initial=stamps.max(initial=0))) / 1e9
        self.prompt_tokens, self.output_tokens = (kept[f"{of}_tokens"].astype(float) for of in ("prompt", "output"))
        self.delivered_ns, self.engine = kept["delivered_ns"], kept["engine"]
        self.ttft_us = 1e6 * (self.first_s - self.arrived_s)
        self.tpot_us = 1e6 * (self.last_s - self.first_s) / np.maximum(self.output_tokens - 1.0, 1.0)

    def met_at_arrival(self, kv_tokens: float) -> Floats:
        """``ROUTER_FEATURES`` of each; what share of a prompt was in the prefix cache is in no span."""
        rate = self.output_tokens / np.maximum(self.last_s - self.first_s, 1e-9)
        met = []
        for at_s, prompt, engine in zip(self.arrived_s, self.prompt_tokens, self.engine, strict=True):
            runs = (self.first_s <= at_s) & (at_s < self.last_s) & (self.engine == engine)
            waits = (self.arrived_s < at_s) & (at_s < self.first_s) & (self.engine == engine)
            so_far = float(rate[runs] @ (at_s - self.first_s[runs]))
            usage = (self.prompt_tokens[runs].sum() + so_far) / kv_tokens if kv_tokens else 0.0
            met.append((prompt, runs.sum(), waits.sum(), usage, so_far))
        return np.array(met, float).reshape(-1, len(ROUTER_FEATURES))

    def met_while_decoding(self) -> Floats:
        """Mean number in the batch over each request's own time in it, at least itself."""
        met = []
        for first_s, last_s, engine in zip(self.first_s, self.last_s, self.engine, strict=True):
            beside_s = np.minimum(self.last_s, last_s) - np.maximum(self.first_s, first_s)
            beside_s = beside_s[(beside_s > 0.0) & (self.engine == engine)]
            met.append(beside_s.sum() / max(last_s - first_s, 1e-9))
        return np.maximum(met, 1.0)


LEARNED_MIN = 100
JUDGED_MIN = 20
NOT_INSTALLED = "the baselines trees and ridge need scikit-learn: install tracefit's extra evaluate"
BASELINES = ("trees", "ridge")


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every model on the requests of one capture; ``note`` says why one is missing."""

    learned: int
    judged: int
    scores: list[Score]
    note: str = ""


Times = tuple[Floats, Floats]
"""TTFT and TPOT of each request, us."""


def judge_requests(
    requests: NDArray[Any], config: tracefit.Config | None, cut_ns: int, end_ns: int
) -> RequestReport | None:
    """Every model side by side; None where there are too few requests, or nothing was learned of steps."""
    served = ServedRequests(requests)
    several = served.output_tokens > 1
    learned = several & (served.delivered_ns <= cut_ns)
    judged = several & (served.delivered_ns > cut_ns + (end_ns - cut_ns) // 2)
    if config is None or learned.sum() < LEARNED_MIN or judged.sum() < JUDGED_MIN:
        return None
    met = served.met_at_arrival(float(config.limits.kv_tokens or 0))
    output, prompts = float(served.output_tokens[learned].mean()), served.prompt_tokens[judged]
    note, scores = "", []
    try:
        at_arrival = asked(config, prompts, output, 1.0 + met[judged, 1] + met[judged, 2])
        decoding = asked(config, prompts, output, served.met_while_decoding()[judged])
    except tracefit.TracefitError as error:
        note = str(error)
    else:
        times = {"request": (at_arrival[0], decoding[1]), "request at arrival": at_arrival}
        if importlib.util.find_spec("sklearn") is None:
            note = NOT_INSTALLED
        else:
            times |= {name: said_by(name, met, served, learned, judged) for name in BASELINES}
        scores = [_request_score(name, each, served, judged) for name, each in times.items()]
    return RequestReport(learned=int(learned.sum()), judged=int(judged.sum()), scores=scores, note=note)


def asked(config: tracefit.Config, prompt_tokens: Floats, output: float, concurrency: Floats) -> Times:
    """What the client says of each."""
    said = [
        config.request(prompt_tokens=prompt, output_tokens=output, concurrency=met)
        for prompt, met in zip(prompt_tokens.tolist(), concurrency.tolist(), strict=True)
    ]
    return np.array([each.ttft.us for each in said]), np.array([each.itl.us for each in said])


def said_by(name: str, met: Floats, served: ServedRequests, learned: Mask, judged: Mask) -> Times:
    """What a baseline says of those that are judged: a model each for TTFT and TPOT, fitted to those before."""
    # an extra, and a second to import
    from sklearn import ensemble, linear_model, pipeline, preprocessing  # noqa: PLC0415
    from threadpoolctl import threadpool_limits  # noqa: PLC0415 - comes with scikit-learn

    if name == "trees":
        model: Any = ensemble.HistGradientBoostingRegressor(random_state=0)
    else:
        model = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.BayesianRidge())
    with threadpool_limits(1):  # threads that wait for a core cost more than they bring
        ttft, tpot = (
            model.fit(met[learned], us[learned]).predict(met[judged]) for us in (served.ttft_us, served.tpot_us)
        )
    return ttft, tpot


def _request_score(model: str, times: Times, served: ServedRequests, judged: Mask) -> Score:
    """Relative errors."""
    score: Score = {"model": model}
    for name, predicted_us, observed_us in zip(("ttft", "tpot"), times, (served.ttft_us, served.tpot_us), strict=True):
        error = ape(predicted_us, observed_us[judged])
        score[f"{name}_median"], score[f"{name}_p90"] = np.quantile(error, (0.5, 0.9)).tolist()
    return score
