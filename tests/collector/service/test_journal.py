"""The journal: what was appended comes back, whole, in order, once; what was cut does not come back at all."""

from __future__ import annotations

import errno

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collector.ingest.queue import Export
from collector.runtime.filesystem import SystemFiles
from collector.service.journal import Damage, Full, Journal, left_behind
from tests.support.clocks import T0_NS


def make_journal(directory, applied_seq=0, **changes):
    options = {"capacity_bytes": 1 << 20, "segment_bytes": 4096, "fsync": False, **changes}
    journal = Journal(directory, **options)
    journal.open(applied_seq)
    return journal


def export(number, size_bytes=100):
    payload = number.to_bytes(4, "big") * (size_bytes // 4)
    return Export(payload, f"peer-{number}", "grpc", number, arrived_unix_ns=T0_NS + number)


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
    assert again.damage == Damage()


def test_the_oldest_segment_is_given_up_if_all_of_it_is_known_elsewhere(tmp_path):
    journal = make_journal(tmp_path)
    for n in range(1, 201):
        journal.append(export(n))
    first, second, *_ = segments(tmp_path)
    end_seq = int(second.name.rpartition(".")[2], 16) - 1
    assert journal.give_up_oldest(end_seq - 1) == 0
    size_bytes = first.stat().st_size
    assert journal.give_up_oldest(end_seq) == size_bytes
    assert segments(tmp_path)[0] == second
    assert [one.seq for one in reopened(journal, tmp_path, end_seq).entries(end_seq)] == list(range(end_seq + 1, 201))


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


def test_a_full_journal_refuses_and_takes_again_after_a_state_was_saved(tmp_path):
    journal = make_journal(tmp_path, capacity_bytes=10_000)
    with pytest.raises(Full):  # noqa: PT012
        for n in range(1000):
            journal.append(export(n))
    assert journal.size_bytes <= 10_000
    last = journal.last_seq
    journal.applied(last)
    assert journal.append(export(1)).seq == last + 1


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_costs_the_entry_it_lies_in_and_a_cut_what_lies_behind_it(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("j")
    journal = make_journal(directory, segment_bytes=1 << 20)
    written = [journal.append(export(n, data.draw(st.integers(0, 200)))) for n in range(1, 21)]
    journal.close()
    (path,) = segments(directory)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    flips = data.draw(st.booleans())
    flip = bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    path.write_bytes(whole[:at] + (flip if flips else b""))
    again = make_journal(directory)
    found = list(again.entries(0))
    assert [one for one in written if one in found] == found, "in order, and none that was never written"
    damage = again.damage
    if flips:
        assert len(found) == 19
        assert damage.entries == (0 if damage.tail_bytes else 1), "behind the last one nobody knows how many"
        assert damage.size_bytes > 0
    else:
        assert found == written[: len(found)]
        assert damage.entries == 0
        assert damage.size_bytes == damage.tail_bytes
    assert again.append(export(9)).seq == max((one.seq for one in found), default=0) + 1
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
