"""The error of each label of telemetry on recordings, beside its limit: ``make bench WHAT=rows TOOLS=DIR``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.bench.board import Board, run
from tests.support.paths import DATA
from tests.support.pipelines import replayed
from tests.support.recordings import recording

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


if __name__ == "__main__":
    sys.exit(run(__doc__, {"gates": gates}, {"gates": ("tools",)}))
