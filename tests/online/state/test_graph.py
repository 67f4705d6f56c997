"""Graphs of declared classes: what is read back is what was written, and what does not fit is refused."""

from __future__ import annotations

import enum
import zlib
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_origin

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from typing_extensions import TypeAliasType

from online.rows import Floats, Mask
from online.state import (
    VERSION,
    Array,
    Count,
    Finite,
    Kept,
    LikeFresh,
    MadeBy,
    Named,
    StateError,
    Taken,
    decode_image,
    encode_parts,
    saved,
    sealed,
)
from online.state.graph import dump, load
from online.state.plain_data import without_alias

CELL = np.dtype([("seen", "?"), ("time_ns", "i8")])


class Colour(enum.StrEnum):
    RED = "red"


class Mark(msgspec.Struct, frozen=True):
    kind: Colour
    ts_ns: int


@dataclass(slots=True)
class Leaf:
    STATE = saved("test_leaf", mark=Mark, rows=Count)
    mark: Mark
    rows: int = 0


class Table:
    STATE = saved("test_table", values=Floats, used=Mask, mean=Finite)

    def __init__(self, columns: int) -> None:
        self.values = np.zeros((4, columns))
        self.used = np.zeros(columns, np.bool_)
        self.mean = 0.0


class Twig:
    STATE = saved("test_twig", level=Finite)

    def __init__(self) -> None:
        self.level = 0.0


class Stateless:
    STATE = saved("test_stateless")


class Tree:
    STATE = saved(
        "test_tree",
        fresh=lambda columns: Tree(columns),  # noqa: PLW0108 -- Tree is not known yet
        leaves=list[Leaf],
        first=Leaf | None,
        _by_name=OrderedDict[tuple[str, int], Leaf],
        latest=deque[float],
        counts=Counter[Colour],
        ids=set[int],
        table=Table,
        trial=MadeBy("new_table"),
        detector=LikeFresh,
        cells=Array(CELL),
        lines=Array(np.dtype("f8"), columns=2, nan=True),
        named=tuple[int, str] | None,
        mixed=list[Leaf | Twig],
        later=Annotated[object, Named("test_later")] | None,
    )

    def __init__(self, columns: int = 3) -> None:
        self._columns = columns
        self.leaves: list[Leaf] = []
        self.first: Leaf | None = None
        self._by_name: OrderedDict[tuple[str, int], Leaf] = OrderedDict()
        self.latest: deque[float] = deque(maxlen=3)
        self.counts: Counter[Colour] = Counter()
        self.ids: set[int] = set()
        self.table = Table(columns)
        self.trial: Table | None = None
        self.detector: Twig | Stateless = Twig()
        self.cells = np.zeros(0, CELL)
        self.lines = np.zeros((0, 2))
        self.named: tuple[int, str] | None = None
        self.mixed: list[Leaf | Twig] = []
        self.later: object = None
        self.total = 0

    def new_table(self) -> Table:
        return Table(self._columns)

    def restored(self) -> None:
        self.total = sum(leaf.rows for leaf in self.leaves)
        if self.total > 100:
            raise StateError("more rows than there can be")


@dataclass
class Shelf:
    STATE = saved("test_shelf", items=dict[str, Kept])
    items: dict[str, object]


def grown() -> Tree:
    tree = Tree()
    tree.leaves = [Leaf(Mark(Colour.RED, n), n) for n in range(3)]
    tree.first = tree.leaves[0]
    tree._by_name["a", 1] = tree.leaves[1]
    tree.latest.extend([1.0, 2.0, 3.0, 4.0])
    tree.counts[Colour.RED] = 2
    tree.ids = {5, 7}
    tree.table.values[2] = [0.0, -0.0, 1.5]
    tree.table.used[1] = True
    tree.trial = Table(3)
    tree.trial.mean = 0.25
    tree.detector.level = 4.0
    tree.cells = np.array([(True, 1), (False, 0), (True, 3), (False, 0)], CELL)
    tree.lines = np.array([[1.0, np.nan], [0.0, 0.0]])
    tree.named = (1, "x")
    tree.mixed = [Twig(), tree.leaves[2]]
    return tree


def through_bytes(root):
    return decode_image(encode_parts({"tree": root})).graph("tree")


