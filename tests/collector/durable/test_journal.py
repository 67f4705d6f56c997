"""The journal: what was appended comes back, whole, in order, once; what was cut does not come back at all."""

from __future__ import annotations

import errno

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collector.durable.journal import Full, Journal, left_behind
from collector.receive.export_request import Export
from collector.runtime.filesystem import SystemFiles


def make_journal(directory, applied_seq=0, **changes):
    options = {"capacity_bytes": 1 << 20, "segment_bytes": 4096, "fsync": False, **changes}
    journal = Journal(directory, **options)
    journal.open(applied_seq)
    return journal


def export(number, size_bytes=100):
    return Export(number.to_bytes(4, "big") * (size_bytes // 4), f"peer-{number}", "grpc", number)


def reopened(journal, directory, applied_seq=0, **changes):
    journal.close()
    return make_journal(directory, applied_seq, **changes)


def segments(directory):
    return sorted(path for path in directory.iterdir() if path.name.startswith("journal.0"))


def test_what_was_appended_comes_back_in_order_with_its_numbers(tmp_path):
    journal = make_journal(tmp_path)
    written = [journal.append(export(n)) for n in range(1, 201)]
    assert [one.seq for one in written] == list(range(1, 201))
    assert len(segments(tmp_path)) > 3, "several segments"
    again = reopened(journal, tmp_path)
    assert list(again.entries(0)) == written
    assert list(again.entries(150)) == written[150:]
    assert again.append(export(7)).seq == 201
    assert again.damaged_bytes == 0


def test_segments_that_a_saved_state_contains_go_and_no_others(tmp_path):
    journal = make_journal(tmp_path)
    for n in range(1, 201):
        journal.append(export(n))
    before = journal.size_bytes
    journal.applied(100)
    assert journal.size_bytes < before
    again = reopened(journal, tmp_path, 100)
    assert [one.seq for one in again.entries(100)] == list(range(101, 201))
    again.applied(200)
    assert segments(tmp_path) == []
    assert again.size_bytes == 0
    assert not left_behind(tmp_path)


def test_numbers_go_on_after_the_state_when_the_journal_is_empty(tmp_path):
    assert make_journal(tmp_path, 41).append(export(1)).seq == 42


def test_a_full_journal_refuses_and_takes_again_after_a_state_was_saved(tmp_path):
    journal = make_journal(tmp_path, capacity_bytes=10_000)
    with pytest.raises(Full):  # noqa: PT012
        for n in range(1000):
            journal.append(export(n))
    assert journal.size_bytes <= 10_000
    last = journal.last_seq
    journal.applied(last)
    assert journal.append(export(1)).seq == last + 1


def test_an_entry_larger_than_the_capacity_enters_an_empty_journal(tmp_path):
    journal = make_journal(tmp_path, capacity_bytes=100)
    assert journal.append(export(1, 4000)).seq == 1
    with pytest.raises(Full):
        journal.append(export(2, 4))


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_segment_gives_its_whole_first_entries_and_never_a_wrong_one(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("j")
    journal = make_journal(directory, segment_bytes=1 << 20)
    written = [journal.append(export(n, 60)) for n in range(1, 21)]
    journal.close()
    (path,) = segments(directory)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    flip = bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    path.write_bytes(whole[:at] + (flip if data.draw(st.booleans()) else b""))
    again = make_journal(directory)
    found = list(again.entries(0))
    assert found == written[: len(found)]
    assert len(found) >= at // (len(whole) // 20 + 1) - 1
    assert len(found) < 20
    assert again.append(export(9)).seq == len(found) + 1
    again.close()


class Trouble(SystemFiles):
    """Writes a part, then has no room."""

    def __init__(self):
        self.part_bytes = None
        self.truncate_fails = False
        self.syncs = 0

    def write(self, descriptor, parts):
        if self.part_bytes is None:
            return super().write(descriptor, parts)
        super().write(descriptor, [b"".join(parts)[: self.part_bytes]])
        raise OSError(errno.ENOSPC, "No space left on device")

    def truncate(self, descriptor, size_bytes):
        if self.truncate_fails:
            raise OSError(errno.EIO, "Input/output error")
        super().truncate(descriptor, size_bytes)

    def sync(self, descriptor):
        self.syncs += 1
        super().sync(descriptor)


@pytest.mark.parametrize("truncate_fails", [False, True])
@pytest.mark.parametrize("part_bytes", [0, 1, 17, 60])
def test_half_a_record_is_taken_back_or_nothing_goes_behind_it(tmp_path, part_bytes, truncate_fails):
    files = Trouble()
    journal = make_journal(tmp_path, files=files)
    first = journal.append(export(1))
    files.part_bytes, files.truncate_fails = part_bytes, truncate_fails
    with pytest.raises(OSError, match="No space"):
        journal.append(export(2))
    files.part_bytes = None
    third = journal.append(export(3))
    assert third.seq == 2
    assert list(reopened(journal, tmp_path).entries(0)) == [first, third]


def test_a_write_that_takes_only_a_part_is_continued(tmp_path):
    class Short(SystemFiles):
        def write(self, descriptor, parts):
            return super().write(descriptor, [b"".join(parts)[:7]])

    journal = make_journal(tmp_path, files=Short())
    written = [journal.append(export(n)) for n in range(1, 4)]
    assert list(reopened(journal, tmp_path).entries(0)) == written


def test_with_fsync_one_flush_serves_all_that_came_before_it(tmp_path):
    files = Trouble()
    journal = make_journal(tmp_path, fsync=True, files=files)
    for n in range(1, 6):
        journal.append(export(n))
    journal.sync(5)
    journal.sync(3)
    assert files.syncs == 1


def test_without_fsync_nothing_is_flushed(tmp_path):
    files = Trouble()
    journal = make_journal(tmp_path, files=files)
    journal.sync(journal.append(export(1)).seq)
    assert files.syncs == 0


def test_two_processes_cannot_use_one_journal(tmp_path):
    first = make_journal(tmp_path)
    with pytest.raises(BlockingIOError):
        make_journal(tmp_path)
    first.close()
    make_journal(tmp_path).close()
