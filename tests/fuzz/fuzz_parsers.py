"""Fuzz every parser but the OTLP protobuf one (that is fuzz_decode): damage seeds, expect an answer, never a crash.

    python -m tests.fuzz.fuzz_parsers json --seconds 60 --seed 1
    python -m tests.fuzz.fuzz_parsers all --executions 100000

Parsers: envelope, json, kv, files, state, journal, config. A seed is a file of ``tests/fuzz/corpus/<parser>`` or made
here; what crashed once is put there by name and is then a test (tests/unit/test_fuzz_corpus.py). The first exception
that a parser does not promise ends the run with the input in hexadecimal.
"""

from __future__ import annotations

import argparse
import gzip
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

import msgspec

from collector.config import load
from collector.config import to_yaml as config_yaml
from collector.decode.kv import read_frames, read_line, read_payload
from collector.envelope import count_spans
from collector.errors import ConfigError, StartError
from collector.journal import Journal
from collector.learning import make_pipeline
from collector.pipeline import Export
from collector.receivers.files import Recording
from collector.receivers.otlp_json import to_protobuf
from collector.state_image import decode, sealed
from online.state import StateError
from tests import otlp_bytes as otlp
from tests.builders import delimited, make_export, otlp_json
from tests.fuzz.mutations import damage
from tests.kv_cases import kv_lines

CORPUS = Path(__file__).parent / "corpus"
_TOKENS = (
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b'""',
    b"[]",
    b"{}",
    b"[[[[",
    b"\xff\xfe",
    b"9" * 30,
    b": ",
    b"\x00",
    b"- ",
)


class Parser:
    """Seeds, and what is done with the bytes; a parser of files writes them to ``directory``."""

    def __init__(self, directory) -> None:
        self._path = directory / "file"

    def seeds(self):
        raise NotImplementedError

    def parse(self, data):
        """Read it; an exception that is not promised is a crash."""
        raise NotImplementedError

    def corpus(self):
        """Seeds made here and kept ones."""
        kept = CORPUS / type(self).__name__.lower()
        return [*self.seeds(), *(path.read_bytes() for path in sorted(kept.glob("*")))]


class Envelope(Parser):
    """Counting spans before anything is parsed."""

    def seeds(self):
        return [make_export(3, steps_per_span=2).SerializeToString(), otlp.steps_export([otlp.summary(4)])]

    def parse(self, data):
        count_spans(data)


class Json(Parser):
    """A line of OTLP/JSON."""

    def seeds(self):
        return [otlp_json(make_export(2, steps_per_span=2)), otlp_json(make_export(1, steps_per_span=1), ints=int)]

    def parse(self, data):
        try:
            to_protobuf(data)
        except ValueError:
            return


class Kv(Parser):
    """KV messages as MessagePack, and recorded lines."""

    def seeds(self):
        return [*list(kv_lines("c5_offload"))[:20], *_some_payloads()]

    def parse(self, data):
        read_payload(data, "source", 1)
        read_frames([b"kv", b"\0" * 8, data], "source")
        read_line(data, "source")


def _some_payloads():
    return [
        msgspec.msgpack.encode(item) for item in ([1.5, [["BlockStored", [1, 2], None, [3], 16, None]], 0], [1.0, []])
    ]


class Files(Parser):
    """Recordings of every kind."""

    def seeds(self):
        whole = delimited(make_export(1, steps_per_span=2), make_export(2, steps_per_span=1))
        lines = otlp_json(make_export(1, steps_per_span=1)) * 2
        kv = b"".join(list(kv_lines("c5_offload"))[:5])
        return [whole, lines, kv, gzip.compress(whole, mtime=0), gzip.compress(lines, mtime=0)]

    def parse(self, data):
        self._path.write_bytes(data)
        try:
            for _ in Recording(self._path, lambda _: None):
                pass
        except StartError:
            return


class State(Parser):
    """State files; half of the time the damage is sealed again, so that it gets behind the checksum."""

    def __init__(self, directory) -> None:
        super().__init__(directory)
        from collector.config import Config

        self._config = Config(learners=("rls",))
        self._turn = 0
        self._pipeline = make_pipeline(self._config)

    def seeds(self):
        pipeline = make_pipeline(self._config)
        pipeline.process([Export(make_export(3, steps_per_span=4).SerializeToString(), "peer", "grpc", 3)])
        return [pipeline.whole_state(3)]

    def parse(self, data):
        self._turn += 1
        try:
            image = decode(sealed(data) if self._turn % 4 else data)
            self._pipeline.restore(image)
        except StateError:
            return


class JournalFile(Parser):
    """A segment that an earlier process left."""

    def __init__(self, directory) -> None:
        super().__init__(directory)
        self._path = directory / f"journal.{1:016x}"

    def seeds(self):
        with tempfile.TemporaryDirectory() as name:
            journal = Journal(Path(name), capacity_bytes=1 << 20, segment_bytes=1 << 20, fsync=False)
            journal.open(0)
            for number in range(5):
                journal.append(Export(bytes([number]) * 20, "peer", "grpc", number))
            journal.close()
            return [(Path(name) / self._path.name).read_bytes()]

    def parse(self, data):
        self._path.write_bytes(data)
        journal = Journal(self._path.parent, capacity_bytes=1 << 20, segment_bytes=1 << 20, fsync=False)
        journal.open(0)
        numbers = [export.seq for export in journal.entries(0)]
        assert numbers == sorted(set(numbers))
        journal.close()


class Config(Parser):
    """Configuration files."""

    def seeds(self):
        short = b"queue: {wait_s: 1.5}\nlearners: [rls]\njournal:\n  fsync: true\n"
        return [config_yaml(load(None, {})).encode()[:400], short]

    def parse(self, data):
        self._path.write_bytes(data)
        try:
            load(self._path, {})
        except ConfigError:
            return


PARSERS = {
    "envelope": Envelope,
    "json": Json,
    "kv": Kv,
    "files": Files,
    "state": State,
    "journal": JournalFile,
    "config": Config,
}


def edited(rng, data):
    """Damage as for protobuf, or a token that means something to a text format."""
    if rng.random() < 0.3:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice(_TOKENS) + data[at + rng.choice((0, 0, 1, 4)) :]
    return damage(rng, data) if rng.random() < 0.9 else data


def fuzz(name, directory, *, seed, seconds, executions):
    """Run one parser until a budget is used up; how many inputs were tried."""
    rng = random.Random(seed)
    parser = PARSERS[name](directory)
    corpus = parser.corpus()
    done, deadline_s = 0, time.monotonic() + seconds
    while done < executions and time.monotonic() < deadline_s:
        for _ in range(100):
            data = edited(rng, rng.choice(corpus))
            try:
                parser.parse(data)
            except Exception:  # noqa: BLE001
                traceback.print_exc()
                raise SystemExit(f"{name}: crash on {data.hex()}") from None
            done += 1
    return done


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parser", choices=[*PARSERS, "all"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--executions", type=int, default=(1 << 31) - 1)
    args = parser.parse_args()
    for name in PARSERS if args.parser == "all" else (args.parser,):
        start_s = time.process_time()
        with tempfile.TemporaryDirectory() as directory:
            done = fuzz(name, Path(directory), seed=args.seed, seconds=args.seconds, executions=args.executions)
        cpu_s = time.process_time() - start_s
        sys.stdout.write(f"{name:9} {done:9} inputs, seed {args.seed}, 0 crashes, {cpu_s:.0f} s CPU\n")


if __name__ == "__main__":
    main()
