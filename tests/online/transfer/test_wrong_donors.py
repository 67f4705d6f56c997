"""What a donor of another machine lends is given up when the rows say otherwise, or is not lent at all."""

import numpy as np
import pytest

from collector.cli import main
from online import STEP_FEATURES, Bank, Snapshot
from online.rls import Prior
from tests.support.banks import PORTABLE, STEP, features_of
from tests.support.linear_steps import BETA, steps
from tests.support.paths import DATA

RULES = "learners: [rls]\nrules: [{match: {recording: '*'}, facts: {model: m}}]\n"


def _new_of(bank):
    return features_of(bank, config_id="new")


def _replayed(name, directory, more=""):
    """The portable model of a bundled recording, which is said to be of the model m."""
    (directory / "tracefit.yaml").write_text(RULES + more)
    out, state = directory / f"{name}.json", directory / f"{name}.bin"
    files = ["--snapshot", str(out), "--state", str(state), "--config", str(directory / "tracefit.yaml")]
    assert main(["replay", str(DATA / name / "otlp.pb.gz"), *files]) == 0
    (config,) = Snapshot.from_json(out.read_bytes()).configs
    return config.targets["step_time"].models["portable"], state


def test_a_wrong_donor_neither_holds_what_the_rows_tell_nor_spoils_predictions(tmp_path):
    """The donor's prefill tokens take a twelfth of the time."""
    alone, _ = _replayed("c1_mixed", tmp_path)
    _, donor = _replayed("c7_async_sim", tmp_path)
    started, _ = _replayed("c1_mixed", tmp_path, f"donors: [{donor}]")
    assert started.error.mape < 1.2 * alone.error.mape
    cold, prefill = (model.features[1] for model in (alone, started))
    assert cold.status == prefill.status == "identified"
    assert prefill.coefficient == pytest.approx(cold.coefficient, rel=0.05)


def test_a_donor_is_worth_no_more_than_a_few_of_its_own_rows_however_noisy_the_machine():
    per_row = np.array([1e-10, 4e-4, 1e-2, 1.0])
    for beta in (np.zeros(4), np.array([1e4, 50.0, 0.1, 100.0])):
        assert (Prior.of_donor(beta, per_row).precision(scale=0.5) <= 2.25 * per_row * (1.0 + 1e-9)).all()


def _long_contexts(n, seed):
    """A machine on which context costs nothing, and of which contexts are a hundred times as long."""
    rows = steps(n, seed, beta=BETA * [1, 1, 0, 1]).rows
    rows.raw[:, STEP_FEATURES.index("decode_context_tokens")] *= 100
    return rows


def test_a_donor_is_dropped_where_the_own_fit_is_twice_as_good():
    """It knows precisely that its long contexts cost nothing, which no few rows of short ones would move."""
    bank, cold = Bank(PORTABLE), Bank(PORTABLE)
    bank.learn("old", STEP, _long_contexts(2000, 1))
    bank.warm_start("new", "old")
    own = steps(600, 2, beta=BETA * [0.3, 1, 10, 1]).rows
    for each in (bank, cold):
        each.learn("new", STEP, own)
    helped, unhelped = ({name: f.coefficient for name, f in _new_of(each).items()} for each in (bank, cold))
    assert helped["decode_context_tokens"] == pytest.approx(BETA[2] * 10, rel=0.1)
    assert helped == pytest.approx(unhelped, rel=0.05)


def test_a_donor_that_is_like_it_stays():
    bank = Bank(PORTABLE)
    bank.learn("old", STEP, steps(2000, 1).rows)
    bank.warm_start("new", "old")
    bank.learn("new", STEP, steps(600, 2, prefill_share=0.0).rows)
    prefill = _new_of(bank)["prefill_tokens"]
    assert prefill.coefficient == pytest.approx(BETA[1], rel=0.05)
    assert prefill.status == "prior_only"


@pytest.mark.parametrize(
    ("facts", "lent"),
    [
        ({"model": "m", "gpu": "H100"}, True),
        ({"model": "m"}, False),
        ({"model": "m", "gpu": "A100"}, False),
        ({"model": "x", "gpu": "H100"}, False),
    ],
)
def test_a_donor_lends_only_to_a_configuration_of_its_model_and_gpu(facts, lent):
    donor, bank = Bank(PORTABLE), Bank(PORTABLE)
    donor.describe("old", {"model": "m", "gpu": "H100", "tensor_parallel_size": 1})
    donor.learn("old", STEP, steps(2000, 1).rows)
    bank.add_donors(donor.state())
    bank.describe("new", facts)
    bank.learn("new", STEP, steps(64, 2, prefill_share=0.0).rows)
    status = {name: feature.status for name, feature in _new_of(bank).items()}
    assert status.get("prefill_tokens") == ("prior_only" if lent else None)
    assert ("prior_only" in status.values()) == lent
