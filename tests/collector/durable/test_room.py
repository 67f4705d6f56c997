"""The journal's capacity is what its volume has beside three states, and never more than configured."""

from __future__ import annotations

import pytest

from collector.cli import main
from collector.durable.room import fitted_capacity
from collector.durable.store import NAME
from collector.runtime.filesystem import SystemFiles, Volume
from tests.support.sidecars import make_config

MIB = 1 << 20


class Told(SystemFiles):
    def __init__(self, free_mib, size_mib):
        self._volume = Volume(free_mib * MIB, size_mib * MIB)

    def volume(self, directory):  # noqa: ARG002 -- there is one
        return self._volume


@pytest.mark.parametrize(
    ("free_mib", "size_mib", "capacity_mib"),
    [
        (1000, 1024, 256),
        (448, 512, 256),
        (400, 512, 208),
        (64, 64, 16),
        (64, 1024, 16),
        (0, 0, 256),
    ],
    ids=["enough", "just enough", "less", "too small for the states", "filled by others", "does not say"],
)
def test_the_journal_gets_what_three_states_of_64_engines_leave(tmp_path, free_mib, size_mib, capacity_mib):
    capacity_bytes, problem = fitted_capacity(make_config(tmp_path), Told(free_mib, size_mib))
    assert capacity_bytes == capacity_mib * MIB
    assert bool(problem) == (capacity_mib < 256)


def test_fewer_engines_need_less_and_a_larger_state_that_lies_there_needs_more(tmp_path):
    few = make_config(tmp_path, JOIN__ENGINES_MAX="8")
    assert fitted_capacity(few, Told(280, 512)) == (256 * MIB, "")
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(40 * MIB)
    assert fitted_capacity(few, Told(280, 512))[0] == (280 + 40 - 3 * 40) * MIB


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
