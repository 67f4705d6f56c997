"""The join fed with a recording and its KV batches."""

import copy
import functools

import numpy as np

from collector.config.schema import Config
from collector.join.events import Rows
from collector.join.joiner import Joiner
from tests.support.recordings import payloads
from tests.support.toy_spans import telemetry_in


@functools.cache
def _decoded(name):
    return [one for export in payloads(name) for one in telemetry_in(export)]


def telemetry(name, keep=lambda _step: True):
    """Decoded exports; summaries of steps that ``keep`` refuses are left out, as sampling would."""
    out = []
    for one in map(copy.copy, _decoded(name)):
        chosen = np.array([keep(int(step)) for step in one.steps["step_id"]], bool)
        if not chosen.all():
            one.steps = one.steps[chosen]
            one.snapshots = one.snapshots[:0]
        out.append(one)
    return out


def joined(name, batches, keep=lambda _step: True):
    """A joiner that has taken a whole recording, flushed, and the rows it gave."""
    joiner = Joiner(Config())
    for one in batches:
        joiner.kv.add(one)
    for one in telemetry(name, keep):
        joiner.add(one)
    return joiner, rows_of(joiner.drain(flush=True))


def rows_of(events):
    return [event for event in events if isinstance(event, Rows)]


def sequences(joiner):
    return {engine.instance: one for engine in joiner.engines.values() for one in engine.processes}
