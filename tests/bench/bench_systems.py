"""Every number of the systems, beside its target: ``make bench WHAT=systems``; CPU time is process time of one thread.

Names of sections run only those: simulated recordings, and with arguments (tests/bench/outside.py) scorer (``--tools``)
and h100 (``--tools``, ``--tables``), which are skipped, loudly, without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from collector.config.learning_config import JoinConfig
from collector.config.load import load
from collector.config.schema import Config
from collector.evaluate.captures import load as load_capture
from collector.evaluate.fits import NINE, ape, design, identifiable, learn, predict
from collector.evaluate.protocol import evaluate
from collector.identity.knowledge import Knowledge
from collector.recordings.reader import Recording, TimedExport, merged
from collector.worker.build import make_pipeline
from collector.worker.pipeline import Pipeline
from online.features.registry import build
from online.features.systems import SYSTEMS
from online.rows import STEP_FEATURES, RowBlock, Target
from online.snapshot import Snapshot
from online.transfer import population as transfer
from tests.bench.outside import Outside, add_arguments, outside_of
from tests.support.paths import DATA
from tests.support.recordings import otlp_file
from tests.support.roofline_steps import MACHINES, WARM_UP_STEPS, Segment, Stream, simulate

STEP = Target.STEP_TIME
SEEN = (Segment(0.25, "chat", 0.5), Segment(0.25, "code", 0.8), Segment(0.2, "chat", 0.3), Segment(0.15, "chat", 1.1),
        Segment(0.15, "reasoning", 0.6))  # fmt: skip
UNSEEN = (Segment(0.5, "summaries", 0.6), Segment(0.5, "stories", 0.8))
CUT = 0.6

failures: list[str] = []


def verdict(name: str, value: float, limit: float) -> str:
    """The figure beside its target; a miss is remembered."""
    held = value <= limit
    if not held:
        failures.append(name)
    return f"{name:<52} {value:8.2f}   target <= {limit:g}   {'holds' if held else 'MISSED'}"


def quietly(*_: object) -> None:
    """Nobody listens."""


def rows_of(stream: Stream) -> tuple[RowBlock, np.ndarray]:
    """Steps of a stream without the first (warm-up), and which of them are outliers."""
    used = np.arange(len(stream.rows)) >= WARM_UP_STEPS
    return stream.rows.take(used), stream.outlier[used]


def unseen_workloads() -> None:
    """Learned from some workloads, scored on others that never occurred."""
    print("\nUnseen workloads (simulator), step MAPE %, identifiable/columns")
    found: dict[str, list[float]] = {name: [] for name in NINE}
    for name, machine in MACHINES.items():
        facts = machine.facts()
        seen, _ = rows_of(simulate(name, 12_000, 905, SEEN))
        test, outlier = rows_of(simulate(name, 6000, 906, UNSEEN))
        test = test.take(~outlier)
        cells = []
        for system in NINE:
            features = build(system, STEP, facts)
            error = 100 * float(ape(predict(learn(features, seen), features, test), test.elapsed_us).mean())
            found[system].append(error)
            cells.append(f"{system} {error:.1f} ({identifiable(features, seen)}/{len(features)})")
        print(f"  {name:<20} " + "  ".join(cells))
    print(verdict("physics, worst configuration, %", max(found["physics"]), 7.0))
    print(verdict("physics, median over configurations, %", float(np.median(found["physics"])), 3.0))


def leave_one_configuration_out() -> None:
    """Donors are the other configurations; the first rows after warm-up, scored on the last half."""
    print("\nLeave one simulated configuration out, physics, step MAPE %")
    physics = next(s for s in SYSTEMS if s.name == "physics")
    data = {}
    for name, machine in MACHINES.items():
        rows, outlier = rows_of(simulate(name, 12_000, 907, SEEN + UNSEEN))
        half = np.arange(len(rows)) > len(rows) // 2
        data[name] = (machine.facts(), rows, rows.take(half & ~outlier))
    donors = {n: transfer.donor_of(n, f, learn(physics.live(STEP, f), r)) for n, (f, r, _) in data.items()}
    worst = {20: 0.0, 100: 0.0}
    for name, (facts, rows, test) in data.items():
        features = physics.live(STEP, facts)
        prior = transfer.pool(physics, STEP, [d for n, d in donors.items() if n != name]).prior(facts)
        zero = 100 * float(ape(features.evaluate(test) @ prior.mean[: len(features)], test.elapsed_us).mean())
        cells = [f"zero-shot {zero:.1f}"]
        for count in (20, 50, 100, 500):
            for kind, start in (("", prior), ("cold ", None)):
                model = learn(features, rows.slice(0, count), prior=start)
                error = 100 * float(ape(predict(model, features, test), test.elapsed_us).mean())
                cells.append(f"{kind}@{count} {error:.1f}")
                if start is not None and count in worst:
                    worst[count] = max(worst[count], error)
        print(f"  {name:<20} " + "  ".join(cells))
    print(verdict("worst configuration after 20 rows, %", worst[20], 10.0))
    print(verdict("worst configuration after 100 rows, %", worst[100], 8.0))


def cost_of_a_prediction() -> None:
    """One step of 128 requests, per system."""
    print("\nOne prediction for a step of 128 requests, us CPU")
    facts = MACHINES["mixtral_h100_tp2"].facts()
    rows, _ = rows_of(simulate("mixtral_h100_tp2", 3000, 908, SEEN))
    step = rows.slice(1000, 1001)
    step.raw[:, STEP_FEATURES.index("requests")] = 128.0
    slowest = 0.0
    cells = []
    for system in NINE:
        features = build(system, STEP, facts)
        model = learn(features, rows.slice(0, 600))
        model.predict(design(features, step))
        start = time.process_time()
        for _ in range(300):
            model.predict(design(features, step))
        spent = (time.process_time() - start) / 300 * 1e6
        slowest = max(slowest, spent)
        cells.append(f"{system} {spent:.0f}")
    print("  " + "  ".join(cells))
    print(verdict("slowest system, us", slowest, 1000.0))


def knowledge_of_captures() -> Knowledge:
    """The captures' models and machine, as a user would configure them."""
    models = DATA / "models"
    knobs = {
        "gpu": "cpu-capture",
        "dtype": "float32",
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "max_model_len": 2048,
        "block_size": 32,
    }
    tree = {
        "configurations": {
            "hardware_file": str(models / "hardware.json"),
            "rules": [
                {"facts": knobs, "model_config": str(models / "modelB.config.json")},
                {"match": {"recording": "*c9_dp2*"}, "model_config": str(models / "tinyA.config.json")},
            ],
        }
    }
    return Knowledge(configured(tree).configurations)


