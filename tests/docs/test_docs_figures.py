"""What README.md and docs/performance.md state of measurements is what docs/figures.json has of the runs."""

from __future__ import annotations

import re

import pytest

from tests.bench.bench_cost import MANY_STEPS, RECORDINGS, SPARSE_CALLS
from tests.bench.bench_cost import SECTIONS as COST
from tests.bench.bench_ingest import SECTIONS as INGEST
from tests.bench.bench_peers import SECTIONS as PEERS
from tests.bench.cost_stages import PARSE, STAGES
from tests.bench.figures import recorded
from tests.support.docs_tables import assert_table, make_table
from tests.support.paths import DOCS, ROOT

FIGURES = recorded()
README = (ROOT / "README.md").read_text(encoding="utf-8")
DEFAULT, RLS = "shipped default", "learners: [rls]"
STEADY = "1,000 steps/s + requests"
SPARSE = "100 steps/s + requests"
LARGE = "flat out, 1,000 steps a call"
SMALL = "flat out, 64 steps a call"
REPLAY = "replay of 200,000 steps"
RATIO = "÷ plain receiver"
READER = "÷ plain reader"


def figure(section, name):
    """A figure, whether it has a target or not."""
    value = FIGURES[section][name]
    return value[0] if isinstance(value, list) else value


def judged(section, name, shown):
    """A figure in its format, its target, and whether it was missed; nothing of both where it has none."""
    if not isinstance(FIGURES[section][name], list):
        return shown.format(figure(section, name)), "", ""
    value, target = FIGURES[section][name]
    return shown.format(value), f"{target:g}", "" if value <= target else "missed"


def readme_costs():
    torture = FIGURES["torture"]
    ratios = {
        profile: "; ".join(f"{figure('cost recordings', f'{name}, {profile}: {READER}'):.1f}" for name in RECORDINGS)
        for profile in (DEFAULT, "bulk")
    }
    resident = "; ".join(f"{figure('cost memory', f'RSS {when}, {DEFAULT}'):.0f}" for when in ("idle", "loaded"))
    late = "; ".join(f"{figure('ingest latency', f'20,000 steps/s while learning: {p}'):.1f}" for p in ("p50", "p99"))
    cost = "`make bench WHAT=cost`"
    yield (
        f"CPU of learning from recordings of vLLM, {'; '.join(f'`{name}`' for name in RECORDINGS)}",
        f"{ratios[DEFAULT]} × that of a Python reader that makes a dict of every event",
        cost,
    )
    yield "the same, `--profile bulk`", f"{ratios['bulk']} × that of this reader", cost
    yield "memory, shipped default: idle; loaded", f"{resident} MB", cost
    yield "acknowledgement at 20,000 steps/s, p50; p99", f"{late} ms", "`make bench WHAT=ingest`"
    yield (
        f"{torture['kills']} kills under load with `durability: journal`",
        f"0 of {torture['acknowledged']:,} exports lost, 0 learned twice",
        "`make torture`",
    )


def of_recordings():
    """Recordings of vLLM, beside a reader that learns nothing."""
    for name in RECORDINGS:
        reader_s = figure("cost recordings", f"{name}: plain reader, s CPU")
        yield (
            f"`{name}`",
            f"{reader_s:.2f} s",
            *(
                f"{figure('cost recordings', f'{name}, {profile}: {READER}'):.1f} "
                f"({figure('cost recordings', f'{name}, {profile}: s CPU'):.2f} s)"
                for profile in (DEFAULT, "bulk")
            ),
        )


def learning_costs():
    """Each load beside a receiver that learns nothing."""
    a_second, *_ = SPARSE_CALLS
    sparse, of_a_second = f"{SPARSE}, {a_second}", f"100 steps/s + 5 requests/s, {a_second}, shipped default"
    for section, what, profile, words in (
        ("cost steady", STEADY, DEFAULT, "1,000 steps/s + 20 requests/s, shipped default"),
        ("cost steady", STEADY, RLS, "the same, `learners: [rls]`"),
        ("cost sparse", sparse, DEFAULT, of_a_second),
        ("cost flat_out", LARGE, "bulk", "flat out, 1,000 steps a call, bulk profile"),
        ("cost flat_out", LARGE, DEFAULT, "flat out, 1,000 steps a call, shipped default"),
        ("cost flat_out", SMALL, "bulk", "flat out, 64 steps a call, bulk profile"),
    ):
        ratio, *rest = judged(section, f"{what}, {profile}: {RATIO}", "{:.2f}")
        us, millicores = (figure(section, f"{what}, {profile}: {unit}") for unit in ("us/step", "millicores"))
        paced = f", {millicores:.0f} millicores" if section in ("cost steady", "cost sparse") else ""
        yield words, f"{ratio} ({us:.1f} µs per step{paced})", *rest


def resources():
    """Memory, start and replay."""
    for name, words, shown in (
        (f"RSS idle, {DEFAULT}", "idle: shipped default", "{:.0f} MB"),
        (f"RSS loaded, {DEFAULT}", "loaded: shipped default", "{:.0f} MB"),
        (f"RSS idle, {RLS}", "idle: `learners: [rls]`", "{:.0f} MB"),
        (f"RSS loaded, {RLS}", "loaded: `learners: [rls]`", "{:.0f} MB"),
        (f"start to ready, {DEFAULT}", "start to ready: shipped default", "{:.2f} s CPU"),
        (f"start to ready, {RLS}", "start to ready: `learners: [rls]`", "{:.2f} s CPU"),
    ):
        yield words, *judged("cost memory", name, shown)
    yield "replay of 200,000 steps: shipped default", *judged("cost replay", f"{REPLAY}, {DEFAULT}", "{:.1f} s CPU")
    yield "replay of 200,000 steps: bulk", f"{figure('cost replay', f'{REPLAY}, bulk'):.1f} s CPU", "", ""
    engines = judged("cost engines", f"{MANY_STEPS:,} steps of 1,000 engines ÷ of 10", "{:.2f}")
    yield "a step of 1,000 engines ÷ one of 10 engines, the same total", *engines


