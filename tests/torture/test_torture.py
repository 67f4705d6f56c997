"""The short versions; ``make torture`` and ``make stress`` are the long ones."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT
from tests.torture import kills


def test_kills_and_bad_disks_lose_nothing_and_repeat_nothing(tmp_path):
    report = kills.run(tmp_path / "life", kills=5, seed=1, exports=250)
    assert report["kills"] == 5
    assert report["repeats"] > 0, "the kills were noticed"
    assert report["rows"] > 2 * 2 * (2500 - 1) - 10


def test_everybody_at_once_neither_deadlocks_nor_tears_a_snapshot():
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-m", "tests.torture.stress", "--seconds", "3"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "no snapshot torn" in ended.stdout
