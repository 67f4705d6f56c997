"""What is fuzzed of what others send: for each parser its seeds, tokens that mean something to it, and the call.

``parse`` says whether the bytes were taken, asserts that nothing worse than refusing came of them (no number that is
not finite, no order broken), and lets every exception through that the parser does not promise.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import math
from pathlib import Path

import msgspec

from collector.config import Config
from collector.decode import Export, decode_exports, fpm, wire
from collector.decode.kv import KvBatch, read_line, read_payload
from collector.decode.pages import CACHE_INFO, SERIES, ScrapedPage, is_page_line, parse_page, read_page_line
from collector.decode.wire import json_to_protobuf
from collector.join import SpanWindow
from collector.join.pages import PageEngine
from collector.recordings import Recording
from collector.runtime.filesystem import StartError
from collector.telemetry import Counts, table
from tests.fuzz.mutations import damaged, step_event
from tests.support import otlp_bytes as otlp
from tests.support.gpu_kernels import fpm_record
from tests.support.kv_batches import payload, stored
from tests.support.page_server import RECORDED
from tests.support.recordings import kv_lines
from tests.support.step_exports import delimited, every_kind_of_value, make_export, otlp_json
from tests.support.vllm_scheduler import Work

CORPUS = Path(__file__).parent / "corpus"
BINARY = (
    *(
        b"\x00",
        b"\xff\xfe",
        b"\x80" * 10,
        b"\xff\xff\xff\xff\x0f",
        b"\xc0",
        b"\x90",
        b"\x80",
        b"\x91",
        b"\xc1",
        b"\xa0",
    ),
    *(b"\xcb\x7f\xf8" + b"\0" * 6, b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xca\x7f\xc0\0\0", b"\xc4\x00"),
    *(b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff"),
)
"""What is odd in protobuf and MessagePack."""
TEXT = (
    *(b"null", b"-1", b"1e999", b'""', b"[]", b"{}", b"[[[[", b"\xff\xfe", b"9" * 30, b"\x00", b"NaN", b"1.5", b"true"),
    *(b"{", b"}", b'"', b"\\", b"\n", b" "),
)
"""What is odd in any text."""


class Parser:
    """One parser; ``directory`` is for what has to be on a disk. ``seeds`` are good inputs."""

    tokens = BINARY

    def __init__(self, directory) -> None:
        self._directory = directory

    def edited(self, rng, data):
        return damaged(rng, data, self.tokens)

    def corpus(self):
        """Seeds made here and kept ones."""
        kept = CORPUS / type(self).__name__.lower()
        return [*self.seeds(), *(path.read_bytes() for path in sorted(kept.glob("*")))]


class Envelope(Parser):
    """Counting spans before anything is parsed.

    Also as if the export were large: then the fields inside of spans are counted.
    """

    def seeds(self):
        two = otlp.export(("vllm.scheduler.step", [otlp.step_span([]), otlp.step_span([b""])]), ("x", [b""]))
        timed = otlp.field(2, otlp.field(2, b"\x39" + bytes(8)) * 3)
        return [make_export(2, steps_per_span=1).SerializeToString(), two * 2, otlp.field(1, timed * 2)]

    def parse(self, data):
        ends = wire.read_span_ends(data)
        with contextlib.suppress(IndexError, ValueError):
            wire.is_too_dense(data)
        return not isinstance(ends, wire.Outcome)


class Decode(Parser):
    """Exports of steps; whatever one holds, the export beside it is read."""

    guides = (otlp.summary(5), otlp.summary(5, otlp.PLUGIN_KEYS))
    good = otlp.steps_export([otlp.summary(9)], span_id=b"the good")

    def seeds(self):
        return [otlp.steps_export(events) for events in ([*self.guides, otlp.snapshot(3)], self.guides[:1], [])]

    def edited(self, rng, data):
        """Often new summaries, among which some are odd or damaged."""
        if rng.random() < 0.3:
            return super().edited(rng, data)
        events = [step_event(rng) for _ in range(rng.randrange(1, 9))]
        some = [damaged(rng, event) if rng.random() < 0.2 else event for event in events]
        whole = otlp.steps_export([*self.guides, *some, otlp.snapshot(3)])
        return damaged(rng, whole) if rng.random() < 0.2 else whole

    def parse(self, data):
        counts, exports = Counts(), [Export(each, "peer", 1) for each in (data, self.good)]
        *_, good = decode_exports(exports, SpanWindow(64).accept, counts)
        assert good.steps["step_id"].tolist() == [9]
        return counts[table.DECODED_EVENTS, table.ACCEPTED] > 1 + len(self.guides)


class Json(Parser):
    """A line of OTLP/JSON; what is taken is OTLP protobuf."""

    tokens = (
        *(*TEXT, b"\\ud800", b'"9e9"', b'"\xc2\xb9"', b'"-0"'),
        *(b'{"intValue":"', b'{"arrayValue":{"values":[', b',"kind":9'),
    )

    def seeds(self):
        small = make_export(1, steps_per_span=1)
        return [otlp_json(each, ints=ints) for each in (small, every_kind_of_value()) for ints in (str, int)]

    def parse(self, data):
        try:
            out = json_to_protobuf(data)
        except ValueError:
            return False
        assert not isinstance(wire.read_span_ends(out), wire.Outcome)
        return True


class Kv(Parser):
    """KV messages as MessagePack, and recorded lines."""

    tokens = (*BINARY, *TEXT)

    def seeds(self):
        lines = sorted(kv_lines("c5_offload"), key=len)
        odd = ([1.5, [["BlockStored", [1, 2], None, [3], 16, None]], 0], [2.0, [{"type": "X"}], None, 3])
        return [
            *(*lines[:6], lines[len(lines) // 2]),
            payload(stored(medium="CPU"), stored(300)),
            payload(["AllBlocksCleared"], ["Unknown", 1], rank=3),
            *map(msgspec.msgpack.encode, odd),
        ]

    def parse(self, data):
        found = read_payload(data, "source", 1), read_line(data, "source")
        for batch in found:
            if isinstance(batch, KvBatch):
                assert min([batch.ts_unix_ns, *batch.moves.values()]) >= 0
        return any(isinstance(batch, KvBatch) for batch in found)


class Passes(Parser):
    """Records of forward passes as MessagePack, and recorded lines."""

    tokens = Kv.tokens

    def seeds(self):
        record = fpm_record(Work(512, 1, 0, 3, 900), 0.012, number=7, waiting=2)
        odd = ({**record, "timing_scope": "gpu"}, {**record, "wall_time": 0}, {}, [])
        traced = {"event": {"fpm": record, "observed_at_unix_ms": 1_782_777_601_250}}
        both = [each for one in (record, *odd) for each in (msgspec.msgpack.encode(one), msgspec.json.encode(one))]
        return [*both, msgspec.json.encode(traced)]

    def parse(self, data):
        found = fpm.read_record(data, 1), fpm.read_line(data, "recording")
        passes = [passed for passed in found if isinstance(passed, fpm.ForwardPass)]
        for passed in passes:
            told = [value for value in msgspec.structs.astuple(passed) if isinstance(value, int | float)]
            assert min(told) >= 0
            assert math.isfinite(passed.wall_us)
        return bool(passes)


class Pages(Parser):
    """Pages of counters: by a parser that has seen a good one, by a fresh one, and as recorded lines."""

    tokens = (
        *(*TEXT, b"+Inf", b"<html>", b'engine="1"', b'le="+Inf"', b'le="x"', b'tp_rank="1"'),
        *(b"vllm:", b"sglang:", b"_bucket", b"# EOF\n", b" 17"),
    )

    def seeds(self):
        whole = gzip.decompress(RECORDED.with_name("metrics.txt.gz").read_bytes()).splitlines(keepends=True)
        needed = [line for line in whole if any(line.startswith(name) for name in (*SERIES, CACHE_INFO))]
        page = b"".join(needed)
        lines = gzip.decompress(RECORDED.read_bytes()).splitlines()
        return [
            page,
            page + page.replace(b'engine="0"', b'engine="1"'),
            page.replace(b"inter_token_latency", b"time_per_output_token").replace(b"kv_cache", b"gpu_cache"),
            page.replace(b".0\n", b".0 1700000000\n"),
            lines[3],
        ]

    def parse(self, data):
        readings = parse_page(data)
        assert repr(parse_page(data)) == repr(readings)  # NaN is not itself
        page = read_page_line(data, "file") if is_page_line(data) else None
        engines = list(readings) if isinstance(readings, tuple) else []
        engines += page.engines if isinstance(page, ScrapedPage) else ()
        page_engine = PageEngine("server", "", 0, Config())
        for number, reading in enumerate(engines):
            assert not any(math.isinf(value) for value in reading.values)
            page_engine.add(10**18 + number, number, reading)
        assert all((rows.steps > 0).all() for _, rows in page_engine.advance())
        return bool(engines)


class Files(Parser):
    """Recordings of every kind; their order never goes back."""

    tokens = (*(*BINARY, *TEXT, b"\r\n", b'"payload_b64"', b"\x1f\x8b", b"\x1f\x8b\x08\x00", b'{"resourceMetrics"'),)

    def seeds(self):
        bare = otlp.steps_export([])
        whole = otlp.varint(len(bare)) + bare + otlp.varint(len(bare)) + bare
        line = otlp_json(make_export(1, steps_per_span=1))
        kv = b"".join(sorted(kv_lines("c5_offload"), key=len)[:2])
        long = delimited(make_export(1, steps_per_span=1), make_export(1, steps_per_span=1))
        gzipped = [gzip.compress(whole, mtime=0), gzip.compress(line * 2, mtime=0)]
        return [whole, line * 2, kv, kv + line, long, *gzipped]

    def parse(self, data):
        warnings = []
        newest = taken = 0
        try:
            for timed in Recording("file", warnings.append, stream=io.BytesIO(data)):
                assert timed.unix_nano >= newest
                newest, taken = timed.unix_nano, taken + 1
        except StartError:
            return False
        assert taken or warnings
        return taken > 0
