"""Every reason that the page shows is reached by the product's own code: a row of a counter that no input can raise
says "never" where it means "nobody looks".

Most reasons are asserted by the tests of what raises them; ``TOLD_BY`` names their files. For the others there is a
case here: it runs a part of the product and gives what that counted. A new member with neither fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import inspect
import math
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from collector.config import Config
from collector.fleet import sources as state_fetch
from collector.fleet.pull import Puller, PullOptions
from collector.ingest.intake import Intake
from collector.ingest.queue import AdmissionQueue, Export
from collector.service.pipeline import Pipeline
from collector.telemetry import Counts, Metrics, reasons, table
from collector.telemetry.metrics import metric_of
from collector.telemetry.reasons import (
    Asked,
    ForwardOutcome,
    JoinEvent,
    Outcome,
    PluginLoss,
    Restored,
    RowDrop,
    Signal,
    Skip,
    Stall,
    Transport,
)
from online.rows import RowOutcome, Target
from tests.support.clocks import FakeClock
from tests.support.fleets import CONFIG as FLEET_CONFIG
from tests.support.fleets import NOW_NS, state_of, state_server
from tests.support.page_server import PageServer
from tests.support.paths import ROOT
from tests.support.pipelines import replayed
from tests.support.step_exports import make_export
from tests.support.toy_engine import Job, many_jobs, run_engine
from tests.support.toy_spans import (
    Piece,
    export_of,
    exports_of,
    pieces,
)

COLLECTOR = "tests/collector"
TOLD_BY = {
    ForwardOutcome: ("../wire/test_forward.py",),
    Signal: ("../wire/test_forward.py",),
    Target: ("../wire/test_fpm.py",),
    Skip: ("decode/test_bad_input.py", "decode/test_request_spans.py", "decode/test_spans.py", "decode/test_kv.py"),
    RowDrop: (
        "decode/test_bad_input.py",
        "join/test_checkpoint.py",
        "join/pages/test_bad_pages.py",
        "join/pages/test_scrape_windows.py",
        "join/requests/test_occupancy.py",
        "join/requests/test_requests.py",
        "join/requests/test_trace_sampling.py",
    ),
    JoinEvent: (
        "../wire/test_fpm.py",
        "decode/test_bad_input.py",
        "join/requests/test_requests.py",
        "join/steps/test_sequence.py",
        "join/test_same_engine.py",
        "join/test_shared_ids.py",
        "service/test_pipeline.py",
    ),
    PluginLoss: ("service/test_plugin_losses.py",),
    Asked: ("ingest/scrape/test_scraper.py", "decode/pages/test_page_text.py"),
    Stall: ("service/test_supervision.py",),
    Restored: ("service/test_checkpoint.py",),
    Transport: ("../wire/test_otlp_grpc.py", "../wire/test_otlp_http.py"),
    Outcome: (
        "../wire/test_otlp_grpc.py",
        "../wire/test_otlp_http.py",
        "../wire/test_durability.py",
        "../wire/test_security.py",
    ),
}
Reached = Iterable[enum.StrEnum]


class Case(NamedTuple):
    """A run of a part of the product, and what it must count."""

    run: Callable[..., Reached]
    members: tuple[enum.StrEnum, ...]


class OneConfiguration(Config, frozen=True, kw_only=True):
    """A second configuration has no place; a second engine has."""

    configs_max = 1


def labels_of(counts: Counts) -> list[enum.StrEnum]:
    return [label for row, count in counts.items() if count and row is not metric_of(row) for label in row[1:]]


def process(pipeline, *group: Piece) -> None:
    pipeline.process([Export(export_of(group).SerializeToString(), "peer", "test", len(group))])


def rows_of_a_replay() -> Reached:
    """A healthy engine; one whose learner raises; rows with values that no step has."""
    preempted = Job("preempted", 300, 60, 5, preempted_step=20, resumed_step=40)
    pipeline = replayed(exports_of(pieces(run_engine([preempted, *many_jobs(60)]))))
    out = labels_of(pipeline.take_counts())
    learn = pipeline._bank.learn

    def odd(config_id, target, rows, engines=None):
        if len(rows) < 5:
            return learn(config_id, target, rows, engines)
        values = rows.elapsed_us.copy()
        values[:3] = math.nan, -1.0, 1e300
        raw = rows.raw.copy()
        raw[rows.offsets[3] : rows.offsets[4]] = math.nan
        return learn(config_id, target, dataclasses.replace(rows, elapsed_us=values, raw=raw), engines)

    for learning in (odd, lambda *_: 1 / 0):
        pipeline._bank.learn = learning
        first = 10**6 * (1 + (learning is not odd))
        run = run_engine(many_jobs(60), start_ns=10**15 + first * 10**9)
        for export in exports_of(pieces(run)):
            pipeline.process([export])
        pipeline.flush()
        out += labels_of(pipeline.take_counts())
    full = Pipeline(OneConfiguration(learners=("rls",)), "0")
    for number, instance in enumerate(("first", "newcomer")):
        request = make_export(steps_per_span=200, first_step=1 + 1000 * number, instance=instance)
        full.process([Export(request.SerializeToString(), "peer", "grpc", 1)])
    full.flush()
    return out + labels_of(full.take_counts())


def offers() -> Reached:
    """Exports that meet a disk that fails, and a fault of ours."""
    metrics, queue = (
        Metrics(CollectorRegistry()),
        AdmissionQueue(FakeClock(), capacity_bytes=1 << 20, wait_s=0.0, record=lambda _: Outcome.LOG),
    )
    sound = make_export().SerializeToString()
    asyncio.run(Intake(queue, metrics).offer(sound, "peer", Transport.HTTP))
    queue.put = lambda *_: 1 / 0
    with contextlib.suppress(ZeroDivisionError):
        asyncio.run(Intake(queue, metrics).offer(sound, "peer", Transport.HTTP))
    return [outcome for outcome in Outcome if metrics.value(table.REQUESTS, Transport.HTTP, outcome)]


def pulls(tmp_path, monkeypatch) -> Reached:
    monkeypatch.setattr(state_fetch, "STATE_BYTES_MAX", 200_000)
    clock = FakeClock(unix_nano=NOW_NS)

    served = {
        "good": state_of("a", 1, rows=80),
        "past": state_of("a", 1, rows=70),
        "future": state_of("b", 1, rows=80, begin_ns=2 * NOW_NS),
        "damaged": b"no state",
        "large": b"x" * 200_001,
        "closed": 401,
        "off": 404,
        "young": 503,
    }
    with state_server(served) as server, PageServer(lambda *_: (200, {}, None)) as hanging:
        urls = [f"http://127.0.0.1:{server.port}/{name}" for name in served]
        outcomes = []
        for sources, timeout_s in (
            ((*urls, str(tmp_path / "nowhere.bin")), 30.0),
            ((f"http://127.0.0.1:{hanging.port}/state",), 0.3),
        ):
            puller = Puller(PullOptions(sources, tmp_path / "fleet", timeout_s=timeout_s), FLEET_CONFIG, clock, print)
            puller.start()
            outcomes += [Asked(source.outcome) for source in puller.pull().sources]
            puller.stop()
    return outcomes


CASES = (
    Case(rows_of_a_replay, (*RowOutcome, *(target for target in Target if target is not Target.GPU_TIME))),
    Case(offers, (Outcome.LOG, Outcome.FAILED)),
    Case(pulls, dict(table.FLEET_SOURCES.labels)["outcome"]),
)  # fmt: skip


def told(member: enum.Enum) -> bool:
    """Whether a test of what raises it names it."""
    texts = ((ROOT / COLLECTOR / file).read_text() for file in TOLD_BY.get(type(member), ()))
    names = re.compile(
        rf'{type(member).__name__}\.{member.name}\b|"{member.value}"|for \w+ in {type(member).__name__}\b'
    )
    return any(names.search(text) for text in texts)


def test_every_member_of_every_closed_set_is_asserted_by_a_test():
    named = {(type(member), member) for case in CASES for member in case.members}
    every = {(closed, member) for closed in closed_sets() for member in closed}
    assert [member for closed, member in every - named if not told(member)] == []


def closed_sets() -> set[type[enum.Enum]]:
    """Those by which the table counts."""
    labels = [value for metric in (*table.TABLE, *table.FLEET_TABLE) for _, values in metric.labels for value in values]
    return {type(value) for value in labels if isinstance(value, enum.Enum)}


def test_every_reason_on_the_page_of_reasons_is_counted():
    enums = {each for each in vars(reasons).values() if isinstance(each, type) and issubclass(each, enum.Enum)}
    assert {each for each in enums if each.__module__ == reasons.__name__} <= closed_sets()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.run.__name__)
def test_a_case_reaches_what_it_names(case, request):
    fixtures = [name for name in ("tmp_path", "monkeypatch") if name in inspect.signature(case.run).parameters]
    reached = {(type(member), member) for member in case.run(*(request.getfixturevalue(name) for name in fixtures))}
    assert {(type(member), member) for member in case.members} - reached == set()
