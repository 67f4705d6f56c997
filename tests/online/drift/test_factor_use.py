"""Whether shape factors are applied, where several that decided for themselves become one."""

import copy
import itertools

import pytest

from online.drift.factor_use import FactorUse


def decided(applied, won):
    """One that has seen a thousand rows with so much to win."""
    use = FactorUse()
    use.applied, use.won, use.error, use.rows = applied, won, 100.0, 1000
    return use


def merged(*parts):
    first, *rest = map(copy.deepcopy, parts)
    for other in rest:
        first.add(other)
    return first


@pytest.mark.parametrize("won", [(-1.0, -7.0, -4.0), (-1.0, -9.0, -4.0), (-4.0, -2.0, 20.0), (-30.0, -2.0, 1.0)])
def test_what_a_merge_decides_does_not_depend_on_its_order(won):
    parts = [decided(applied, each) for applied, each in zip((False, False, True), won, strict=True)]
    orders = list(itertools.permutations(parts))
    found = [merged(*order) for order in orders] + [merged(a, merged(b, c)) for a, b, c in orders]
    assert {each.applied for each in found} == {sum(won) >= -0.05 * 300.0}
