"""That asking changes nothing, and what a changed configuration inherits."""

import msgspec
import pytest

from collector.config import Config
from online import Target
from tests.support.banks import STEP, learned
from tests.support.linear_steps import steps


@pytest.mark.parametrize("n_rows", [40, 700, 5003])
def test_asking_leaves_the_state_as_it_is_and_what_was_told_stays(n_rows):
    bank = learned(steps(n_rows, 5).rows, settings=Config(feature_sets=("portable",)))
    state = bank.state()
    first = bank.targets("c")
    text = msgspec.json.encode(first)
    assert bank.targets("c") == first
    assert bank.state() == state
    bank.learn("c", STEP, steps(3000, 6).rows)
    assert msgspec.json.encode(first) == text


def test_what_a_changed_configuration_inherits_is_told_of_all_its_targets():
    bank = learned(steps(10, 7).rows, target=Target.SCHEDULE_TIME)
    bank.learn("old", Target.SCHEDULE_TIME, steps(3000, 6).rows)
    before = bank.targets("c")["schedule_time"]
    bank.warm_start("c", "old")
    assert bank.targets("c")["schedule_time"] != before
