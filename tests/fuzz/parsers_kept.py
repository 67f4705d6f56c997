"""What is fuzzed of what lies on our own disk: state, journal, configuration."""

from __future__ import annotations

import math
import tempfile
import zlib
from pathlib import Path

import msgspec
import numpy as np

from collector import config as configuration
from collector.config.load import ConfigError
from collector.config.schema import Config as Settings
from collector.config.schema import JoinConfig
from collector.decode.kv import read_line
from collector.ingest.queue import Export
from collector.service import progress_of, read_image
from collector.service.build import make_pipeline
from collector.service.journal import _HEAD, _PREFIX, Journal
from online.state import LEARNERS, StateError, sealed
from tests.fuzz.mutations import edited_tree
from tests.fuzz.parsers import Held, Kv, Parser
from tests.support.recordings import kv_lines
from tests.support.step_exports import make_export


class _WithoutWarmUp(JoinConfig, frozen=True, kw_only=True):
    warm_up_rows = 0


class State(Parser):
    """State files and the learners' part of them; the damage is sealed anew, to get behind sums."""

    tokens = (*Kv.tokens, b"\xca\x7f\xc0\0\0", b"\xc4\x00", b"\x91")
    bred_bytes_max = 3000

    def __init__(self, directory) -> None:
        super().__init__(directory)
        self._config = Settings(learners=("rls",), feature_sets=("portable",), join=_WithoutWarmUp())
        self._pipeline = make_pipeline(self._config)

    def seeds(self):
        bodies = [self._pipeline_after().whole_state(0).body()]
        bodies += [self._pipeline_after(make_export(1, steps_per_span=n)).whole_state(3).body() for n in (1, 2)]
        bodies += [self._pipeline_after(kv=kv_lines("c5_offload")[:2]).whole_state(1).body()]
        learned = self._pipeline_after(make_export(40, steps_per_span=12))
        learned.flush()
        return [*bodies * 12, learned.whole_state(9).body(), _body(learned.state())]

    def _pipeline_after(self, export=None, kv=()):
        pipeline = make_pipeline(self._config)
        if export is not None:
            pipeline.process([Export(export.SerializeToString(), "peer", "grpc", len(export.resource_spans))])
        pipeline.process_kv([read_line(line, "source") for line in kv])
        return pipeline

    def edited(self, rng, data):
        """Often values are replaced, which no damaged byte does without the lengths before it."""
        if rng.random() < 0.6 or not data.startswith(b"\x78"):
            return super().edited(rng, data)
        try:
            tree = msgspec.msgpack.decode(zlib.decompress(data), ext_hook=msgspec.msgpack.Ext)
            for _ in range(rng.choice((1, 2, 2, 3))):
                tree = edited_tree(rng, tree)
            return zlib.compress(msgspec.msgpack.encode(tree))
        except (ValueError, TypeError, OverflowError, RecursionError):  # it may be damaged already
            return super().edited(rng, data)

    def parse(self, data):
        try:
            read_image(data)
        except StateError:
            return self._restore(sealed(data))
        raise AssertionError("a file without its checksum was read")

    def _restore(self, file):
        try:
            image = read_image(file)
            self._bank().from_state(image.tree(LEARNERS))
            assert _finite(self._pipeline._bank.to_state())
            self._pipeline.restore(image)
        except StateError:
            return False
        progress = progress_of(image)
        assert min(progress.seq, progress.generation) >= 0
        return True

    def _bank(self):
        return self._pipeline._bank


def _body(file):
    return file[len(sealed(b"")) :]


