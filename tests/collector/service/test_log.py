"""The log: what was appended comes back, whole, in order, once; what is damaged does not, and is counted."""

import errno
import random
import struct
import zlib

import msgspec
import pytest

from collector.decode import Export
from collector.runtime.filesystem import SystemFiles
from collector.service.log import Log, is_segment
from tests.support.clocks import T0_NS


def opened(directory, *, capacity_bytes=1 << 16, files=None, read_from=1, newest=0):
    log = Log(directory, capacity_bytes, files or SystemFiles())
    log.open(read_from, newest)
    return log


def export(number, size_bytes=100):
    payload = number.to_bytes(4, "big") * (size_bytes // 4)
    return Export(payload, f"peer-{number}", number, arrived_unix_ns=T0_NS + number)


def segments(directory):
    return sorted(path for path in directory.iterdir() if is_segment(path))


def filled(directory, **options):
    log = opened(directory, **options)
    return log, [log.append(export(number)) for number in range(1, 201)]


def test_what_was_appended_comes_back_in_order_with_its_numbers(tmp_path):
    log, written = filled(tmp_path)
    log.close()
    assert [one.seq for one in written] == list(range(1, 201))
    assert len(segments(tmp_path)) > 3, "several segments"
    again = opened(tmp_path)
    assert list(again.entries(1)) == written
    assert list(again.entries(151)) == written[150:]
    assert again.append(export(7)).seq == 201
    assert again.lost_entries == 0


def test_segments_that_are_learned_go_and_no_others(tmp_path):
    log, written = filled(tmp_path)
    before = log.size_bytes
    log.free(101)
    assert 0 < log.size_bytes < before
    log.close()
    again = opened(tmp_path, read_from=101, newest=200)
    assert (list(again.entries(101)), again.lost_entries) == (written[100:], 0)
    again.free(201)
    assert (segments(tmp_path), again.size_bytes) == ([], 0)
    again.close()
    assert opened(tmp_path, read_from=201, newest=200).append(export(1)).seq == 201


def damaged(rng, directory):
    """One of eight damages to one segment or to the file with the newest number."""
    path = rng.choice([*segments(directory), directory / "log.head"])
    data = path.read_bytes()
    cut, size = rng.randrange(len(data)), rng.randrange(1, 400)
    kind = rng.randrange(8)
    if kind < 2:
        return (path, directory / "log.head")[kind].unlink()
    made = (
        data[:cut] + bytes([data[cut] ^ 1 << rng.randrange(8)]) + data[cut + 1 :],
        data[:cut] + rng.choice((bytes(size), rng.randbytes(size)))[: len(data) - cut] + data[cut + size :],
        data[:cut],
        data[:cut] + rng.randbytes(size) + data[cut:],
        data[:cut] + data[cut + size :],
        data + data[cut:],
    )
    return path.write_bytes(made[kind - 2])


def test_800_damages_cost_the_entries_they_lie_in_and_are_counted(tmp_path):
    directory, wholes = tmp_path / "log", {}
    directory.mkdir()
    log = opened(directory)
    for number in range(1, 61):
        before_bytes = log.size_bytes
        one = log.append(export(number))
        wholes[one] = segments(directory)[-1].read_bytes()[before_bytes - log.size_bytes :]
    log.close()
    files = {path: path.read_bytes() for path in directory.iterdir()}
    for seed in range(800):
        rng = random.Random(seed)
        for path in directory.iterdir():
            path.unlink()
        for path, data in files.items():
            path.write_bytes(data)
        damaged(rng, directory)
        log = opened(directory)
        found = list(log.entries(1))
        present = set(found)
        assert [one for one in wholes if one in present] == found, f"in order, each once, none invented: {seed}"
        left = b"\0".join(path.read_bytes() for path in segments(directory))
        missing = wholes.keys() - present
        assert not any(wholes[one] in left for one in missing), f"lost beyond the damage: {seed}"
        head_is_gone = not (directory / "log.head").stat().st_size
        behind = 60 - max(one.seq for one in found) if head_is_gone else 0
        assert log.lost_entries == len(missing) - behind, f"counted right: {seed}"
        log.append(export(9))
        log.close()
        again = opened(directory)
        assert list(again.entries(1))[:-1] == found, f"what comes later lies behind: {seed}"
        again.close()


FAR_AHEAD = msgspec.msgpack.encode((1 << 40, "a", 1, 1, b""))


@pytest.mark.parametrize("meta", [b"\xc1", b"\x90", b"\x95\x02\xa1\xff\x01\x01\xc4\x00", FAR_AHEAD])
def test_an_entry_that_a_sender_made_up_inside_of_its_own_ends_no_start(tmp_path, meta):
    log = opened(tmp_path)
    forged = b"\xf1tf\x03" + struct.pack("<II", len(meta), zlib.crc32(meta)) + meta
    first, _, third = [log.append(export(n)._replace(payload=b"x" + forged)) for n in (1, 2, 3)]
    log.close()
    (path,) = segments(tmp_path)
    entries = path.read_bytes().split(b"x" + forged)
    path.write_bytes((b"x" + forged).join(entries[:2]) + b"?" + forged + entries[2] + b"x" + forged)
    again = opened(tmp_path)
    assert (list(again.entries(1)), again.lost_entries) == ([first, third], 1)


class Trouble(SystemFiles):
    """Writes a part, then has no room."""

    part_bytes = None
    truncate_fails = False

    def write(self, descriptor, data):
        if self.part_bytes is None:
            return super().write(descriptor, data)
        super().write(descriptor, data[: self.part_bytes])
        raise OSError(errno.ENOSPC, "No space left on device")

    def truncate(self, descriptor, size_bytes):
        if self.truncate_fails:
            raise OSError(errno.EIO, "Input/output error")
        super().truncate(descriptor, size_bytes)


@pytest.mark.parametrize("truncate_fails", [False, True])
@pytest.mark.parametrize("part_bytes", [0, 17, 60])
def test_half_an_entry_is_taken_back_or_nothing_goes_behind_it(tmp_path, part_bytes, truncate_fails):
    files = Trouble()
    log = opened(tmp_path, files=files)
    first = log.append(export(1))
    files.part_bytes, files.truncate_fails = part_bytes, truncate_fails
    with pytest.raises(OSError, match="No space"):
        log.append(export(2))
    files.part_bytes = None
    second = log.append(export(3))
    assert second.seq == 2
    log.close()
    again = opened(tmp_path)
    assert (list(again.entries(1)), again.lost_entries) == ([first, second], 0)
