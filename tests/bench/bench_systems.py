"""Every number of the systems, beside its target: ``make bench-systems``.

Streams of the simulator, H100 request tables and captures lie beside the project; where they are absent their section
is skipped, loudly. CPU time is process time of one thread.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.paths import ROOT

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from collector.config.load import load
from collector.config.schema import Config, JoinConfig
from collector.evaluate.captures import load as load_capture
from collector.evaluate.fits import NINE, ape, design, identifiable, learn, predict
from collector.evaluate.protocol import evaluate
from collector.identity.knowledge import Knowledge
from collector.identity.sheet_files import shipped_sheets
from collector.recordings.reader import Recording, TimedExport, merged
from collector.worker.build import make_pipeline
from collector.worker.pipeline import Pipeline
from online.features.registry import build
from online.features.sheets import architecture
from online.features.systems import SYSTEMS
from online.rows import STEP_FEATURES, RowBlock, Target
from online.snapshot import Snapshot
from online.transfer import population as transfer

SHARED = ROOT.parent / "shared"
STEP = Target.STEP_TIME
SEEN = ((0.25, "general", 0.5), (0.25, "codegen", 0.8), (0.2, "roleplay", 0.3), (0.15, "general", 1.1))
SEEN = (*SEEN, (0.15, "reasoning", 0.6))
UNSEEN = ((0.5, "prefill_heavy", 0.6), (0.5, "decode_heavy", 0.8))
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


def simulator():
    """The stream simulator, or None."""
    path = SHARED / "tools" / "streams.py"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("streams", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["streams"] = module
    spec.loader.exec_module(module)
    return module


def facts_of(cfg) -> dict:
    """The facts of a simulated configuration."""
    model = cfg.arch()
    config = {
        "model_type": "mixtral" if model["N"] else "llama",
        "hidden_size": model["d"],
        "intermediate_size": model["dff"],
        "num_hidden_layers": model["L"],
        "num_attention_heads": model["H"],
        "num_key_value_heads": model["kvh"],
        "vocab_size": model["V"],
        "num_local_experts": model["N"],
        "num_experts_per_tok": model["k"] or 1,
    }
    sheet = shipped_sheets()[{"H100": "H100-SXM", "A100": "A100-80"}[cfg.gpu]]
    return {
        **architecture(config),
        **sheet.facts("bfloat16"),
        "gpu": cfg.gpu,
        "tensor_parallel_size": cfg.tp,
        "max_num_batched_tokens": cfg.max_tok,
        "max_num_seqs": cfg.max_seqs,
        "max_model_len": 4096,
        "block_size": 16,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": cfg.prefix_hit > 0,
    }


def rows_of(stream) -> tuple[RowBlock, np.ndarray]:
    """Steps of a stream as rows, without empty ones and the first 60 (warm-up); and which of them are outliers."""
    s = stream.steps
    lines = np.full((stream.n, len(STEP_FEATURES)), np.nan)
    columns = {
        "prefill_tokens": s["pf_tok"],
        "prefill_requests": s["n_pf"],
        "decode_requests": s["n_dc"],
        "decode_tokens": s["n_dc"],
        "decode_context_tokens": s["sum_ctx"] + s["n_dc"],
        "prefill_attention": s["pf_work"],
        "requests": s["n_pf"] + s["n_dc"],
        "running": s["running"],
        "waiting": s["waiting"],
        "kv_usage_ratio": s["kv_used"] / stream.cfg.kv_blocks,
        "kv_blocks_used": s["kv_used"],
    }
    for name, values in columns.items():
        lines[:, STEP_FEATURES.index(name)] = values
    rows = RowBlock.of_lines(lines, s["cycle"], end_ns=np.cumsum(s["cycle"] * 1e3).astype(np.int64))
    used = (columns["requests"] > 0) & (np.arange(stream.n) >= 60)
    return rows.take(used), (s["outlier"] > 0)[used]


def unseen_workloads(streams) -> None:
    """Learned from some workloads, scored on others that never occurred."""
    print("\nUnseen workloads (simulator), step MAPE %, identifiable/columns")
    found: dict[str, list[float]] = {name: [] for name in NINE}
    for name, cfg in streams.CONFIGS.items():
        facts = facts_of(cfg)
        seen, _ = rows_of(streams.get(name, 12000, 905, SEEN))
        test, outlier = rows_of(streams.get(name, 6000, 906, UNSEEN))
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


def leave_one_configuration_out(streams) -> None:
    """Donors are the other configurations; the first rows after warm-up, scored on the last half."""
    print("\nLeave one simulated configuration out, physics, step MAPE %")
    physics = next(s for s in SYSTEMS if s.name == "physics")
    data = {}
    for name, cfg in streams.CONFIGS.items():
        rows, outlier = rows_of(streams.get(name, 12000, 907))
        half = np.arange(len(rows)) > len(rows) // 2
        data[name] = (facts_of(cfg), rows, rows.take(half & ~outlier))
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


def cost_of_a_prediction(streams) -> None:
    """One step of 128 requests, per system."""
    print("\nOne prediction for a step of 128 requests, us CPU")
    facts = facts_of(streams.CONFIGS["C_mixtral_h100_tp2"])
    rows, _ = rows_of(streams.get("C_mixtral_h100_tp2", 3000, 908))
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
    models = SHARED / "captures" / "models"
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
                {"match": {"recording": "*c0_smoke*"}, "model_config": str(models / "tinyA.config.json")},
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
    captures = load_capture(SHARED / "captures/c3_preempt/otlp.pb.gz", knowledge, JoinConfig(), CUT, quietly)
    evaluate(captures, NINE, learn_until=CUT, left_out="workload", version="bench", tell=quietly)
    print("\n" + verdict("evaluate, nine systems on 2,400 steps, s CPU", time.process_time() - start, 60.0))


def against_the_scorer(knowledge: Knowledge) -> None:
    """The same snapshot, scored by the independent scorer and by evaluate."""
    print("\nThe same snapshot by the scorer and by evaluate, percentage points apart")
    scorer = SHARED / "tools" / "score"
    for name in ("c5_offload", "c6_saturated", "c7_async_sim"):
        with tempfile.TemporaryDirectory() as directory:
            part, snapshot = Path(directory) / "part", Path(directory) / "s.json"
            call([sys.executable, str(scorer / "split.py"), name.split("_")[0], str(part)], scorer)
            pipeline = learned([part / "otlp.pb.gz"], make_pipeline(Config()))
            snapshot.write_bytes(pipeline.snapshot(1, 1).to_json())
            command = [sys.executable, str(scorer / "score.py"), "--snapshot", str(snapshot), "--json"]
            judged = json.loads(call([*command, "--capture", name.split("_")[0]], scorer))
            path = SHARED / "captures" / name / "otlp.pb.gz"
            captures = load_capture(path, knowledge, JoinConfig(), CUT, quietly)
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
    """Run a tool beside the project."""
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


def h100_request_tables() -> None:
    """Leave one workload out per model: learned from the others of it, prior from data sheets and donor models."""
    truth = SHARED / "ground_truth"
    configs = json.loads((truth / "configs.json").read_text())
    sys.path.insert(0, str(SHARED / "tools"))
    replay = importlib.import_module("replay")
    print("\nH100 request tables, leave one workload out per model, replayed: mean E2E error %, without prior / with")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tables = {}
        for experiment in configs:
            tables[experiment] = directory / f"{experiment}.pb.gz"
            tool = str(SHARED / "tools" / "requests_to_otlp.py")
            call([sys.executable, tool, experiment, str(tables[experiment])], SHARED)
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


def main() -> int:
    """All sections; exit 1 if a target is missed."""
    chosen = set(sys.argv[1:])
    streams = simulator()
    if streams is None:
        print("SKIPPED: no simulator beside the project: unseen workloads, transfer, cost of a prediction")
    elif not chosen or "simulated" in chosen:
        unseen_workloads(streams)
        leave_one_configuration_out(streams)
        cost_of_a_prediction(streams)
    if not (SHARED / "captures").exists():
        print("SKIPPED: no captures beside the project: cost of an evaluation, agreement with the scorer")
    elif not chosen or "captures" in chosen:
        knowledge = knowledge_of_captures()
        cost_of_an_evaluation(knowledge)
        against_the_scorer(knowledge)
    if not (SHARED / "ground_truth").exists():
        print("SKIPPED: no request tables beside the project: leave one H100 workload out")
    elif not chosen or "h100" in chosen:
        h100_request_tables()
    print("\n" + (f"MISSED: {', '.join(failures)}" if failures else "every target holds"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
