"""The short version; ``make torture`` is the long one."""

from tests.torture import kills


def test_kills_and_bad_disks_lose_nothing_and_repeat_nothing(tmp_path):
    report = kills.run(tmp_path / "life", kills=4, seed=1, exports=120, pause_s=0.01)
    assert report["repeats"] > 0, "the kills were noticed"
    assert report["rows"] > 2 * 2 * (1200 - 1) - 10
