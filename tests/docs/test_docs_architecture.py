"""The map of rooms is the tree's; what comments cite stands in the documents."""

from __future__ import annotations

import ast
import re
from collections import Counter

from tests.contract.test_architecture import FUNCTION_LINES, FUNCTIONS, MODULES, nodes
from tests.support.paths import DOCS, ROOT

ARCHITECTURE = (DOCS / "architecture.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PACKAGES = ("collector", "online", "exporters")

NEITHER = "test_neither_order_nor_pieces_nor_repeats_change_what_is_learned_and_the_books_balance"
INVARIANTS = {
    1: "property/test_envelope.py: test_every_call_and_every_span_is_counted_once_whatever_becomes_of_it",
    2: "property/test_bank.py: test_every_row_received_has_one_outcome_and_nothing_non_finite_comes_out",
    3: f"property/test_join_invariants.py: {NEITHER}",
    4: f"property/test_join_invariants.py: {NEITHER}",
    5: "wire/test_stress.py: test_everybody_at_once_neither_deadlocks_nor_tears_a_snapshot",
    6: "wall/test_algebra.py: test_streams_that_follow_each_other_merge_to_what_one_learner_knows",
    7: "property/test_state.py: test_stop_and_restart_is_no_restart",
    8: "contract/test_architecture.py: test_the_product_reads_no_clock_but_where_it_is_handed_in",
    9: "wire/test_durability.py: test_a_log_without_room_refuses_for_a_while_and_says_why",
    10: "docs/test_docs_figures.py: test_every_figure_is_of_a_section_that_a_command_measures",
    11: "wire/test_forward.py: test_whatever_a_target_does_nobody_waits_for_it_and_each_export_is_counted",
    12: "collector/service/test_event_time.py: test_one_engine_that_is_idle_holds_nobody_up",
    13: "docs/test_docs_names.py: test_each_key_command_and_reason_that_a_user_is_told_of_exists",
    14: "tracefit/test_requests.py: test_what_cannot_be_known_of_a_load_is_named_and_not_usable",
}


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


def walk() -> list[tuple[int, list[str], Counter[str]]]:
    """Number of each row, the functions and classes it names, and how many lines those of its modules have.

    A method counts by its own name, and as ``Class.method``.
    """
    table = ARCHITECTURE.partition("<!-- walk -->")[2].partition("<!-- end of walk -->")[0]
    rows = []
    for number, modules, names in re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|", table, re.MULTILINE):
        first, *beside = re.findall(r"`([^`]+)`", modules)
        lines = Counter[str]()
        for path in (first, *(path if "/" in path else f"{first.rpartition('/')[0]}/{path}" for path in beside)):
            for owner in nodes(ROOT / path):
                of_class = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
                for node in ast.iter_child_nodes(owner):
                    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                        for name in {node.name, of_class + node.name}:
                            lines[name] += node.end_lineno - node.lineno + 1
        rows.append((int(number), re.findall(r"`([^`]+)`", names), lines))
    return rows


def test_each_step_of_the_walk_is_a_function_or_a_class_of_its_module():
    rows = walk()
    assert [number for number, _, _ in rows] == [*range(1, len(rows) + 1)] != []
    for _, names, lines in rows:
        assert set(names) <= set(lines)


def test_each_row_of_the_walk_names_at_most_one_screen_of_code():
    lines_of_row = {number: sum(lines[name] for name in names) for number, names, lines in walk()}
    assert {number for number, lines in lines_of_row.items() if lines > FUNCTION_LINES} == set()


def test_each_invariant_is_held_by_a_test_that_exists():
    listed = ARCHITECTURE.partition("## Invariants")[2]
    assert [*map(int, re.findall(r"^(\d+)\. ", listed, re.MULTILINE))] == [*INVARIANTS]
    for path, name in (held.split(": ") for held in INVARIANTS.values()):
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), name
