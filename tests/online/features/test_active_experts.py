"""The share of a mixture's experts that a step touches, and what becomes of a bank that hears of experts late."""

import numpy as np
import pytest

from online import Bank, Target
from online.features import portable
from tests.support.banks import PORTABLE, STEP, features_of, restarted, told
from tests.support.uneven_steps import of_columns

EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}
TRUTH = {"intercept": 4000.0, "prefill_tokens": 12.0, "requests": 40.0, "active_experts": 9000.0}


def steps(n, seed, largest=64):
    """Decodes of every size, a quarter with a prompt, of a machine with the costs above and 1 % of noise."""
    rng = np.random.default_rng(seed)
    decodes = 2.0 ** rng.uniform(0.0, np.log2(largest), n)
    prompts = rng.integers(16, 400, n) * (rng.random(n) < 0.25)
    columns = {"decode_requests": decodes, "decode_tokens": decodes, "requests": decodes, "prefill_tokens": prompts}
    context = decodes * rng.uniform(200.0, 3000.0, n)
    touched = 1.0 - (1.0 - 8 / 128) ** (decodes + prompts)
    us = TRUTH["intercept"] + TRUTH["prefill_tokens"] * prompts + TRUTH["requests"] * decodes
    elapsed = (us + TRUTH["active_experts"] * touched) * (1.0 + 0.01 * rng.standard_normal(n))
    return of_columns(columns | {"decode_context_tokens": context}, elapsed)


def learned(bank, config_id="c"):
    return features_of(bank, config_id=config_id), told(bank, config_id=config_id).models["portable"].rows


@pytest.mark.parametrize(
    "facts",
    [{}, {"num_experts": 128}, {"num_experts": 8, "num_experts_per_tok": 8}, EXPERTS | {"num_moe_layers": 0}],
    ids=["nothing told", "half told", "all of them each time", "no such layer"],
)
def test_only_a_mixture_whose_experts_are_known_has_the_column(facts):
    assert "active_experts" not in portable(STEP, facts).names
    assert portable(STEP, EXPERTS).names == (*portable(STEP).names, "active_experts")
    assert portable(Target.SCHEDULE_TIME, EXPERTS).names == portable(Target.SCHEDULE_TIME).names


def test_the_share_is_that_of_the_tokens_of_a_step():
    columns = {"prefill_tokens": [0.0, 0.0, 100.0], "decode_tokens": [1.0, 2.0, 0.0]}
    rows = of_columns(columns, np.ones(3))
    share = portable(STEP, EXPERTS).evaluate(rows)[:, -1]
    assert share == pytest.approx([8 / 128, 1 - (120 / 128) ** 2, 1 - (120 / 128) ** 100])


@pytest.mark.parametrize("restarts", [False, True])
def test_a_configuration_whose_experts_are_told_late_learns_its_steps_anew(restarts):
    before = Bank(PORTABLE)
    before.describe("c", {"model": "m"})
    before.learn("c", STEP, steps(600, 1))
    assert "active_experts" not in learned(before)[0]
    after = restarted(before) if restarts else before
    after.describe("c", EXPERTS)
    after.learn("c", STEP, steps(900, 2))
    features, rows = learned(after)
    assert "active_experts" in features
    assert rows == 900
