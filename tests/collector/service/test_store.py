"""Two generations on disk: a bad one costs the work since the one before, and is kept beside."""

from __future__ import annotations

import errno

import pytest

from collector.runtime.filesystem import SystemFiles
from collector.service.store import NAME, PREVIOUS_NAME, PROGRESS, Progress, StateStore, progress_of
from collector.telemetry.reasons import Restored
from online.state import StateError, Taken


def pieces(seq):
    return Taken({PROGRESS: Progress(seq=seq, generation=seq)}).pieces()


def load(directory, refuse=()):
    seen = []

    def restore(image):
        seq = progress_of(image).seq
        if seq in refuse:
            raise StateError("does not fit")
        seen.append(seq)
        return []

    store = StateStore(directory)
    progress = store.load(restore)
    assert (seen or [0]) == [progress.seq]
    return store, store.restored, seen


@pytest.fixture
def written(tmp_path):
    store = StateStore(tmp_path)
    store.write(pieces(10), 10)
    assert store.covered_seq == 0, "one generation alone lets nothing go"
    store.write(pieces(20), 20)
    assert store.covered_seq == 10, "the older one may still be needed"
    return tmp_path


def test_the_newest_is_read(written):
    store, outcome, seen = load(written)
    assert (outcome, seen, store.problem) == (Restored.NEWEST, [20], "")


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda _: b"", lambda b: b[:60] + b"?" + b[61:], lambda _: b"x"])
def test_a_corrupt_newest_falls_back_and_is_kept_beside(written, damage):
    path = written / NAME
    bad = damage(path.read_bytes())
    path.write_bytes(bad)
    store, outcome, seen = load(written)
    assert (outcome, seen) == (Restored.PREVIOUS, [10])
    assert NAME in store.problem
    assert (written / f"{NAME}.corrupt").read_bytes() == bad
    store.write(pieces(30), 30)
    assert load(written)[2] == [30]
    assert (written / f"{NAME}.corrupt").exists(), "kept for inspection"


def test_a_state_that_does_not_fit_is_like_a_corrupt_one(written):
    assert load(written, refuse=(20,))[1:] == (Restored.PREVIOUS, [10])


def test_a_death_between_the_two_renames_is_no_corruption(written):
    (written / NAME).replace(written / PREVIOUS_NAME)
    store, outcome, seen = load(written)
    assert (outcome, seen, store.problem) == (Restored.PREVIOUS, [20], "")


def test_both_unusable_is_a_cold_start_and_said_so(written, caplog):
    (written / NAME).write_bytes(b"x")
    (written / PREVIOUS_NAME).write_bytes(b"y")
    store, outcome, _ = load(written)
    assert outcome is Restored.COLD
    assert store.problem.startswith(f"{NAME}: ")
    assert f"; {PREVIOUS_NAME}: " in store.problem
    assert caplog.messages[-1].startswith("cold start")
    assert caplog.messages[-1].endswith(store.problem)


def test_nothing_there_is_an_empty_start_and_no_fault(tmp_path, caplog):
    assert load(tmp_path)[1] is Restored.EMPTY
    assert caplog.text == ""


@pytest.mark.parametrize("call", ["open", "write", "sync", "replace"])
def test_a_write_that_fails_leaves_a_readable_state(written, call, monkeypatch):
    class Failing(SystemFiles):
        pass

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Failing, call, fail)
    store = StateStore(written, Failing())
    with pytest.raises(OSError, match="No space"):
        store.write(pieces(30), 30)
    assert load(written)[2] == [20]
    assert StateStore(written).write(pieces(40), 40) > 0
    assert load(written)[2] == [40]


def test_the_older_generation_is_given_up_only_beside_a_whole_newest_one(written):
    store, *_ = load(written)
    assert store.saved_seq == 20
    assert store.give_up_previous()
    assert not store.give_up_previous(), "there is none any more"
    again, outcome, _ = load(written)
    assert outcome is Restored.NEWEST
    again.write(pieces(30), 30)
    (written / NAME).write_bytes(b"x")
    damaged, outcome, seen = load(written)
    assert (outcome, seen) == (Restored.PREVIOUS, [20])
    assert not damaged.give_up_previous()
    assert (written / PREVIOUS_NAME).exists()
