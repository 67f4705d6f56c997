"""The first event of many is read like all others, whatever stands before it."""

from __future__ import annotations

from collector.decode.columnar import SlimExport
from collector.decode.template import KEY_MAX, Events, Template, shape
from tests.support import otlp_bytes as otlp
from tests.support.otlp_load import Stream


def test_the_first_event_passes_beside_a_key_that_is_much_longer_than_its_first_one():
    export = SlimExport.FromString(Stream(1, spans_per_rpc=1, pool_rpcs=1, steps_per_span=4).export(0).payload)
    longer = otlp.attribute("x" * KEY_MAX, 1)
    events = [event + longer for event in export.items[0].items[0].items[0].events]
    layout = shape(events[0])
    assert layout is not None
    assert len(layout[0][0]) < KEY_MAX // 2
    columns = Events(events)
    assert Template(layout).match(columns, columns.summaries()).at.tolist() == [0, 1, 2, 3]
