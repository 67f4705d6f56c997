"""What the corrector brings and costs: ``river:residual`` on recordings, at any load, and in a whole replay.

Recordings come from ``--captures DIR`` (``DIR/<name>/otlp.pb.gz``), else those that are bundled are scored and the
others are printed as skipped. ``--base TREE``: another version of the project to compare a replay's CPU time with. The
corrector's rates were chosen on these recordings.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from collector.config.learning_config import BankConfig
from collector.config.schema import Config
from online.features.registry import portable
from online.river import CONTEXT
from online.rows import STEP_FEATURES, RowBlock, Target
from online.target import TargetState
from tests.bench import captured
from tests.support.linear_steps import steps
from tests.support.paths import DATA, ROOT

NAMES = {"c1": "c1_mixed", "c2": "c2_long_prefill_mp", "c5": "c5_offload", "c6": "c6_saturated", "c7": "c7_async_sim"}
NAMES |= {"c10": "c10_long", "p1": "p1_engine_stats", "f1": "f1_fork_parity"}
WITH, WITHOUT = Config(feature_sets=("portable",)), Config(feature_sets=("portable",), learners=("rls",))
OTHERS = {
    name: Config(feature_sets=("portable",), learners=("rls", f"river:{name}"))
    for name in ("linear", "quantile", "linear_model.PARegressor", "tree.HoeffdingTreeRegressor")
}
OTHERS |= {
    f"detector {name}": Config(feature_sets=("portable",), learners=("rls",), bank=BankConfig(detector=name))
    for name in ("adwin", "page_hinkley", "none")
}
WORSE_MAX, COST_MAX_MC, CPU_RATIO = 0.3, 1.5, 0.75
LEARNED = 0.6
ROUNDS = 9


def lines(line, pool, captures, base):
    """Error with and without, cost by load, CPU time of a replay."""
    paths = {short: _otlp_of(name, captures) for short, name in NAMES.items()}
    there = {short: path for short, path in paths.items() if path is not None}
    better = 0
    for short in paths.keys() - there.keys():
        yield line(f"corrected prediction, {short}", "SKIPPED", "needs --captures", None)
    for short, found in zip(there, pool.map(_measure, there.values()), strict=True):
        without, corrected, frozen, frozen_corrected, share = found
        change = corrected - without
        better += change < -0.005
        what = f"MAPE %, {short}: x beta F, corrected ({100 * share:.0f} % of the rows are)"
        yield line(what, f"{without:.2f}, {corrected:.2f}", f"<= +{WORSE_MAX}", bool(change <= WORSE_MAX))
        yield line(f"  frozen after 60 %, the rest, {short}", f"{frozen:.2f}, {frozen_corrected:.2f}", "", None)
    yield line("recordings on which it is better", f"{better} of {len(there)}", ">= half", 2 * better >= len(there))
    for per_s in (20, 100, 1000, 10_000):
        cost, state = _cost_of(per_s)
        found, events = state.published.corrector.snapshot(), (state.last_ns - state.first_ns) / 1e9
        what = f"cost at {per_s} steps/s of event time ({found.rows['learned'] / events:.0f} rows/s learned)"
        yield line(what, f"{cost:.2f} mc", f"<= {COST_MAX_MC} mc", bool(found.active and cost <= COST_MAX_MC))
    for name, settings in OTHERS.items():
        yield line(f"{name}, at 1000 steps/s", f"{_cost_of(1000, settings)[0]:.2f} mc", "", None)
    yield from _replay_lines(line, there["c10"], base)


def _otlp_of(name, captures):
    path = (DATA if captures is None else captures) / name / "otlp.pb.gz"
    return path if path.exists() else None


# ------------------------------------------------------------------- error


def _measure(path):
    """MAPE without and with the corrector: prequential, and of the last 40 % frozen; share of the rows corrected."""
    kv = path.with_name("kv.jsonl.gz")
    rows = captured.step_rows([path, kv] if kv.exists() else [path])
    _, log = _learned(rows)
    r, c = (np.concatenate([each[k] for each in log]) for k in (0, 1))
    share = (c != 0.0).mean()
    without, corrected = (100 * np.abs(np.expm1(e)).mean() for e in (-r, c - r))
    cut = int(LEARNED * len(rows))
    state, _ = _learned(rows.slice(0, cut))
    rest = rows.slice(cut, len(rows))
    design = state.matrix.evaluate(rest).design
    model, corrector = state.models["portable"], state.published.corrector
    view = state.matrix.view(design, "portable")
    predicted = view.x @ model.members.slow.beta[: view.x.shape[1]] * np.exp(model.log_factors(view.cell))
    r = np.log(view.elapsed_us / predicted)
    context = CONTEXT.evaluate(rest, np.arange(len(rest)))
    c = corrector.active * corrector.correct(corrector.columns(context, int(view.end_ns[-1])))
    frozen, frozen_corrected = (100 * np.abs(np.expm1(e)).mean() for e in (-r, c - r))
    return without, corrected, frozen, frozen_corrected, share


def _learned(rows):
    """A target that has learned the rows; log ratio and correction of those in each block that were predicted."""
    state, log = _target(WITH), []
    shaped = state.published.shaped
    learn = shaped.learn

    def listening(block, log_ratio, corrected=None):
        if log_ratio is not None:
            log.append((log_ratio, np.zeros(len(block)) if corrected is None else np.log(corrected)))
        learn(block, log_ratio, corrected)

    shaped.learn = listening
    state.learn(rows)
    state.flush()
    del shaped.learn
    return state, log


def _target(settings):
    state = TargetState(Target.STEP_TIME, settings)
    state.offer(portable(Target.STEP_TIME), lambda _features: None)
    return state


# ------------------------------------------------------------------- cost


def _cost_of(per_s, settings=WITH):
    """Millicores that settings add to ``rls`` alone at so many steps per second of event time; the target at the end.

    CPU time of each few rows, the quietest of several rounds: their sum is little moved by other work.
    """
    seconds, part = max(8.0, 2000 / per_s), min(256, max(32, per_s // 4))
    rows = _queued(int(per_s * seconds) + 1024, per_s)
    starts = range(1024, len(rows), part)
    best = np.full((2, len(starts)), np.inf)
    for _ in range(ROUNDS):
        for added in (0, 1):
            state = _target(settings if added else WITHOUT)
            state.learn(rows.slice(0, 1024))
            for k, at in enumerate(starts):
                begin = time.process_time()
                state.learn(rows.slice(at, min(at + part, len(rows))))
                best[added, k] = min(best[added, k], time.process_time() - begin)
    without, spent = best.sum(axis=1)
    return 1000 * (spent - without) / seconds, state


def _queued(n, per_s):
    """Steps that take 5 % longer while requests wait, so that there is something to correct."""
    simulated = steps(n, 7, autocorrelation=0.9).rows
    raw, rng = simulated.raw.copy(), np.random.default_rng(3)
    waiting = rng.poisson(1.0, n)
    raw[:, STEP_FEATURES.index("waiting")] = waiting
    raw[:, STEP_FEATURES.index("kv_usage_ratio")] = rng.random(n)
    end_ns = 1_700_000_000_000_000_000 + (np.arange(n) * 1e9 / per_s).astype(np.int64)
    return RowBlock.of_lines(raw, simulated.elapsed_us * np.exp(0.05 * (waiting > 0)), end_ns=end_ns)


def _replay_lines(line, path, base):
    trees = {"this version": (ROOT, ())}
    trees["learners: [rls]"] = (ROOT, ("rls",))
    if base is not None:
        trees["base"] = (base, ())
    spent = {name: [] for name in trees}
    for _ in range(3):
        for name, (tree, learners) in trees.items():
            spent[name].append(_replay_cpu_s(tree, path, learners))
    least = {name: min(each) for name, each in spent.items()}
    alone = least["learners: [rls]"]
    yield line("replay of c10: CPU s, with learners: [rls]", f"{least['this version']:.2f}, {alone:.2f}", "", None)
    if base is None:
        yield line("replay of c10: CPU time / base", "SKIPPED", "needs --base", None)
    else:
        ratio = least["this version"] / least["base"]
        value = f"{ratio:.2f} ({least['base']:.2f} s)"
        yield line("replay of c10: CPU time / base", value, f"<= {CPU_RATIO}", bool(ratio <= CPU_RATIO))


def _replay_cpu_s(tree, path, learners):
    """User and system time of ``tracefit replay`` by another tree's own environment."""
    kv = path.with_name("kv.jsonl.gz")
    files = [str(path), *([str(kv)] if kv.exists() else [])]
    environment = {
        **os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    if learners:
        environment["TRACEFIT_LEARNERS"] = f"[{', '.join(learners)}]"
    python = tree / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as directory:
        command = [str(python if python.exists() else sys.executable), "-m", "collector", "replay", *files]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = ["--snapshot", str(Path(directory) / "snapshot.json")]
        subprocess.run([*command, *out], check=True, cwd=tree, env=environment, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
