"""A merge tells the truth: errors and doubts of the merged coefficients, and who differs from whom."""

import numpy as np
import pytest

from online.bank import Bank
from online.engines import EngineRows
from online.rls.merging import Replica, compare_replicas
from online.rows import RowBlock
from online.state import StateError
from tests.support.banks import RLS, STEP, learned, merge_states, told
from tests.support.linear_steps import BETA, steps
from tests.support.state_files import with_value

DAY_NS = int(864e11)


def state(rows, engine=""):
    return learned(rows, engine=engine).state()


def merged(parts):
    bank = Bank(RLS)
    bank.restore(merge_states(parts, RLS))
    return bank


def replica(seed, gain=1.0, n=3000, **kind):
    return steps(n, seed, noise=0.04, autocorrelation=0.9, beta=gain * BETA, **kind).rows


def step_time(parts):
    """What is published of the merge."""
    return told(merged(parts))


def usual_prefill(target):
    """Rows by which each batch shape with prefill is told, by its name."""
    return {name: shape.rows for name, shape in target.shape_factors.items() if name.startswith("prefill")}


def test_prefill_steps_from_before_a_change_are_not_mixed_with_those_of_a_usual_server():
    """A change of all steps forgets shapes with prefill; here no such step came since."""
    then = steps(4000, 1, prefill_share=0.5)
    decode = {"prefill_share": 0.0, "start_ns": int(then.rows.end_ns[-1])}
    changed = state(RowBlock.concatenate([then.rows, steps(400, 2, beta=BETA * 1.5, **decode).rows]), "changed")
    usual = learned(steps(3000, 3).rows, engine="usual")
    expected, both = usual_prefill(told(usual)), usual_prefill(step_time([usual.state(), changed]))
    assert both == expected


def differing(parts):
    return {each.engine: each.differs for each in step_time(parts).replicas}


@pytest.fixture(scope="module")
def streams():
    return {"equal": replica(1), "fast": replica(2), "slow": replica(3, 1.6)}


@pytest.fixture(scope="module")
def states(streams):
    return {name: state(rows, name) for name, rows in streams.items()}


@pytest.mark.parametrize(
    ("order", "differ"), [(("fast", "equal"), False), (("fast", "slow"), True), (("slow", "equal"), True)]
)
def test_merged_coefficients_are_sure_where_engines_agree_and_have_no_error_before_they_predict_a_row(
    streams, states, order, differ
):
    bank = merged([states[name] for name in order])
    model = told(bank).models["portable"]
    assert (model.error, model.prediction_error, model.shaped_error) == (None, None, None)
    assert bool(told(bank).doubts) == differ
    assert {feature.status for feature in model.features} == {"weak" if differ else "identified"}
    more = streams[order[0]]
    bank.learn("c", STEP, RowBlock.of_lines(more.raw, more.elapsed_us, end_ns=more.end_ns + DAY_NS))
    model = told(bank).models["portable"]
    assert (model.error.mape, model.shaped_error.mape) > (0.0, 0.0)


def test_replicas_that_differ_are_flagged_with_the_ratio_of_each_to_the_rest(states):
    parts = [states["fast"], states["slow"]]
    assert differing(parts) == {"fast": True, "slow": True}
    ratios = {each.engine: (each.ratio, each.stderr) for each in step_time(parts).replicas}
    assert ratios["slow"][0] == pytest.approx(1.6, abs=4 * ratios["slow"][1])
    assert ratios["fast"][0] == pytest.approx(1 / 1.6, abs=4 * ratios["fast"][1])
    assert all(0.0 < error < 0.02 for _, error in ratios.values())


def test_neither_equal_replicas_are_flagged_nor_one_alone_nor_one_that_learned_hardly_anything(states):
    assert differing([states["fast"], states["equal"]]) == {"fast": False, "equal": False}
    assert differing([states["fast"]]) == {}
    assert differing([states["fast"], state(replica(5, n=40), "little")]) == {"fast": False, "little": False}


@pytest.mark.parametrize(
    ("gain", "loads", "terms"),
    [
        ([2.0, 1.0, 1.0, 1.0], ({"prefill_share": 0.0}, {}), {"intercept"}),
        ([1.3, 1.3, 1.3, 1.3], ({"prefill_share": 0.0}, {}), {"all", "decode"}),
        ([1.0, 1.0, 1.0, 1.0], ({"prefill_share": 0.0}, {}), None),
        ([1.0, 3.0, 1.0, 1.0], ({"prefill_share": 0.0}, {}), None),
        ([1.0, 1.0, 1.0, 1.0], ({"batch": (4, 4)}, {}), None),
        ([1.5, 1.5, 1.5, 1.5], ({"batch": (4, 4)}, {}), {"all"}),
    ],
)
@pytest.mark.parametrize("slow_has_less", [False, True])
def test_of_two_replicas_one_change_is_in_one_term_whatever_only_one_of_them_was_asked_for(
    gain, loads, terms, slow_has_less
):
    """``terms``: what may be named; None where what both were asked for takes the same time."""
    of_slow, of_usual = loads if slow_has_less else loads[::-1]
    slow, usual = replica(3, np.array(gain), **of_slow), replica(2, **of_usual)
    found = step_time([state(slow, "slow"), state(usual, "usual")]).replicas
    assert {each.differs for each in found} == {terms is not None}
    names = {each.term for each in found if each.term}
    assert len(names) <= 1
    assert names <= (terms or set())
    slow, usual = sorted(found, key=lambda each: each.engine)
    assert slow.ratio == pytest.approx(1 / usual.ratio, abs=3 * slow.stderr)


