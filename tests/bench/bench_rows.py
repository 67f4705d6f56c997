"""Every number promised about rows, beside its target: ``make bench WHAT=rows TOOLS=DIR TABLES=DIR``.

gates  the error of each label of telemetry on recordings
h100   what BLIS is given of measured servers, learned from their request spans, and how it predicts their last fifth
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from collector.config.schema import Config
from collector.decode import Export
from collector.service.pipeline import make_pipeline
from exporters.blis import blis_coefficients
from online.snapshot import Snapshot
from tests.bench.bench_systems import model_rules
from tests.bench.board import Board, run
from tests.support.models import configured
from tests.support.paths import DATA
from tests.support.pipelines import replayed
from tests.support.recordings import recording
from tests.support.toy_spans import pieces_in

HARD = {
    "holdout_100": "c1 c4 c5 c6 c7 c10",
    "holdout_10": "c1 c4 c5 c6 c7 c10",
    "holdout_0": "c1 c5 c6 c7 c10 c8",
    "fit_100": "c1 c4 c5 c6 c7 c10",
    "fit_10": "c1 c5 c6 c7 c10",
    "fit_0": "c1 c5 c6 c7 c10",
}
SOFT = {"holdout_100": "c2 c3 c9", "holdout_10": "c2 c3 c9", "holdout_0": "c2 c9"}


def gates(board: Board) -> None:
    """Coefficients of whole recordings and of their first parts, with all step summaries, a tenth and none."""
    capture, gate, score, split = map(board.score, ("capture", "gate", "score", "split"))
    with tempfile.TemporaryDirectory() as directory:
        for hard, table in ((True, HARD), (False, SOFT)):
            for key, names in table.items():
                for name in names.split():
                    fed = Path(directory) / f"{name}_{key}"
                    kind, share = key.split("_")
                    whole = capture.cut_of(name) if kind == "holdout" else 1.0
                    thin = None if share == "100" or name == "c8" else float(share) / 100
                    split.split(name, str(fed), 0.0, whole, thin)
                    pipeline = replayed(recording(fed / "otlp.pb.gz"))
                    snapshot = json.loads(pipeline.snapshot(0, 1).to_json())
                    limits = gate.T[next(DATA.glob(f"{name}_*")).name][key]
                    found = score.score(snapshot, capture.path_of(name), 0.0 if kind == "fit" else None)
                    mape, e2e = found["step"].get("mape"), found["request"].get("e2e_gate")
                    label = f"{name} {key}" + ("" if hard else " (soft)")
                    for what, value, limit in (("step MAPE", mape, limits["mape"]), ("E2E", e2e, limits["e2e"])):
                        good = value is not None and value <= limit
                        board.line(f"{label} {what} %", f"{value:.1f}", f"<= {limit:g}", good if hard else None)
                    if found.get("negative_or_nonfinite"):
                        board.line(f"{label} coefficients", "negative or not finite", good=False)


def h100(board: Board) -> None:
    """What BLIS is given, learned from request spans, without and with the models' sheets."""
    experiments = board.experiments()
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        timed = []
        for name in experiments:
            out = board.as_otlp(name, here / f"{name}.pb.gz", "--until-frac", "0.6")
            timed += [(newest_end(e.payload), str(out), e._replace(peer=name)) for e in recording(out)]
        timed.sort(key=lambda item: item[:2])
        sheets = configured({"learners": ["rls"], "rules": model_rules(experiments, here)})
        for label, config in (("", Config(learners=("rls",))), (" with sheets", sheets)):
            pipeline = make_pipeline(config)
            start_s = time.process_time()
            for _, _, export in timed:
                pipeline.process([export])
            pipeline.flush()
            board.keep(f"h100{label} replay, CPU s", time.process_time() - start_s)
            judge_h100(board, pipeline.snapshot(0, 1), label)


def judge_h100(board: Board, snapshot: Snapshot, label: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        forms = Path(directory) / "forms.json"
        forms.write_text(json.dumps({"configs": blis_forms(snapshot, board.experiments())}))
        errors = replayed_errors(board, forms, Path(directory) / "out.json")
    for name, error in errors.items():
        note = f"TTFT {error['ttft']:.1f}, ITL {error['itl']:.1f}"
        board.line(f"h100{label} {name[16:]} |E2E| %", f"{error['e2e']:.1f}", note=note)
    for which, most in (("e2e", 3.0), ("ttft", 6.0), ("itl", 3.0)):
        mean = float(np.mean([error[which] for error in errors.values()]))
        board.at_most(f"h100{label} mean |{which.upper()}| %", mean, most)
    below = sum(error["e2e"] < 10 for error in errors.values())
    board.line(f"h100{label} experiments below 10 %", below, f">= {len(errors)}", below == len(errors))


def blis_forms(snapshot: Snapshot, experiments: dict[str, dict]) -> dict[str, dict]:
    """What is exported for BLIS of each configuration, as the replay takes it."""
    of_model = {(each["model_id"], each["tp"]): each for each in experiments.values()}
    forms = {}
    for config in snapshot.configs:
        known = of_model[config.config["model"], config.config["tensor_parallel_size"]]
        shape = known["model_config"]
        sheet = {
            "num_hidden_layers": shape["num_layers"],
            "hidden_size": shape["hidden_dim"],
            "num_attention_heads": shape["num_heads"],
            "num_key_value_heads": shape["num_kv_heads"],
        }
        told = blis_coefficients(config, model_config=sheet, hardware="H100")
        key = f"{known['model_short']}|H100|tp{known['tp']}"
        forms[key] = {"kind": "trained-physics", "alpha": list(told.alpha), "beta": list(told.beta)}
    return forms


def newest_end(payload: bytes) -> int:
    return max(piece.span.end_time_unix_nano for _, piece in pieces_in([Export(payload, "", 0)]))


def replayed_errors(board: Board, coefficients: Path, out: Path) -> dict[str, dict[str, float]]:
    """|error| of mean e2e, ttft and itl in % by experiment, of the last fifth of each table."""
    command = [sys.executable, board.tools / "replay.py", coefficients, *("--from-frac", "0.8", "--json"), out]
    environ = os.environ | {"GROUND_TRUTH": str(board.tables)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
    found = json.loads(out.read_text())
    return {name: {which: 100 * abs(each[which]) for which in ("e2e", "ttft", "itl")} for name, each in found.items()}


SECTIONS = {"gates": gates, "h100": h100}
NEEDS = {"gates": ("tools",), "h100": ("tools", "tables")}

if __name__ == "__main__":
    sys.exit(run(__doc__, SECTIONS, NEEDS))
