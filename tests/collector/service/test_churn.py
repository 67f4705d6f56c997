"""A gateway sees vLLM processes come and go for months; what is held depends on bounds, not on how many there were."""

import gc
from types import FunctionType, MethodType, ModuleType

from collector.config.schema import Config
from collector.decode import Export
from collector.service.pipeline import Pipeline
from collector.telemetry import Counts, table
from collector.telemetry.reasons import JoinEvent
from tests.support.step_exports import make_export

ENGINES = 3
SETTINGS = Config(engines_max=ENGINES, join_timeout_s=2, allowed_lateness_s=1, learners=("rls",))
STEPS = 60


def reachable(root):
    """How many objects hang on it."""
    seen, todo = {id(root)}, [root]
    while todo:
        for one in gc.get_referents(todo.pop()):
            if id(one) not in seen and not isinstance(one, (type, ModuleType, FunctionType, MethodType)):
                seen.add(id(one))
                todo.append(one)
    return len(seen)


def generation(pipeline, number):
    """Some processes with two emitters each start, send, and are never seen again."""
    for process in range(ENGINES):
        first_step = 1 + (number * ENGINES + process) * 10 * STEPS
        for emitter in "ab":
            request = make_export(6, first_step=first_step, instance=f"pod-{number}-{process}{emitter}")
            for span in request.resource_spans[0].scope_spans[0].spans:
                span.span_id = emitter.encode() + span.span_id[1:]
            pipeline.process([Export(request.SerializeToString(), "peer", 6)])
    pipeline.snapshot(1, number)
    return pipeline.take_counts()


def test_what_is_held_does_not_grow_with_the_processes_ever_seen(monkeypatch):
    monkeypatch.setattr("online.bank.ENGINES_MAX", 4)
    monkeypatch.setattr("collector.join.spans.EMITTERS_RATIO", 1)
    monkeypatch.setattr("collector.join.events.WATERMARKS_MAX", 8)
    pipeline = Pipeline(SETTINGS)
    met, held = Counts(), []
    for number in range(30):
        met.merge(generation(pipeline, number))
        if number % 3 == 0:
            held.append(reachable(pipeline))
    for event in (JoinEvent.ENGINE_EVICTED, JoinEvent.DUPLICATE_EMITTER):
        assert met[table.JOIN_EVENTS, event] >= 25 * ENGINES
    assert max(held[-3:]) <= 1.05 * max(held[3:6])
    assert len(pipeline.joiner.emitters) <= 2 * ENGINES
