"""What the level and River's residual model bring, on recordings. Called by tests/bench/bench_learning.py.

The constants of both were chosen on ``CHOSEN_ON``; the means over the others are the figures to quote. Errors are of
every row, by what was known before it, and count 100 % at most. Recordings that are not there are left out, loudly.
"""

from concurrent.futures import ProcessPoolExecutor

import numpy as np

from collector.config.schema import Config
from online.errors import PrequentialError
from online.features import portable
from online.rows import Target
from online.target import TargetState
from tests.support.pipelines import new_pipeline, step_rows

CHOSEN_ON = ("c0_smoke", "c1_mixed", "c3_preempt", "c5_offload", "c9_dp2", "p1_engine_stats")
OTHERS = ("c2_long_prefill_mp", "c4_abort_errors", "c6_saturated", "c7_async_sim", "c10_long", "f1_fork_parity")
LEVEL, WITHOUT_RIVER = Config(feature_sets=("portable",)), Config(feature_sets=("portable",), learners=("rls",))
PUBLISHED_MAX = (6.4, 10.3)


def measure(board):
    """Error without level, with it, and with River's model."""
    paths = {name: board.captures / name / "otlp.pb.gz" for name in (*CHOSEN_ON, *OTHERS)}
    there = [name for name, path in paths.items() if path.exists()]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(there, pool.map(errors_of, [paths[name] for name in there]), strict=True))
    for name in paths:
        value = _three(found[name]) if name in found else "SKIPPED, needs --captures"
        board.line(f"median / mean error, {name}: x beta F, level, level and River", value)
    for title, names in (("all", there), ("chosen on", CHOSEN_ON), ("others", OTHERS)):
        if not (known := [found[name] for name in names if name in found]):
            continue
        mean = np.mean(known, axis=0)
        target = (f"<= {PUBLISHED_MAX}", bool((mean[2] <= PUBLISHED_MAX).all())) if title == "all" else ()
        board.line(f"  mean over {len(known)} recordings, {title}", _three(mean), *target)


def _three(errors):
    return "; ".join(f"{median:.2f} / {mean:.2f}" for median, mean in errors)


def errors_of(path):
    """Median and mean error in per cent of x beta F, with the level, and with River's model, (3, 2)."""
    kv = path.with_name("kv.jsonl.gz")
    _, rows = step_rows(new_pipeline(), [path, kv] if kv.exists() else [path])
    (shaped, level), (_, both) = (learned_errors(rows, settings) for settings in (WITHOUT_RIVER, LEVEL))
    return np.array([(100 * np.median(error), 100 * np.minimum(error, 1.0).mean()) for error in (shaped, level, both)])


def learned_errors(rows, settings):
    """Relative error of x beta F and of what is published, of every row that was predicted, (n,) each."""
    state = TargetState(Target.STEP_TIME, settings)
    state.add_features(portable(Target.STEP_TIME))
    kept = state.published.shaped_error, state.published.error = _UndecayedError(), _UndecayedError()
    state.learn(rows)
    state.flush()
    return [np.concatenate(each.ape) for each in kept]


class _UndecayedError(PrequentialError):
    """Forgets nothing."""

    __slots__ = ("ape",)

    def __init__(self):
        super().__init__()
        self.ape = []

    def learn(self, ape):
        super().learn(ape)
        self.ape.append(ape)
