"""What README.md and docs/accuracy.md state of measurements is what docs/figures.json has of the runs."""

import re

import pytest

from tests.bench import bench_gpus, bench_silicon, bench_systems
from tests.bench.bench_cost import PROFILES, RECORDINGS, SECTIONS
from tests.bench.figures import recorded
from tests.support.docs_tables import assert_table, make_table
from tests.support.paths import ROOT

FIGURES = recorded()
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCES = ("plugin", "spans", "pages")
LATE = "20,000 steps/s while learning"


def figure(section, name):
    """A figure, whether it has a target or not."""
    value = FIGURES[section][name]
    return value[0] if isinstance(value, list) else value


def ratios(profile):
    return [f"{figure('cost recordings', f'{name}, {profile}: ÷ plain reader'):.1f}" for name in RECORDINGS]


def readme_costs():
    torture = FIGURES["torture"]
    resident = "; ".join(f"{figure('cost memory', f'RSS {when}, shipped default'):.0f}" for when in ("idle", "loaded"))
    late = "; ".join(f"{figure('cost latency', f'{LATE}: {p}'):.1f}" for p in ("p50", "p99"))
    cost = "`make bench WHAT=cost`"
    yield (
        f"CPU of learning from recordings of vLLM, {'; '.join(f'`{name}`' for name in RECORDINGS)}",
        f"{'; '.join(ratios('shipped default'))} × that of a Python reader that makes a dict of every event",
        cost,
    )
    yield "the same, `--profile bulk`", f"{'; '.join(ratios('bulk'))} × that of this reader", cost
    yield "memory, shipped default: idle; loaded", f"{resident} MB", cost
    yield "acknowledgement at 20,000 steps/s, p50; p99", f"{late} ms", "`make bench WHAT=ingest`"
    loops = "; ".join(", ".join(f"{error:.0f}" for error in FIGURES["vllm"][source][:6:2]) for source in SOURCES)
    words = "closed loops of a real vLLM, told by the plugin; spans; its page: mean error of ITL, TTFT, E2E"
    yield words, f"{loops} %", "`make bench WHAT=vllm`"
    yield (
        f"{torture['kills']} kills under load with `durability: log`",
        f"0 of {torture['exports']:,} exports lost, 0 learned twice",
        "`make torture`",
    )


def of_recordings():
    """Recordings of vLLM, beside a reader that learns nothing."""
    for name in RECORDINGS:
        costs = (
            f"{figure('cost recordings', f'{name}, {profile}: ÷ plain reader'):.1f} "
            f"({figure('cost recordings', f'{name}, {profile}: s CPU'):.2f} s)"
            for profile in PROFILES
        )
        yield f"`{name}`", f"{figure('cost recordings', f'{name}: plain reader, s CPU'):.2f} s", *costs


def resources():
    """Memory, start and acknowledgements, each beside its target."""
    for section, name, words, shown in (
        ("cost memory", "RSS idle, shipped default", "memory, idle", "{:.0f} MB"),
        ("cost memory", "RSS loaded, shipped default", "memory, loaded", "{:.0f} MB"),
        ("cost memory", "start to ready, shipped default", "start to ready", "{:.2f} s CPU"),
        ("cost latency", f"{LATE}: p50", "acknowledgement at 20,000 steps/s: p50", "{:.1f} ms"),
        ("cost latency", f"{LATE}: p99", "acknowledgement at 20,000 steps/s: p99", "{:.1f} ms"),
    ):
        value, target = FIGURES[section][name]
        yield words, shown.format(value), f"{target:g}", "" if value <= target else "missed"


def of_real_loops():
    """A real vLLM by each source: mean and worst error, shares."""
    for source in SOURCES:
        itl, *others, inside, usable = FIGURES["vllm"][source]
        times = zip((itl, *others[1::2]), others[::2], strict=True)
        yield source, *(f"{mean:.0f}, {worst:.0f}" for mean, worst in times), f"{inside:.0f} %", f"{usable:.0f} %"


TABLES = {
    ("../README.md", "costs"): (("", "measured", "command"), readme_costs),
    ("accuracy.md", "recordings"): (
        ("recording", "plain reader", "shipped default ÷ plain reader", "bulk profile ÷ plain reader"),
        of_recordings,
    ),
    ("accuracy.md", "resources"): (("what", "measured", "wanted", ""), resources),
    ("accuracy.md", "gpus"): (bench_gpus.HEADER, lambda: bench_gpus.table_rows(FIGURES["gpus"])),
    ("accuracy.md", "others"): (bench_gpus.HEADER, lambda: bench_gpus.table_rows(FIGURES["gpus others"])),
    ("accuracy.md", "silicon"): (bench_silicon.HEADER, lambda: bench_silicon.table_rows(FIGURES["silicon"])),
    ("accuracy.md", "vllm"): (
        ("source", "ITL, worst, %", "TTFT, worst, %", "E2E, worst, %", "inside the band", "usable"),
        of_real_loops,
    ),
    ("accuracy.md", "systems"): (bench_systems.HEADER, lambda: bench_systems.table_rows(FIGURES["systems"])),
}


@pytest.mark.parametrize(("document", "name"), TABLES)
def test_tables_of_measurements_have_the_figures_of_the_runs(document, name):
    header, rows = TABLES[document, name]
    assert_table(document, name, make_table(header, list(rows())))


def test_every_figure_is_of_a_section_that_a_command_measures():
    measured = {"demo", "gpus", "gpus others", "silicon", "systems", "torture", "vllm"}
    assert set(FIGURES) <= measured | {f"cost {name}" for name in SECTIONS}
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", section["measured_on"]) for section in FIGURES.values())


def test_the_demo_in_the_readme_is_a_demo_that_ran():
    assert f"takes about {FIGURES['demo']['cpu_s']:.0f} s of CPU" in README
    (shown,) = re.findall(r"^\$ uvx --from \S+ tracefit demo\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    left = iter(FIGURES["demo"]["said"])
    for line in shown.splitlines():
        assert line == "..." or line in left, line  # in the order in which it was said
