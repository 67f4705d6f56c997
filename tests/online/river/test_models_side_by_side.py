"""Champions stay; what only predicts competes with nobody."""

from collector.config.schema import Config
from online.constants import PREFERENCE
from tests.support.banks import STEP, learned, restarted, told
from tests.support.linear_steps import steps


def _with_errors(bank, **errors):
    """A target whose models have had these errors."""
    state = bank._known["c"].targets[STEP]
    for name, error in errors.items():
        known = state.models[name].error
        known.sum_ape = error * known.total
    return state


def test_another_model_takes_the_place_of_the_champion_only_where_it_is_better_by_5_percent():
    names = {"step_time": ("intercept", "prefill_tokens", "decode_context_tokens", "requests")}
    settings = Config(learners=("rls",), feature_sets=("portable", "custom"), custom=names)
    bank = learned(steps(640, 1).rows, settings=settings)
    before = "portable"
    for portable, custom, champion in (
        (0.10, 0.20, "portable"),
        (0.10, 0.099, "portable"),
        (0.10, 0.94 * 0.10, "custom"),
        (0.0999, 0.10, "custom"),
        (0.10 * PREFERENCE + 1e-6, 0.10, "custom"),
        (0.09, 0.10, "portable"),
    ):
        _with_errors(bank, portable=portable, custom=custom).champion = before
        before = champion
        assert told(restarted(bank)).champion == champion, "after a restart as before"


def test_what_only_predicts_is_no_champion():
    settings = Config(learners=("rls", "river:linear_model.PARegressor"), feature_sets=("portable",))
    bank = learned(steps(1500, 2, noise=0.3).rows, settings=settings)
    bank._known["c"].targets[STEP].river["river:linear_model.PARegressor/portable"].error.sum_ape = 0.0
    assert told(bank).champion == "portable"
