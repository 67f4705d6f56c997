"""The journal's capacity is what its volume has beside three states, and never more than configured."""

from __future__ import annotations

from collector.cli import main
from collector.runtime.filesystem import SystemFiles, Volume

MIB = 1 << 20


def test_check_config_says_what_a_start_here_would_do_and_nothing_where_the_directory_is_not(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TRACEFIT_DURABILITY", "journal")
    monkeypatch.setenv("TRACEFIT_SNAPSHOT__DIRECTORY", str(tmp_path))
    monkeypatch.setattr(SystemFiles, "volume", lambda *_: Volume(64 * MIB, 64 * MIB))
    assert main(["check-config"]) == 0
    said = capsys.readouterr()
    assert "warning: the journal has 16 MiB instead of 256 (journal.capacity_mib)" in said.err
    assert "warning" not in said.out
    monkeypatch.undo()
    monkeypatch.setenv("TRACEFIT_DURABILITY", "journal")
    monkeypatch.setenv("TRACEFIT_SNAPSHOT__DIRECTORY", str(tmp_path / "elsewhere"))
    assert main(["check-config"]) == 0
    assert capsys.readouterr().err == ""
