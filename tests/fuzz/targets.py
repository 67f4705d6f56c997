"""What must hold for any bytes: no exception, and no difference between the decoders."""

from __future__ import annotations

import numpy as np
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.decode import plain
from collector.decode.columnar import Decoder
from collector.decode.records import STEP_DTYPE
from tests import otlp_bytes as otlp
from tests.decode_oracle import assert_same

_decoder = Decoder()
_GUIDES = [otlp.summary(5), otlp.summary(5, otlp.PLUGIN_KEYS)]
"""In front of each batch, so that both usual layouts are tried on all that follows."""


def check_export(data):
    """An export of these bytes, decoded beside a good one."""
    assert_same([(data, "peer"), (otlp.steps_export([otlp.summary(9)]), "peer")], _decoder)


def check_events(events):
    """What the columns take of these events the plain decoder reads alike; returns how many they took."""
    matched = _decoder._match_layouts([*_GUIDES, *events])
    places = matched.at.tolist()
    assert places == sorted(set(places))
    assert places[:2] == [0, 1]
    assert matched.rows.shape == (len(places), len(STEP_DTYPE.names))
    for place, row in zip(places[2:], matched.rows[2:], strict=True):
        expected = np.array([plain.summary(Span.Event.FromString(events[place - 2]))], STEP_DTYPE)
        assert row.tobytes() == expected.tobytes(), events[place - 2].hex()
    return len(places) - 2
