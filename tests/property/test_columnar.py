"""Whatever bytes come, the columnar decoder says what the plain one says."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from collector.telemetry import table
from tests.support import otlp_bytes as otlp
from tests.support.decode_oracle import assert_same


@given(st.lists(st.integers(0, (1 << 56) - 1), min_size=1, max_size=30))
def test_varints_of_every_width_come_out_whole(times):
    made = [
        otlp.summary(5, otlp.PLUGIN_KEYS, **{"step.ts_done_ns": time, "batch.attn_pairs": time >> 3}) for time in times
    ]
    counts = assert_same([(otlp.steps_export(made), "peer")])
    assert counts[table.DECODED_SUMMARIES, "columnar"] == len(times)


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=30))
def test_doubles_of_every_bit_pattern_are_judged_alike(patterns):
    made = [
        otlp.summary(5, **{"kv.usage_gpu_ratio": struct.unpack("<d", struct.pack("<Q", bits))[0]}) for bits in patterns
    ]
    assert_same([(otlp.steps_export(made), "peer")])
