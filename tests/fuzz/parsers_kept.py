"""What is fuzzed of what lies on our own disk: state, log, configuration."""

from __future__ import annotations

import hashlib
import math
import tempfile
import zlib
from pathlib import Path

import msgspec
import numpy as np

from collector import config as configuration
from collector.config.load import ConfigError
from collector.config.schema import Config as Settings
from collector.decode import Export
from collector.decode.kv import read_line
from collector.runtime.filesystem import SystemFiles
from collector.service.log import _HEAD, _PREFIX, Log
from collector.service.pipeline import make_pipeline
from online.state import LEARNERS, MAGIC, StateError, decode, encode
from tests.fuzz.mutations import edited_tree
from tests.fuzz.parsers import TEXT, Parser
from tests.support.recordings import kv_lines
from tests.support.step_exports import make_export


class _WithoutWarmUp(Settings, frozen=True, kw_only=True):
    warm_up_rows = 0


class State(Parser):
    """Checkpoints; the damage is sealed anew, to get behind sums."""

    bred_bytes_max = 3000

    def __init__(self, directory) -> None:
        super().__init__(directory)
        self._config = _WithoutWarmUp(learners=("rls",), feature_sets=("portable",))
        self._pipeline = make_pipeline(self._config)

    def seeds(self):
        small = [self._after(), *(self._after(make_export(1, steps_per_span=n)) for n in (1, 2))]
        small.append(self._after(kv=[read_line(line, "source") for line in kv_lines("c5_offload")[:2]]))
        return [*small * 12, self._after(make_export(40, steps_per_span=12), is_whole=True)]

    def corpus(self):
        """With what crashed once, told by the present writer: older files are refused before anything is read."""
        waiting = self._after(make_export(4, steps_per_span=12), is_whole=True)
        lies = [zlib.compress(zlib.decompress(waiting).replace(b"engine-0", b"engine-\xff"))]
        for value in (math.inf, math.nan):  # of a row that waits; of one nothing may be known
            tree = decode(_seal(waiting))
            (config,) = tree[LEARNERS]["configs"].values()
            held = config["targets"]["step_time"]["models"]["portable"][1]["held"]
            held["raw"] = np.full_like(held["raw"], value)
            lies.append(_body(tree))
        lies.append(_body(decode(_seal(waiting)) | {LEARNERS: []}))
        return [*super().corpus(), *lies]

    def _after(self, *exports, kv=(), is_whole=False):
        """What is in the file after these."""
        pipeline = make_pipeline(self._config)
        pipeline.process([Export(export.SerializeToString(), "peer", "grpc", 1) for export in exports], kv=kv)
        if is_whole:
            pipeline.flush()
        return _body(pipeline.to_checkpoint()[0])

    def edited(self, rng, data):
        """Often values are replaced, which no damaged byte does without the lengths before it."""
        if rng.random() < 0.6 or not data.startswith(b"\x78"):
            return super().edited(rng, data)
        try:
            # an array as the file has it; a view of it could not be copied
            tree = msgspec.msgpack.decode(
                zlib.decompress(data), ext_hook=lambda code, held: msgspec.msgpack.Ext(code, bytes(held))
            )
            for _ in range(rng.choice((1, 2, 2, 3))):
                tree["parts"] = edited_tree(rng, tree["parts"])
            return zlib.compress(msgspec.msgpack.encode(tree))
        except (LookupError, ValueError, TypeError, OverflowError, RecursionError):  # it may be damaged already
            return super().edited(rng, data)

    def parse(self, data):
        try:
            decode(data)
        except StateError:
            pass
        else:
            raise AssertionError("a file without its checksum was read")
        before = encode(self._pipeline.to_checkpoint()[0])
        try:
            position, _ = self._pipeline.from_checkpoint(decode(_seal(data)))
        except StateError:
            assert encode(self._pipeline.to_checkpoint()[0]) == before, "half of a checkpoint is worse than none"
            return False
        assert _finite(self._pipeline._bank.to_state())
        assert min(position) >= 0
        return True


def _body(tree):
    """Of the file of a checkpoint, what its checksum covers."""
    return encode(tree)[len(_seal(b"")) :]


def _seal(body):
    """A state file with this body."""
    return MAGIC + hashlib.blake2b(body).digest() + body


def _finite(value, name=""):
    """No number that is not finite; NaN is what is not known of waiting rows (``raw``) and of courses (``values``)."""
    if isinstance(value, dict):
        return all(_finite(each, key) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(_finite(each, name) for each in value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return not (np.isinf(value).any() or (np.isnan(value).any() and name not in {"raw", "values"}))
    return not isinstance(value, float) or math.isfinite(value)


class LogFile(Parser):
    """A segment that an earlier process left; half of the damage gets right checksums."""

    name = f"log.{1:016x}"

    def seeds(self):
        with tempfile.TemporaryDirectory() as name:
            log = Log(Path(name), 1 << 20, SystemFiles())
            log.open(1, 0)
            for number in range(4):
                log.append(Export(bytes([number]) * 6, "peer", "grpc", number))
            log.close()
            whole = (Path(name) / self.name).read_bytes()
            return [whole, whole[: len(whole) // 2]]

    def parse(self, data):
        path = self._directory / self.name
        path.write_bytes(data if zlib.crc32(data) & 1 else _with_checksums(data))
        log = Log(self._directory, 1 << 20, SystemFiles())
        log.open(1, 0)
        numbers = [export.seq for export in log.entries(1)]
        assert numbers == sorted(set(numbers))
        assert log.lost_entries == (numbers[-1] - len(numbers) if numbers else 0)
        log.close()
        return bool(numbers)


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
        *(*TEXT, b".nan", b": ", b"- ", b"&a ", b"*a", b"!!int ", b"!!bool ", b"!!timestamp ", b"!!binary ", b"!!set "),
        *(
            b"!!omap ",
            b"!!python/name:os ",
            b"<<: ",
            b"? ",
            b"|\n",
            b"%YAML 1.1\n",
            b"\t",
            b'"\\x',
            b"---\n",
            b"2001-13-13",
        ),
        *(b"1:99:99", b"0b_", b"# ", b"\xc2\x85"),
    )

    def seeds(self):
        numbers = [b"idle_timeout_s: 1.5", b"block_s: 1e2\n", b"engines_max: 9", b"queue_mib: 2\n"]
        texts = [b"learners: [rls]", b"scrape:\n- http://a", b"donors: ['a', \"b\"]", b"log_level: info\n", b""]
        rules = b"rules:\n- facts: {a: 1.5}\n"
        return [*(*numbers, *texts) * 3, rules, configuration.to_yaml(Settings()).encode()[:160]]

    def parse(self, data):
        path = self._directory / "config.yaml"
        path.write_bytes(data)
        try:
            config = configuration.load(path, {})
        except ConfigError:
            return False
        assert not any(head in msgspec.msgpack.encode(config) for head in _NOT_FINITE)
        return True


_NOT_FINITE = (b"\xcb\x7f\xf0", b"\xcb\x7f\xf8", b"\xcb\xff\xf0", b"\xcb\xff\xf8")
"""How MessagePack's infinities and NaN begin; no text in UTF-8 holds such bytes."""
