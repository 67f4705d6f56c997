"""The log: what was appended comes back, whole, in order, once; what is damaged does not, and is counted."""

from __future__ import annotations

import errno
import random
import shutil

import pytest

from collector.ingest.queue import Export
from collector.runtime.filesystem import SystemFiles
from collector.service.log import Log, LogFull, Loss, is_segment
from tests.support.clocks import T0_NS


def opened(directory, *, capacity_bytes=1 << 16, files=None, read_from=1, newest=0):
    log = Log(directory, capacity_bytes, files or SystemFiles())
    log.open(read_from, newest)
    return log


def export(number, size_bytes=100):
    payload = number.to_bytes(4, "big") * (size_bytes // 4)
    return Export(payload, f"peer-{number}", "grpc", number, arrived_unix_ns=T0_NS + number)


def segments(directory):
    return sorted(path for path in directory.iterdir() if is_segment(path))


def filled(directory, count=200, **options):
    log = opened(directory, **options)
    written = [log.append(export(number)) for number in range(1, count + 1)]
    log.close()
    return written


def test_what_was_appended_comes_back_in_order_with_its_numbers(tmp_path):
    written = filled(tmp_path)
    assert [one.seq for one in written] == list(range(1, 201))
    assert len(segments(tmp_path)) > 3, "several segments"
    again = opened(tmp_path)
    assert list(again.entries(1)) == written
    assert list(again.entries(151)) == written[150:]
    assert again.append(export(7)).seq == 201
    assert again.loss == Loss()


def test_segments_that_are_learned_go_and_no_others(tmp_path):
    log = opened(tmp_path)
    for number in range(1, 201):
        log.append(export(number))
    before = log.size_bytes
    log.free(101)
    assert 0 < log.size_bytes < before
    log.close()
    again = opened(tmp_path, read_from=101, newest=200)
    assert [one.seq for one in again.entries(101)] == list(range(101, 201))
    assert again.loss == Loss()
    again.free(201)
    assert segments(tmp_path) == []
    assert again.size_bytes == 0
    again.close()
    assert opened(tmp_path, read_from=201, newest=200).append(export(1)).seq == 201


def test_a_full_log_refuses_and_takes_again_when_a_checkpoint_has_learned(tmp_path):
    log = opened(tmp_path, capacity_bytes=10_000)
    with pytest.raises(LogFull):  # noqa: PT012
        for number in range(1000):
            log.append(export(number))
    assert log.size_bytes <= 10_000
    newest = log.newest
    log.free(newest)
    assert log.append(export(1)).seq == newest + 1


def flip(rng, data):
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def overwritten(rng, data):
    at, size = rng.randrange(len(data)), rng.randrange(1, 400)
    return data[:at] + rng.choice((bytes(size), rng.randbytes(size)))[: len(data) - at] + data[at + size :]


def damaged(rng, directory):
    """One of eight damages to one segment, or to the file with the newest number."""
    path = rng.choice(segments(directory))
    data = path.read_bytes()
    kind = rng.randrange(8)
    if kind == 0:
        return path.unlink()
    if kind == 1:
        return (directory / "log.head").unlink()
    cut = rng.randrange(len(data))
    made = (
        flip(rng, data),
        overwritten(rng, data),
        data[:cut],
        data[:cut] + rng.randbytes(rng.randrange(1, 300)) + data[cut:],
        data[:cut] + data[cut + rng.randrange(1, 300) :],
        data + data[cut:],
    )[kind - 2]
    return path.write_bytes(made)


def touched(data, whole):
    """Whether an entry's bytes are still there in one piece: then nothing excuses its loss."""
    return whole not in data


def test_800_damages_cost_the_entries_they_lie_in_and_are_counted(tmp_path):
    life = tmp_path / "life"
    life.mkdir()
    written = filled(life, count=60)
    wholes = {}
    for path in segments(life):
        data, at = path.read_bytes(), 0
        while at < len(data):
            end = at + 8 + int.from_bytes(data[at : at + 4], "little")
            wholes[int.from_bytes(data[at + 8 : at + 16], "little")] = data[at:end]
            at = end
    assert sorted(wholes) == list(range(1, 61))
    for seed in range(800):
        rng = random.Random(seed)
        directory = tmp_path / "hurt"
        shutil.copytree(life, directory)
        damaged(rng, directory)
        log = opened(directory)
        found = list(log.entries(1))
        assert [one for one in written if one in found] == found, f"in order, each once, none invented: {seed}"
        left = b"\0".join(path.read_bytes() for path in segments(directory))
        missing = set(range(1, 61)) - {one.seq for one in found}
        assert all(touched(left, wholes[number]) for number in missing), f"lost beyond the damage: {seed}"
        head_is_gone = not (directory / "log.head").stat().st_size
        behind = 60 - max(one.seq for one in found) if head_is_gone else 0
        assert log.loss.entries == len(missing) - behind, f"counted right: {seed}"
        log.append(export(9))
        log.close()
        again = opened(directory)
        assert list(again.entries(1))[:-1] == found, f"what comes later lies behind: {seed}"
        again.close()
        shutil.rmtree(directory)


class Trouble(SystemFiles):
    """Writes a part, then has no room."""

    def __init__(self):
        self.part_bytes = None
        self.truncate_fails = False

    def write(self, descriptor, parts):
        if self.part_bytes is None:
            return super().write(descriptor, parts)
        super().write(descriptor, [b"".join(parts)[: self.part_bytes]])
        raise OSError(errno.ENOSPC, "No space left on device")

    def truncate(self, descriptor, size_bytes):
        if self.truncate_fails:
            raise OSError(errno.EIO, "Input/output error")
        super().truncate(descriptor, size_bytes)


@pytest.mark.parametrize("truncate_fails", [False, True])
@pytest.mark.parametrize("part_bytes", [0, 1, 17, 60])
def test_half_an_entry_is_taken_back_or_nothing_goes_behind_it(tmp_path, part_bytes, truncate_fails):
    files = Trouble()
    log = opened(tmp_path, files=files)
    first = log.append(export(1))
    files.part_bytes, files.truncate_fails = part_bytes, truncate_fails
    with pytest.raises(OSError, match="No space"):
        log.append(export(2))
    files.part_bytes = None
    third = log.append(export(3))
    assert third.seq == 2
    log.close()
    again = opened(tmp_path)
    assert list(again.entries(1)) == [first, third]
    assert again.loss.entries == 0
