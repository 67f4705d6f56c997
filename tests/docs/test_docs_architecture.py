"""The map of rooms is the tree's; what comments cite stands in the documents."""

from __future__ import annotations

import re

import pytest

from tests.contract.test_architecture import MODULES, imported, is_module, room_of
from tests.support.paths import DOCS, ROOT

ARCHITECTURE = (DOCS / "architecture.md").read_text()
WIRE = (ROOT / "collector/decode/wire-contract.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PACKAGES = ("collector", "online", "exporters")
CODE = sorted(
    path
    for place in (*PACKAGES, "deploy", "tests", "tracefit")
    for path in (ROOT / place).rglob("*.py")
    if path.name != "test_docs_architecture.py"
)
FOREIGN = r"RFC \d+ §"


def rooms() -> set[str]:
    """Folders of the collector, the learner and the exporters that hold something of ours."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.*") if "__pycache__" not in path.parts)
    folders = {str(path.parent.relative_to(ROOT)) for path in files if path.is_file()}
    return folders - set(PACKAGES)


def cited(pattern: str) -> dict[str, set[str]]:
    """Where code cites what: the groups of a pattern by file."""
    found = {str(path.relative_to(ROOT)): re.findall(pattern, path.read_text()) for path in CODE}
    return {name: set(numbers) for name, numbers in found.items() if numbers}


def mapped_rooms() -> list[str]:
    """Rooms in the order of the map."""
    table = ARCHITECTURE.partition("<!-- rooms -->")[2].partition("<!-- end -->")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def test_the_map_names_every_room_once_and_only_rooms():
    named = mapped_rooms()
    assert len(named) == len(set(named))
    assert set(named) == rooms()


def test_arrows_go_down_the_map():
    """But for those of a room in a room, to the rooms around it."""
    floor = {room: number for number, room in enumerate(mapped_rooms())}
    arrows = {
        ("/".join(room_of(path)), "/".join(target[:-1] if is_module(target) else target))
        for path in MODULES
        for target in imported(path)
    }
    drawn = [(room, other) for room, other in arrows if room in floor and other in floor]
    assert drawn
    assert [f"{a} -> {b}" for a, b in drawn if floor[b] < floor[a] and not a.startswith(f"{b}/")] == []


def test_every_module_that_the_architecture_names_exists():
    inside = [
        re.escape(name) for name in ("receive", "durable", "worker", "decode", "join", "identity", "config", "runtime")
    ]
    for path in re.findall(rf"`((?:{'|'.join(inside)})/\w+\.py)`", ARCHITECTURE):
        assert (ROOT / "collector" / path).exists(), path
    for path in re.findall(r"`((?:collector|online|exporters|tests)/[\w/]+\.py)`", ARCHITECTURE):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", ["finality", "boundaries", "scheduling", "raw_features", "row_blocks", "warm_up"])
def test_modules_of_the_walk_of_a_row_exist(name):
    assert f"`{name}.py`" in ARCHITECTURE
    assert (ROOT / "collector/join/steps" / f"{name}.py").exists()


def test_every_section_of_the_wire_contract_that_code_cites_exists():
    sections = set(re.findall(r"^#+ ([\d.]+) ", WIRE, re.MULTILINE))
    assert {"5.6", "8"} <= sections
    text = {str(path.relative_to(ROOT)): re.sub(FOREIGN, "", path.read_text()) for path in CODE}
    for name, content in text.items():
        assert set(re.findall(r"§(\d+(?:\.\d+)*)", content)) <= sections, name


def test_every_section_the_wire_contract_cites_itself_exists():
    sections = set(re.findall(r"^#+ ([\d.]+) ", WIRE, re.MULTILINE))
    assert set(re.findall(r"§(\d+(?:\.\d+)*)", WIRE)) <= sections


def test_every_invariant_that_code_cites_exists():
    numbers = re.findall(r"^(\d+)\. ", ARCHITECTURE.partition("## Invariants")[2], re.MULTILINE)
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    citations = cited(r"[Ii]nvariants? (\d+)")
    assert citations
    assert set().union(*citations.values()) <= set(numbers)


def test_every_source_that_code_cites_exists():
    sources = set(re.findall(r"^(\d+)\. ", (DOCS / "systems.md").read_text().partition("## Sources")[2], re.MULTILINE))
    citations = cited(r"\bsource (\d+)\b")
    assert citations
    assert set().union(*citations.values()) <= sources


ABSENT = (
    "the design,",
    "matter of the design",
    "design §",
    "design invariant",
    "seed system",
    "producer-plugin.md",
    "algorithms §",
    "algorithms, section",
    "real-captures",
)
"""How documents that are not part of the repository were cited."""


@pytest.mark.parametrize("phrase", ABSENT)
def test_no_comment_cites_a_document_that_is_not_here(phrase):
    assert cited(f"({re.escape(phrase)})") == {}


def test_every_file_that_contributing_names_exists():
    for path in re.findall(r"`((?:collector|online|exporters|tests|docs|deploy)/[\w/.-]+)`", CONTRIBUTING):
        assert (ROOT / path).exists(), path
    helpers = CONTRIBUTING.partition("Helpers are in")[2].partition("Every parser")[0]
    for helper in re.findall(r"`(\w+)`", helpers):
        assert (ROOT / "tests/support" / f"{helper}.py").exists(), helper


def test_the_benches_that_make_knows_are_told_by_its_help():
    makefile = (ROOT / "Makefile").read_text()
    listed = re.search(r"^BENCHES := (.*)$", makefile, re.MULTILINE)[1].split()
    assert sorted(listed) == listed == sorted(re.findall(r"^(?:define )?bench_(\w+)", makefile, re.MULTILINE))
    documents = [*DOCS.glob("*.md"), *ROOT.glob("*.md")]
    told = [what for path in documents for what in re.findall(r"WHAT=(\w+)", path.read_text())]
    assert set(told) <= set(listed)
