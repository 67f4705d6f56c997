"""What must hold for any bytes: no exception, and no difference between the decoders."""

from __future__ import annotations

import numpy as np
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.decode import spans as plain
from collector.decode.columnar import Decoder, Events
from collector.decode.records import STEP_DTYPE
from tests.support import otlp_bytes as otlp
from tests.support.decode_oracle import assert_same

_decoder = Decoder()
GUIDES = (otlp.summary(5), otlp.summary(5, otlp.PLUGIN_KEYS))
"""In front of each batch, so that both usual layouts are tried on all that follows."""


def check_export(data):
    """An export of these bytes, decoded beside a good one."""
    assert_same([(data, "peer"), (otlp.steps_export([otlp.summary(9)]), "peer")], _decoder)


def check_events(events, guides=GUIDES):
    """What the columns take of these events the plain decoder reads alike; returns how many they took."""
    matched = Events([*guides, *events]).match()
    places = matched.at.tolist()
    first = len(guides)
    assert places == sorted(set(places))
    assert places[:first] == list(range(first))
    assert matched.rows.shape == (len(places), len(STEP_DTYPE.names))
    for place, row in zip(places[first:], matched.rows[first:], strict=True):
        expected = np.array([plain.summary(Span.Event.FromString(events[place - first]))], STEP_DTYPE)
        assert row.tobytes() == expected.tobytes(), events[place - first].hex()
    return len(places) - first