def again(graph=None, root=Tree, context=3):
    return load(through_bytes(grown()) if graph is None else graph, root, context)


def test_everything_declared_is_read_back_and_derived():
    tree, read = grown(), again()
    assert read.leaves == tree.leaves
    assert read.first is read.leaves[0]
    assert read._by_name == tree._by_name
    assert read._by_name["a", 1] is read.leaves[1]
    assert read.latest == deque([2.0, 3.0, 4.0])
    assert read.latest.maxlen == 3
    assert (read.counts, read.ids, read.named, read.total) == (tree.counts, {5, 7}, (1, "x"), 3)
    assert read.table.values.tobytes() == tree.table.values.tobytes()
    assert read.table.used.tolist() == [False, True, False]
    assert read.trial.mean == 0.25
    assert read.detector.level == 4.0
    assert read.cells.tobytes() == tree.cells.tobytes()
    assert read.lines.tobytes() == tree.lines.tobytes()
    assert [type(item) for item in read.mixed] == [Twig, Leaf]
    assert read.mixed[1] is read.leaves[2]
    assert through_bytes(read) == through_bytes(tree)


def test_a_fresh_object_is_filled_and_keeps_what_is_not_declared():
    tree = Tree()
    table = tree.table
    assert again(root=tree) is tree
    assert tree.table is table
    assert tree._columns == 3
    tree.cells["time_ns"] = 9  # what was read can be written to


@given(arrays.arrays(np.float64, st.tuples(st.integers(0, 9), st.just(2)), elements=st.sampled_from([0.0, -0.0, 1.5])))
def test_arrays_are_bitwise_the_same(lines):
    tree = Tree()
    tree.lines = lines
    assert again(through_bytes(tree)).lines.tobytes() == lines.tobytes()


def test_rows_of_zeros_cost_a_bit():
    tree = Tree(1000)
    sparse = len(encode_parts({"x": tree}))
    tree.table.values[1, 1] = 1.0
    assert len(encode_parts({"x": tree})) - sparse < 8100
    assert sparse < 1000


def test_another_kind_of_detector_leaves_the_fresh_one():
    tree = grown()
    tree.detector = Stateless()
    read = again(through_bytes(tree))
    assert read.detector.level == 0.0


def test_what_is_kept_is_filled_later_and_only_as_what_it_is():
    read = load(through_bytes(Shelf({"twig": Twig(), "leaf": Leaf(Mark(Colour.RED, 1), 7)})), Shelf, None)
    assert {name: kept.kind for name, kept in read.items.items()} == {"twig": "test_twig", "leaf": "test_leaf"}
    assert read.items["leaf"].fill(Leaf(Mark(Colour.RED, 0))).rows == 7
    with pytest.raises(StateError, match="of kind 'test_leaf', not test_twig"):
        read.items["leaf"].fill(Twig())


def test_a_name_in_the_file_has_no_underscore():
    kinds = dump(grown()).graph["kinds"]["test_tree"]
    assert "by_name" in kinds
    assert "_by_name" not in kinds


def test_the_order_of_attributes_in_the_file_is_its_own():
    graph = through_bytes(grown())
    graph["kinds"]["test_leaf"].reverse()
    for kind, values in graph["objects"]:
        if kind == "test_leaf":
            values.reverse()
    assert again(graph).leaves == grown().leaves


def edited(kind, name, value):
    graph = through_bytes(grown())
    place = graph["kinds"][kind].index(name)
    values = next(values for each, values in graph["objects"] if each == kind)
    values[place] = value(values[place]) if callable(value) else value
    return graph