def stages():
    """Where a microsecond goes."""
    parse_us = figure("cost stages", f"{DEFAULT}: {PARSE}")
    words = (
        "decode: steps by template, events of requests by shape",
        "place in the windows of their engines",
        "rows: final steps, features, order among engines",
        "learn: five targets, two of them of steps",
        "a snapshot every five seconds",
    )
    for stage, what in zip(STAGES, words, strict=True):
        spent_us = figure("cost stages", f"{DEFAULT}: {stage}")
        yield what, f"{spent_us:.1f}", f"{spent_us / parse_us:.2f}"
    yield "a parse with a dict per event", f"{parse_us:.1f}", "1"


def beside_the_collector():
    """Each load into all of them."""
    for section, what, words in (
        ("peers steady", f"{STEADY}, {DEFAULT}", "1,000 steps/s + 20 requests/s, shipped default"),
        ("peers flat_out", f"{LARGE}, bulk", "flat out, 1,000 steps a call, bulk profile"),
        ("peers flat_out", f"{SMALL}, bulk", "flat out, 64 steps a call, bulk profile"),
    ):
        costs_us = [figure(section, f"{what}: {name}: us/step") for name in ("nop", "queue", "plain", "tracefit")]
        yield words, *(f"{us:.1f}" for us in costs_us), f"{figure(section, f'{what}: ÷ Collector'):.2f}"


def way_in():
    """What does not depend on what the steps say."""
    for section, name, words, shown in (
        (
            "ingest foreign",
            "foreign spans, 10000/s, 500 a call",
            "spans of foreign scopes, 10,000/s",
            "{:.1f} µs per span",
        ),
        ("ingest default_profile", "idle", "idle", "{:.1f} millicores"),
        (
            "ingest large_export",
            "24.5 MB exports: steps not accepted",
            "two exports of 24.5 MB: steps refused",
            "{:.0f}",
        ),
        ("ingest large_export", "24.5 MB exports: RSS growth", "two exports of 24.5 MB: memory", "{:.0f} MB more"),
        (
            "ingest overload",
            "overload, twice the capacity for 30 s: steps lost",
            "twice the capacity for 30 s: lost",
            "{:.0f}",
        ),
        (
            "ingest overload",
            "overload: RSS growth (queue bound 16.8 + 25)",
            "twice the capacity for 30 s: memory",
            "{:.0f} MB more",
        ),
        ("ingest latency", "20,000 steps/s while learning: p50", "acknowledgement at 20,000 steps/s: p50", "{:.1f} ms"),
        ("ingest latency", "20,000 steps/s while learning: p99", "acknowledgement at 20,000 steps/s: p99", "{:.1f} ms"),
    ):
        yield words, *judged(section, name, shown)


JUDGED = ("what", "measured", "wanted", "")
TABLES = {
    ("../README.md", "costs"): (("", "measured", "command"), readme_costs),
    ("performance.md", "recordings"): (
        ("recording", "plain reader", "shipped default ÷ plain reader", "bulk profile ÷ plain reader"),
        of_recordings,
    ),
    ("performance.md", "learning"): (("what", "÷ plain receiver", "wanted", ""), learning_costs),
    ("performance.md", "resources"): (JUDGED, resources),
    ("performance.md", "stages"): (
        ("stage", "shipped default, µs per step", "of a parse with a dict per event"),
        stages,
    ),
    ("performance.md", "peers"): (
        (
            "µs of CPU per step",
            "Collector: dropped",
            "Collector: queue on disk",
            "plain receiver",
            "tracefit",
            "÷ Collector",
        ),
        beside_the_collector,
    ),
    ("performance.md", "ingest"): (JUDGED, way_in),
}


@pytest.mark.parametrize(("document", "name"), TABLES)
def test_tables_of_measurements_have_the_figures_of_the_runs(document, name):
    header, rows = TABLES[document, name]
    assert_table(document, name, make_table(header, list(rows())))


def test_the_text_around_the_tables_has_them_too():
    performance = (DOCS / "performance.md").read_text(encoding="utf-8")
    plain_us = figure("cost steady", "plain receiver: us/step")
    assert f"learns nothing: {plain_us:.1f} µs per step in the same run" in " ".join(performance.split())
    assert f"takes about {FIGURES['demo']['cpu_s']:.0f} s of CPU" in README


def test_figures_are_of_sections_that_the_benches_have():
    runs = {*(f"cost {name}" for name in COST), *(f"ingest {name}" for name in INGEST)}
    runs |= {*(f"peers {name}" for name in PEERS), "demo", "torture"}
    assert set(FIGURES) <= runs
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", section["measured_on"]) for section in FIGURES.values())


def test_the_demo_in_the_readme_is_a_demo_that_ran():
    (shown,) = re.findall(r"^\$ uvx --from \S+ tracefit demo\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    left = iter(FIGURES["demo"]["said"])
    for line in shown.splitlines():
        assert line == "..." or line in left, line  # in the order in which it was said