def _finite(value, name=""):
    """No number that is not finite; NaN is what is not known of waiting rows (``x``) and of courses (``values``)."""
    if isinstance(value, dict):
        return all(_finite(each, key) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return not (np.isinf(value).any() or (np.isnan(value).any() and name not in {"x", "values"}))
    return not isinstance(value, float) or math.isfinite(value)


class JournalFile(Parser):
    """A segment that an earlier process left; half of the damage gets right checksums."""

    def __init__(self, directory) -> None:
        super().__init__(directory)
        self._file = Held(f"journal.{1:016x}")

    def seeds(self):
        with tempfile.TemporaryDirectory() as name:
            journal = Journal(Path(name), capacity_bytes=1 << 20, segment_bytes=1 << 20, fsync=False)
            journal.open(0)
            for number in range(4):
                journal.append(Export(bytes([number]) * 6, "peer", "grpc", number))
            journal.close()
            whole = (Path(name) / self._file.name).read_bytes()
            return [whole, whole[: len(whole) // 2]]

    def parse(self, data):
        self._file.data = data if zlib.crc32(data) & 1 else _with_checksums(data)
        journal = Journal(self, capacity_bytes=1 << 20, segment_bytes=1 << 20, fsync=False)
        journal.open(0)
        numbers = [export.seq for export in journal.entries(0)]
        assert numbers == sorted(set(numbers))
        assert 0 <= journal.damage.tail_bytes <= journal.damage.size_bytes <= len(data)
        assert journal.damage.entries == (numbers[-1] - len(numbers) if numbers else 0)
        journal.close()
        return bool(numbers)

    def __truediv__(self, name):
        return self._directory / name

    def iterdir(self):
        return [self._file]


def _with_checksums(data):
    """The CRC of every record, as far as the lengths lead, is that of what it holds."""
    out = bytearray(data)
    at = 0
    while at + _HEAD.size <= len(out):
        length = _PREFIX.unpack_from(out, at)[0]
        inside = out[at + _PREFIX.size : at + _PREFIX.size + length]
        out[at + 4 : at + 8] = zlib.crc32(inside).to_bytes(4, "little")
        at += _PREFIX.size + length
    return bytes(out)


class Config(Parser):
    """Configuration files, most of them short: YAML costs microseconds per byte."""

    bred_bytes_max = 48
    tokens = (
        *(b"null", b"-1", b"1e999", b".nan", b".inf", b'""', b"[]", b"{}", b"[[[[", b"\xff\xfe", b"9" * 30, b": "),
        *(b"- ", b"&a ", b"*a", b"!!int ", b"!!float ", b"!!bool ", b"!!timestamp ", b"!!binary ", b"!!set "),
        *(b"!!omap ", b"!!map ", b"!!seq ", b"!!null ", b"!!python/name:os ", b"!x ", b"<<: ", b"? ", b"|\n", b">-\n "),
        *(b"%YAML 1.1\n", b"\t", b"'", b'"\\x', b"---\n", b"...\n", b"2001-13-13", b"1:99:99", b"0x", b"0b_", b"# "),
        *(b"\x00", b"\r", b"\xc2\x85", b", "),
    )

    def __init__(self, directory) -> None:
        super().__init__(directory)
        self._file = Held("file")

    def seeds(self):
        short = [
            b"join: {grace_s: 1.5}",
            b"learners: [rls]",
            b"journal:\n  fsync: true",
            b"donors: ['a', \"b\"]",
            b"custom: {a: [b, c]}",
            b"join: {grace_s: 2}\n",
            b"log_level: info\n",
            b"bank:\n  block_s: 1e2\n",
            b"bank: {configs_max: 9}",
            b"",
        ]
        rules = b"configurations:\n  rules:\n  - facts: {a: 1.5}\n"
        return [*short * 3, rules, configuration.to_yaml(Settings()).encode()[:160]]

    def parse(self, data):
        self._file.data = data
        try:
            config = configuration.load(self._file, {})
        except ConfigError:
            return False
        assert not any(head in msgspec.msgpack.encode(config) for head in _NOT_FINITE)
        return True


_NOT_FINITE = (b"\xcb\x7f\xf0", b"\xcb\x7f\xf8", b"\xcb\xff\xf0", b"\xcb\xff\xf8")
"""How MessagePack's infinities and NaN begin; no text in UTF-8 holds such bytes."""
