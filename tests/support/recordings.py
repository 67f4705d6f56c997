"""Recordings of real vLLM telemetry: those under tests/data, and more where TRACEFIT_RECORDINGS names a directory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.internal.decoder import _DecodeVarint

from collector.decode import Export
from tests.support.paths import DATA
from tests.support.toy_spans import spans_in


def otlp_file(name: str) -> Path:
    """The OTLP file of a bundled recording."""
    return DATA / name / "otlp.pb.gz"


def kv_lines(name: str) -> list[bytes]:
    """Lines of a bundled recording's KV messages."""
    with gzip.open(DATA / name / "kv.jsonl.gz") as stream:
        return list(stream)


def messages(path: Path) -> Iterator[bytes]:
    """Length-delimited messages of a gzipped file."""
    data, position = gzip.decompress(path.read_bytes()), 0
    while position < len(data):
        size, position = _DecodeVarint(data, position)
        yield data[position : position + size]
        position += size


def payloads(name: str) -> Iterator[bytes]:
    """Exports of a bundled recording as they were received."""
    return messages(otlp_file(name))


def received(path: Path) -> list[dict[str, object]]:
    """What stood beside each export when it was received (clocks, peer); empty without an index."""
    index = path.with_name("otlp.idx.jsonl.gz")
    return [json.loads(line) for line in gzip.decompress(index.read_bytes()).splitlines()] if index.exists() else []


def recording(path: Path) -> list[Export]:
    """Exports of a recording, with the peer each came from."""
    peers = [line["peer"] for line in received(path)]
    return [
        Export(payload, peers[number] if peers else path.parent.name, spans_in(payload), str(path))
        for number, payload in enumerate(messages(path))
    ]