def configured(tree: dict) -> Config:
    """A configuration as its file would say it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(tree, file)
        file.flush()
        return load(Path(file.name), {})


def cost_of_an_evaluation(knowledge: Knowledge) -> None:
    """All nine systems on one capture of 2,400 steps."""
    start = time.process_time()
    captures = load_capture([Recording(otlp_file("c3_preempt"), quietly)], knowledge, JoinConfig(), CUT)
    evaluate(captures, NINE, learn_until=CUT, left_out="workload", version="bench", tell=quietly)
    print("\n" + verdict("evaluate, nine systems on 2,400 steps, s CPU", time.process_time() - start, 60.0))


def against_the_scorer(knowledge: Knowledge, outside: Outside) -> None:
    """The same snapshot, scored by the independent scorer and by evaluate."""
    print("\nThe same snapshot by the scorer and by evaluate, percentage points apart")
    scorer = outside.tools / "score"
    for name in ("c5_offload", "c6_saturated", "c7_async_sim"):
        with tempfile.TemporaryDirectory() as directory:
            part, snapshot = Path(directory) / "part", Path(directory) / "s.json"
            call([sys.executable, str(scorer / "split.py"), name.split("_")[0], str(part)], scorer)
            pipeline = learned([part / "otlp.pb.gz"], make_pipeline(Config()))
            snapshot.write_bytes(pipeline.snapshot(1, 1).to_json())
            command = [sys.executable, str(scorer / "score.py"), "--snapshot", str(snapshot), "--json"]
            judged = json.loads(call([*command, "--capture", name.split("_")[0]], scorer))
            path = Path(outside.score("capture").path_of(name)) / "otlp.pb.gz"  # with its truth, where it has one
            captures = load_capture([Recording(path, quietly)], knowledge, JoinConfig(), CUT)
            report = evaluate(
                captures,
                ("portable",),
                learn_until=CUT,
                left_out="workload",
                version="bench",
                tell=quietly,
                snapshot=Snapshot.from_json(snapshot.read_bytes()),
            )
        ours = next(s for s in report.captures[0].scores if s.system == "snapshot/portable")
        for label, own, theirs in (
            ("step MAPE", ours.step_mape, judged["step"]["mape"]),
            ("mean E2E", ours.e2e, judged["request"]["e2e_mean_err"]),
        ):
            print(f"  {name} {label}: evaluate {100 * own:.2f}, scorer {theirs:.2f}")
            print("  " + verdict(f"{name} {label}, apart", abs(100 * own - theirs), 0.5))


def call(command: list[str], cwd: Path) -> str:
    """Run a tool from outside."""
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def learned(paths: list[Path], pipeline: Pipeline) -> Pipeline:
    """A pipeline that was fed recordings, as ``replay`` does."""
    batch = []
    for timed in merged([Recording(path, quietly) for path in paths]):
        if isinstance(timed, TimedExport):
            batch.append(timed.export)
        if len(batch) == 64:
            pipeline.process(batch)
            batch = []
    pipeline.process(batch)
    pipeline.flush()
    return pipeline


def h100_request_tables(outside: Outside) -> None:
    """Leave one workload out per model: learned from the others of it, prior from data sheets and donor models."""
    configs, replay = outside.experiments(), outside.replay()
    print("\nH100 request tables, leave one workload out per model, replayed: mean E2E error %, without prior / with")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tables = {}
        for experiment in configs:
            tables[experiment] = outside.as_otlp(experiment, directory / f"{experiment}.pb.gz")
        models = {experiment: config["model_short"] for experiment, config in configs.items()}
        tree = {"learners": ["rls"], "feature_sets": ["portable", "physics"]}
        tree["configurations"] = {"rules": model_rules(configs, directory)}
        states = {}
        for model in sorted(set(models.values())):
            mine = [tables[e] for e, m in models.items() if m == model]
            states[model] = directory / f"{model}.bin"
            states[model].write_bytes(learned(mine, make_pipeline(configured(tree))).state())
        errors: dict[str, float] = {}
        for experiment, model in models.items():
            others = [tables[e] for e, m in models.items() if m == model and e != experiment]
            donors = [str(path) for other, path in states.items() if other != model]
            cells = []
            for chosen in ([], donors):
                snapshot = learned(others, make_pipeline(configured({**tree, "donors": chosen}))).snapshot(1, 1)
                form = replay.from_tracefit(json.loads(snapshot.to_json()))
                with contextlib.redirect_stdout(None):
                    found = replay.evaluate(form, only=experiment)
                cells.append(100 * abs(found[experiment]["e2e"]) if experiment in found else float("nan"))
            print(f"  {experiment:<46} {cells[0]:6.1f} / {cells[1]:6.1f}", flush=True)
            errors[experiment] = cells[1]
    usual = [error for experiment, error in errors.items() if "reasoning" not in experiment]
    print(verdict("non-reasoning runs, mean |E2E error|, %", float(np.mean(usual)), 10.0))


def model_rules(configs: dict, directory: Path) -> list[dict]:
    """A config.json per model, and the rule that names it."""
    rules = {}
    for config in configs.values():
        shape = config["model_config"]
        path = directory / f"{config['model_short']}.json"
        path.write_text(
            json.dumps(
                {
                    "model_type": "mixtral" if shape["num_local_experts"] else "llama",
                    "hidden_size": shape["hidden_dim"],
                    "intermediate_size": shape["intermediate_dim"],
                    "num_hidden_layers": shape["num_layers"],
                    "num_attention_heads": shape["num_heads"],
                    "num_key_value_heads": shape["num_kv_heads"],
                    "vocab_size": shape["vocab_size"],
                    "num_local_experts": shape["num_local_experts"],
                    "num_experts_per_tok": shape["num_experts_per_tok"] or 1,
                }
            )
        )
        rules[config["model_id"]] = {"match": {"model": config["model_id"]}, "model_config": str(path)}
    return list(rules.values())


def simulated(_outside: Outside) -> None:
    """What streams of roofline machines can say."""
    unseen_workloads()
    leave_one_configuration_out()
    cost_of_a_prediction()


def recordings(_outside: Outside) -> None:
    """What bundled recordings can say."""
    cost_of_an_evaluation(knowledge_of_captures())


def scorer(outside: Outside) -> None:
    """What an independent scorer says."""
    against_the_scorer(knowledge_of_captures(), outside)


SECTIONS = {"simulated": simulated, "recordings": recordings, "scorer": scorer, "h100": h100_request_tables}
NEEDS = {"scorer": ("tools",), "h100": ("tools", "tables")}


def main() -> int:
    """All sections; exit 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="default: all")
    add_arguments(parser)
    options = parser.parse_args()
    for name in options.sections or SECTIONS:
        lacking = [need for need in NEEDS.get(name, ()) if getattr(options, need) is None]
        if lacking:
            print(f"\nSKIPPED {name}: needs " + ", ".join(f"--{need}" for need in lacking))
        else:
            SECTIONS[name](outside_of(options))
    print("\n" + (f"MISSED: {', '.join(failures)}" if failures else "every target holds"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