def test_one_of_three_that_is_faster_is_named_alone_also_where_the_others_are_unlike():
    a = np.array([[1e4]])
    quick, *others = compare_replicas([Replica("", 1, a, a[0] * us, a) for us in (1.03, 1.0, 0.88)], 0, ["intercept"])
    assert (quick.differs, quick.ratio) == (True, pytest.approx(0.88 / 1.015))
    assert not any(each.differs for each in others)


def test_rows_of_an_engine_vary_by_what_a_fit_of_its_own_leaves_lately():
    rows, ones = EngineRows(1), np.ones(10)
    for at, us in enumerate(np.random.default_rng(0).normal(1.0, 0.1, (200, 10))):
        rows.add(ones[:, None], us, ones, at * 10**11)
    assert rows.variance() == pytest.approx(0.01, rel=0.3)


def test_stages_of_a_merge_name_the_same_replicas_as_one_merge_of_all(states):
    parts = [states[name] for name in ("equal", "fast", "slow")]
    at_once, in_stages = step_time(parts), step_time([merge_states(parts[1:], RLS), parts[0]])
    assert [each.engine for each in at_once.replicas] == [each.engine for each in in_stages.replicas]
    for one, other in zip(at_once.replicas, in_stages.replicas, strict=True):
        assert one.ratio == pytest.approx(other.ratio, rel=1e-9)
    assert at_once.replicas[0].engine == "slow"


def test_days_of_one_engine_are_one_replica(states):
    tomorrow = replica(7, start_ns=1_700_100_000_000_000_000)
    found = step_time([states["fast"], state(tomorrow, "fast"), states["slow"]]).replicas
    assert [(each.engine, each.rows) for each in found] == [("slow", 3000), ("fast", 6000)]


def test_once_most_rows_came_after_the_merge_nothing_is_said_of_it_any_more(states):
    bank = merged([states["fast"], states["slow"]])
    later = replica(8, n=6100, start_ns=1_700_001_000_000_000_000)
    bank.learn("c", STEP, later.slice(0, 5900))
    assert len(told(bank).replicas) == 2
    bank.learn("c", STEP, later.slice(5900, 6100))
    assert told(bank).replicas == []


@pytest.mark.parametrize(("name", "value"), [("rows", -1), ("b", np.zeros(3)), ("engine", 7)])
def test_a_replica_that_fits_nothing_is_refused_with_its_state(states, name, value):
    whole = merge_states([states["fast"], states["slow"]], RLS)
    with pytest.raises(StateError):
        Bank(RLS).restore(with_value(whole, "replicas", name, value))


# ------------------------------------------------------------- in which order


def coefficients(*parts):
    return np.array([feature.coefficient for feature in step_time(parts).models["portable"].features])


def test_streams_that_follow_each_other_merge_to_the_same_in_any_stages():
    whole = steps(6000, 9).rows
    a, b, c = (state(whole.slice(i, i + 2000)) for i in (0, 2000, 4000))
    at_once = coefficients(a, b, c)
    for stages in ([c, a, b], [merge_states([a, b], RLS), c], [a, merge_states([b, c], RLS)]):
        assert coefficients(*stages) == pytest.approx(at_once, rel=1e-9)


def test_means_and_bands_of_streams_that_follow_each_other_are_those_of_one_learner():
    first, second = steps(9000, 3, stalls=0.05, noise=0.05).rows, steps(9000, 4, start_ns=1_700_001_000 * 10**9).rows
    one, both = told(learned(first, second)), step_time([state(first), state(second)])
    assert both.mean_us == pytest.approx(one.mean_us, rel=0.002)
    assert both.mean_factor == pytest.approx(one.mean_factor, rel=0.002)
    assert (both.interval.p10, both.interval.p90) == pytest.approx((one.interval.p10, one.interval.p90), rel=0.005)


def test_rows_too_few_for_a_fit_of_their_own_are_learned_in_either_order():
    """Forty engines that tell two rows each, as of requests that arrive while no step runs."""
    rows = steps(80, 4).rows
    parts = [state(rows.slice(start, start + 2), f"e{start}") for start in range(0, 80, 2)]
    for order in (parts, parts[::-1]):
        model = step_time(order).models["portable"]
        assert model.rows == 80
        assert [feature.coefficient for feature in model.features] == pytest.approx(BETA, rel=0.3)
