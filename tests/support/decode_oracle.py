"""Two decoders side by side: everything they say must be the same."""

from __future__ import annotations

import dataclasses

from google.protobuf.message import DecodeError

from collector.decode import plain
from collector.decode.columnar import Decoder
from collector.decode.records import Tally
from collector.join.dedupe import SpanWindow
from collector.telemetry.reasons import Skip


def decode_plainly(payloads):
    tally = Tally()
    window = SpanWindow(600 * 10**9, 100_000, 256)
    out = []
    for payload, peer in payloads:
        try:
            out.append(plain.decode(payload, peer, window.admit, tally))
        except DecodeError:
            out.append(None)
    return out, tally, len(window)


def decode_in_columns(payloads, decoder=None):
    tally = Tally()
    window = SpanWindow(600 * 10**9, 100_000, 256)
    return (decoder or Decoder()).decode(payloads, window.admit, tally), tally, len(window)


def comparable(telemetry):
    """NaN-safe and exact: columns as bytes, records by their text."""
    out = dataclasses.asdict(telemetry)
    for name in ("steps", "snapshots"):
        out[name] = (getattr(telemetry, name).dtype, getattr(telemetry, name).shape, getattr(telemetry, name).tobytes())
    return {name: repr(value) for name, value in out.items()}


def assert_same(payloads, decoder=None):
    """Both decoders agree on content, order, counts and the spans remembered; returns the columnar tally."""
    expected, plain_tally, plain_spans = decode_plainly(payloads)
    got, tally, spans = decode_in_columns(payloads, decoder)
    assert [one and [comparable(t) for t in one] for one in got] == [
        one and [comparable(t) for t in one] for one in expected
    ]
    assert _counts(tally) == _counts(plain_tally)
    assert tally.summaries_columnar + tally.summaries_plain == plain_tally.summaries_plain
    assert spans == plain_spans
    return tally


def _counts(tally):
    out = {field.name: getattr(tally, field.name) for field in dataclasses.fields(tally)}
    del out["summaries_columnar"], out["summaries_plain"]
    for name in ("spans_skipped", "events_skipped"):
        out[name] = {reason: count for reason, count in out[name].items() if count}
        assert set(out[name]) <= set(Skip)
    return out
