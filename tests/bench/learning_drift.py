"""Changes of speed: how soon they are reported, what is reported of machines that did not change, the error after.

Constants of the test were chosen on the recordings and on the machines of tests/support/uneven_steps.py with seeds
below 200; here are seeds from 7000 on. Called by tests/bench/bench_learning.py.
"""

from concurrent.futures import ProcessPoolExecutor

import numpy as np

from online.change import DETECTORS
from tests.bench.learning_level import WITHOUT_RIVER, learned_errors
from tests.support.pipelines import new_pipeline, step_rows
from tests.support.uneven_steps import STEADY, plain, ramp, since, uneven
from tests.support.watched import Watched

CALM = ("c1_mixed", "c2_long_prefill_mp", "c5_offload", "c6_saturated", "c7_async_sim", "c10_long")
CALM += ("f1_fork_parity", "p1_engine_stats")
SEEDS, FALSE_SEEDS, SLOW_SEEDS = range(7000, 7020), range(7000, 7025), range(7000, 7006)
DETECTOR_SEEDS, PREFILL_LIMIT = range(7000, 7010), 1500
ONSET = 8000
LIMITS = {1.38: 200, 1.15: 450}
"""New time per old time, and the rows within which it must be reported."""
PREFILL_MAX, RAMP_MAX = 1.5, 1.15
"""Error by that before the change: of x beta F after it, the worst seed; of what is published in a ramp, the mean."""


def measure(board):
    """Recordings as they are, and each detector on the same medians of machines that change and that do not."""
    for name in CALM:
        path = board.captures / name / "otlp.pb.gz"
        reports = len(Watched(step_rows(new_pipeline(), [path])[1]).reports) if path.exists() else None
        value, good = ("SKIPPED, needs --captures", None) if reports is None else (reports, not reports)
        board.line(f"reports, {name} as it is", value, "0", good)
    with ProcessPoolExecutor() as pool:
        for kind in STEADY:
            counts = list(pool.map(_reports, [(kind, seed) for seed in FALSE_SEEDS]))
            board.at_most(f"false reports per 1e6, {kind}", 1e6 * sum(counts) / (len(counts) * 20_000), 10)
        doubled = np.max([*pool.map(_slow, [("iid", seed, "prefill") for seed in SLOW_SEEDS])], axis=0)
        board.at_most(f"prefill x2: x beta F, 6,000 rows after, worst of {len(SLOW_SEEDS)}", doubled[1, 0], PREFILL_MAX)
        for kind in ("iid", "ar"):
            ratios = np.array([*pool.map(_slow, [(kind, seed, "ramp") for seed in SLOW_SEEDS])])
            mean, what = ratios.mean(axis=0), f"ramp x1.3 over 5,000 rows, {kind}"
            board.at_most(f"{what}: published, last 1,500 rows, mean", mean[0, 1], RAMP_MAX)
            board.keep(f"{what}: the same, worst", ratios[:, 0, 1].max())
            board.keep(f"{what}: x beta F, last 1,500 rows, mean", mean[0, 0])
            board.keep(f"{what}: published, 1,000 rows after", mean[1, 1])
            board.keep(f"{what}: x beta F, 1,000 rows after", mean[1, 0])
        for detector in DETECTORS[:-1]:
            _measure_detector(board, pool, detector)


def _measure_detector(board, pool, detector):
    """Rows until it reports, and false reports; only the default has targets."""
    judged = detector == DETECTORS[0]
    for gain, limit in LIMITS.items():
        rows = int(np.median(list(pool.map(_delay, [(f"x{gain}", seed, detector) for seed in DETECTOR_SEEDS]))))
        target = (f"<= {limit} rows", rows <= limit) if judged else ()
        board.line(f"{detector}: uneven machines x{gain}, median of 10", f"{rows} rows", *target)
    within = sum(rows <= PREFILL_LIMIT for rows in pool.map(_delay, [("prefill", seed, detector) for seed in SEEDS]))
    target = (">= 16", within >= 16) if judged else ()
    board.line(f"{detector}: prefill x2 reported within {PREFILL_LIMIT} rows", f"{within} of {len(SEEDS)}", *target)
    jobs = [(kind, seed, detector) for kind in STEADY for seed in DETECTOR_SEEDS]
    board.line(
        f"{detector}: false reports per 1e6, all kinds",
        f"{1e6 * sum(pool.map(_reports, jobs)) / (len(jobs) * 20_000):.0f}",
    )


def _delay(job):
    what, seed, detector = job
    n = ONSET + 2500
    change = since(n, ONSET, 2.0 if what == "prefill" else float(what[1:]))
    rows = plain("iid", seed, n, prefill_gain=change) if what == "prefill" else uneven(seed, n, speed=change)
    return Watched(rows, detector).reported_after(ONSET)


def _reports(job):
    kind, seed, *detector = job
    return len(Watched(plain(kind, seed), *detector).reports)


def _slow(job):
    """Errors of x beta F and of what is published, by those before: rows 3,500 to 5,000 of it and 6,000 on, (2, 2)."""
    kind, seed, what = job
    n = ONSET + 6500
    change = {"speed": ramp(n, ONSET, 5000, 1.3)} if what == "ramp" else {"prefill_gain": since(n, ONSET, 2.0)}
    errors = np.array(learned_errors(plain(kind, seed, n, **change), WITHOUT_RIVER))
    calm = errors[:, -8500:-6500].mean(axis=1)
    return [errors[:, rows].mean(axis=1) / calm for rows in (slice(-3000, -1500), slice(-500, None))]
