"""Does the wall notice? One fault after another is put into a copy of the tree, and the wall is run against it.

    python -m tests.wall.mutants            all of them, a line each; exit 1 if fewer than the share below are caught
    python -m tests.wall.mutants NAME …     only these

Each fault is one line that a slip of the hand could make: a power, a sign, a bound, a guard that is gone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CAUGHT_MIN = 19
"""Of the faults below."""
_PACKAGES = ("collector", "exporters", "online", "tracefit", "deploy", "tests/wall", "tests/support", "tests/data")


class Mutant(NamedTuple):
    """``old`` stands exactly once in ``path``."""

    name: str
    path: str
    old: str
    new: str


MUTANTS = (
    Mutant("squared weights decay once", "online/rls/strata.py", "* (kept * kept) + np.add", "* kept + np.add"),
    Mutant(
        "a block forgets into the future",
        "online/rls/strata.py",
        "block.groups, block.steps * block.weight / HALF",
        "block.groups, -block.steps * block.weight / HALF",
    ),
    Mutant(
        "new speed scales evidence by another power",
        "online/rls/strata.py",
        "scale[-2] = 1.0",
        "scale[-2] = time_ratio",
    ),
    Mutant(
        "squared weights of a merge decay once", "online/rls/strata.py", "self.n2 *= kept * kept", "self.n2 *= kept"
    ),
    Mutant("a huge prediction hides its misfit", "online/rls/solve.py", "2.0 * y), _FLOOR", "200.0 * y), _FLOOR"),
    Mutant(
        "stalls weigh as much as steps",
        "online/rls/solve.py",
        "h: Floats = HUBER / np.maximum(np.abs(u) / scale, HUBER)",
        "h: Floats = np.ones_like(u)",
    ),
    Mutant(
        "no Tukey passes in the first fit",
        "online/rls/solve.py",
        "_PASSES = 9",
        "_PASSES = 1",
    ),
    Mutant(
        "coefficients may be negative",
        "online/rls/solve.py",
        "wrong = np.where(passive, (z < 0.0) & ~free",
        "wrong = np.where(passive, (z < -1e99) & ~free",
    ),
    Mutant("the solver's ridge is large", "online/rls/solve.py", "RELATIVE_RIDGE = 1e-6", "RELATIVE_RIDGE = 1e-2"),
    Mutant(
        "scores of neighbouring windows do not add",
        "online/rls/strata.py",
        "bartlett = 2.0 * np.maximum",
        "bartlett = -2.0 * np.maximum",
    ),
    Mutant(
        "young error bars without the misfit of shapes",
        "online/rls/error_bars.py",
        "moved = (z @ c) * rows_of_fit",
        "moved = 0.0 * (z @ c) * rows_of_fit",
    ),
    Mutant("few windows count as many", "online/rls/strata.py", "* (spare * (1.0 + 1.21 / free) ** 2)", "* spare"),
    Mutant(
        "a dull stretch forgets what it does not visit",
        "online/rls/strata.py",
        "self.g[ids] = self.g[ids] * kept[:, None, None] + _products",
        "self.g *= kept.min(); self.g[ids] = self.g[ids] + _products",
    ),
    Mutant(
        "shape factors are not shrunk",
        "online/shapes.py",
        "return self.mean_log_ratio(ids, beta) * shrinkage(self.rows[ids])",
        "return self.mean_log_ratio(ids, beta)",
    ),
    Mutant(
        "a fall of speed is no change",
        "online/change.py",
        "return max(self.up, self.down) >= self._limit",
        "return self.up >= self._limit",
    ),
    Mutant(
        "what blocks usually say adds up to a change",
        "online/change.py",
        "max(0.0, self.up + z - self._dead_band)",
        "max(0.0, self.up + z)",
    ),
    Mutant(
        "one block confirms a change",
        "online/change.py",
        "_USUAL_MIN = 1.5, 9.0,",
        "_USUAL_MIN = 1.5, 2.0,",
    ),
    Mutant(
        "prefill changes with everything else",
        "online/change.py",
        "e[with_prefill] - median_of(others)",
        "0.0 * e[with_prefill]",
    ),
    Mutant(
        "bands are as wide as what was seen",
        "online/errors.py",
        "WIDER = 1.15",
        "WIDER = 1.0",
    ),
    Mutant(
        "bands are of wider quantiles",
        "online/errors.py",
        "(0.1, 0.5, 0.9))",
        "(0.05, 0.5, 0.95))",
    ),
    Mutant(
        "the level of a row has seen it",
        "online/level.py",
        "known.append(mean.get())\n                mean.update(value)",
        "mean.update(value)\n                known.append(mean.get())",
    ),
    Mutant(
        "rows of one operating point are believed without a cap",
        "online/transfer/sheet.py",
        "sigma = max(LACK_OF_FIT, _lack_of_fit(",
        "sigma = max(0.01 * LACK_OF_FIT, 0.01 * _lack_of_fit(",
    ),
)


def is_caught(mutant: Mutant) -> bool:
    """Whether the wall fails on a copy of the tree with this fault in it."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for package in _PACKAGES:
            shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "tests/conftest.py"):
            shutil.copy(ROOT / name, copy / name)
        path = copy / mutant.path
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.name}: {mutant.old!r} stands {text.count(mutant.old)} times in {mutant.path}")
        path.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/wall"]
        return subprocess.run(command, cwd=copy, capture_output=True, check=False).returncode != 0


def main(names: list[str]) -> int:
    """Try them, and say of each whether it was caught."""
    if is_caught(MUTANTS[0]._replace(new=MUTANTS[0].old)):
        raise SystemExit("the wall fails without a fault")
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    caught = 0
    for mutant in chosen:
        noticed = is_caught(mutant)
        caught += noticed
        print(f"{'caught  ' if noticed else 'SURVIVED'} {mutant.name} ({mutant.path})", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return int(caught < CAUGHT_MIN - (len(MUTANTS) - len(chosen)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
