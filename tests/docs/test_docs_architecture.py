"""The map of rooms is the tree's; what comments cite stands in the documents."""

from __future__ import annotations

import re

from tests.contract.test_architecture import MODULES, imported, is_module, room_of
from tests.support.paths import DOCS, ROOT

ARCHITECTURE = (DOCS / "architecture.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PACKAGES = ("collector", "online", "exporters")


def rooms() -> set[str]:
    """Folders of the collector, the learner and the exporters that hold something of ours."""
    files = (
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.*")
        if path.parent.name != "templates" and "__pycache__" not in path.parts
    )
    folders = {str(path.parent.relative_to(ROOT)) for path in files if path.is_file()}
    return folders - set(PACKAGES)


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


def test_every_file_that_a_document_for_maintainers_or_a_module_names_exists():
    named = r"\b((?:collector|online|exporters|tracefit|tests)/[\w/]+\.py)"
    for text in (ARCHITECTURE, CONTRIBUTING, *(path.read_text() for path in MODULES)):
        for path in re.findall(named, text):
            assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:docs|deploy)/[\w/.-]+)`", CONTRIBUTING):
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
