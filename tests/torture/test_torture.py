"""The short torture; ``make torture`` is the long one."""

from __future__ import annotations

from tests.torture.harness import FAULTS, run


def test_kills_and_bad_disks_lose_nothing_and_repeat_nothing(tmp_path):
    report = run(tmp_path, kills=5, seed=7, faults=FAULTS, exports=300)
    assert report.kills == 5
    assert report.repeats > 0, "the kills were noticed"
    assert report.rows > 5000