@pytest.mark.parametrize(
    ("kind", "name", "value", "problem"),
    [
        ("test_leaf", "rows", -1, "test_leaf.rows: .*>= 0"),
        ("test_leaf", "rows", 99, "more rows than there can be"),
        ("test_leaf", "mark", {"kind": "blue", "ts_ns": 1}, "test_leaf.mark"),
        ("test_table", "mean", float("nan"), "test_table.mean"),
        ("test_table", "mean", float("inf"), "test_table.mean"),
        (
            "test_table",
            "values",
            ["<f8", [3, 3], b""],
            r"test_table.values: array of shape \[3, 3\], expected \[4, 3\]",
        ),
        ("test_table", "values", ["<i8", [4, 3], b""], "array of <i8, expected <f8"),
        ("test_table", "values", ["<f8", [4, 3], b"\0" * 97], "97 bytes for an array of 96"),
        ("test_table", "values", ["<f8", [4, 3], np.array([np.inf]).tobytes()], "not finite"),
        ("test_table", "values", ["<f8", [4, 3], b"\0" * 24, b"\xc0"], "test_table.values"),
        ("test_tree", "lines", ["<f8", [1, 3], b""], "expected 2 columns"),
        ("test_tree", "cells", ["<f8", [1 << 25], b""], "array of <f8"),
        ("test_tree", "cells", lambda array: [array[0], [1 << 25], b""], "array of shape"),
        ("test_tree", "cells", lambda array: [array[0], [], b""], "test_tree.cells: array of shape"),
        ("test_tree", "cells", lambda array: [array[0], [-1], b""], "array of shape"),
        ("test_tree", "cells", None, "test_tree.cells"),
        ("test_tree", "first", 99, "99 is no number of an object"),
        ("test_tree", "first", 0, "object 0 is of kind 'test_tree', not test_leaf"),
        ("test_tree", "first", True, "True is no number"),
        ("test_tree", "table", None, "None is no number"),
        ("test_tree", "mixed", [0], "not test_leaf or test_twig"),
        ("test_tree", "leaves", 5, "test_tree.leaves"),
        ("test_tree", "latest", ["x"], "test_tree.latest"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(kind, name, value, problem):
    with pytest.raises(StateError, match=problem):
        again(edited(kind, name, value))


@pytest.mark.parametrize(
    "graph",
    [None, [], {}, {"kinds": {}, "objects": [], "root": 0}, {"kinds": 1, "objects": [["test_tree", []]], "root": 0}],
)
def test_what_is_no_graph_is_refused(graph):
    with pytest.raises(StateError):
        load(graph, Tree, 3)


def test_another_layout_is_refused_by_what_differs():
    graph = through_bytes(grown())
    graph["kinds"]["test_leaf"].append("something_new")
    with pytest.raises(StateError, match="test_leaf: another layout, which differs in something_new"):
        again(graph)


def without(kind: str, name: str):
    graph = through_bytes(grown())
    place = graph["kinds"][kind].index(name)
    del graph["kinds"][kind][place]
    for values in (values for known, values in graph["objects"] if known == kind):
        del values[place]
    return graph


def test_an_attribute_that_was_added_since_is_what_a_fresh_object_has():
    tree = again(without("test_tree", "named"))
    assert tree.named is None
    assert tree.ids == {5, 7}
    assert again(without("test_table", "mean")).table.mean == 0.0


def test_an_attribute_that_a_fresh_object_has_not_either_is_missed():
    with pytest.raises(StateError, match="test_leaf: another layout, which differs in mark"):
        again(without("test_leaf", "mark"))


def test_a_class_that_declares_nothing_cannot_be_saved():
    tree = grown()
    tree.leaves.append(object())
    with pytest.raises(TypeError, match="object declares no state"):
        dump(tree)


def test_a_kind_is_declared_once():
    with pytest.raises((TypeError, RuntimeError)):

        class Again:
            STATE = saved("test_leaf")


def test_another_version_is_refused_by_number():
    body = msgspec.msgpack.decode(zlib.decompress(Taken({"tree": grown()}).body()))
    with pytest.raises(StateError, match=f"version {VERSION + 1} is not {VERSION}"):
        decode_image(sealed(zlib.compress(msgspec.msgpack.encode({**body, "version": VERSION + 1}))))


def test_a_part_that_is_not_there_is_named():
    with pytest.raises(StateError, match="no tree in this state file"):
        decode_image(encode_parts({"twig": Twig()})).load("tree", Tree, 3)


def test_an_array_type_behind_a_generic_alias_is_an_array():
    """NDArray is one since numpy 2.5: states could not be saved with it."""
    scalar = TypeVar("scalar", bound=np.generic)
    alias = TypeAliasType("NDArray", np.ndarray[Any, np.dtype[scalar]], type_params=(scalar,))
    assert get_origin(alias[np.float64]) is not np.ndarray
    assert get_origin(without_alias(alias[np.float64])) is np.ndarray
    assert without_alias(list[int]) == list[int]
