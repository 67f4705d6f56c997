"""A step of now is times the level of the last steps, while that is fresh."""

import pytest

import tracefit
from collector.cli import main
from tests.tracefit.example_snapshot import encoded, step_time_of, tree

SECOND_NS = 10**9
NOW = 1_763_625_600 * SECOND_NS
DECODE, PREFILL = {"requests": 8, "decode_context_tokens": 7200}, {"requests": 8, "prefill_tokens": 512}


def _document(decode=1.1, prefill=0.9, *, age_s=2.0, prefill_age_s=None):
    changed = tree()
    last = {"decode": age_s, "prefill": age_s if prefill_age_s is None else prefill_age_s}
    factors = {"decode": decode, "prefill": prefill}
    step_time_of(changed)["level"] = {
        phase: {"factor": factor, "rows": 900, "last_row_unix_nano": NOW - int(last[phase] * 1e9)}
        for phase, factor in factors.items()
    }
    return encoded(changed)


def _config(*args, **kwargs):
    return tracefit.load(_document(*args, **kwargs)).config()


@pytest.mark.parametrize(("step", "factor"), [(DECODE, 1.1), (PREFILL, 0.9)])
def test_a_step_of_now_is_times_the_level_of_its_phase(step, factor):
    config = _config()
    of_any_time, of_now = config.step_time(**step), config.now(NOW).step_time(**step)
    for one, other in zip(of_now[:3], of_any_time[:3], strict=True):
        assert one == pytest.approx(factor * other)


@pytest.mark.parametrize("age_s", [10.1, 3600.0])
def test_a_level_that_is_old_is_not_used(age_s):
    config = _config(age_s=age_s)
    assert config.now(NOW).step_time(**DECODE) == config.step_time(**DECODE)
    assert config.now(NOW).level == config.level == (1.0, 1.0)


def test_it_says_what_it_used_and_each_phase_has_an_age_of_its_own():
    assert _config().now(NOW).level == (1.1, 0.9)
    assert _config(prefill_age_s=60.0).now(NOW).level == (1.1, 1.0)


def test_requests_of_now_are_made_of_steps_of_now():
    config, load = _config(1.1, 1.1), {"prompt_tokens": 512, "output_tokens": 64, "concurrency": 4}
    assert config.now(NOW).request(**load).itl.us == pytest.approx(1.1 * config.request(**load).itl.us, rel=0.02)


@pytest.mark.parametrize("level", [{"decode": {}}, {"decode": 1.1}, 3])
def test_a_level_that_is_none_is_refused(level):
    changed = tree()
    step_time_of(changed)["level"] = level
    with pytest.raises(tracefit.LoadError):
        tracefit.load(encoded(changed))


@pytest.mark.parametrize("document", [_document(), encoded()])
def test_the_command_says_what_the_level_did(document, tmp_path, capsys):
    (tmp_path / "snapshot.json").write_bytes(document)
    question = ["predict", str(tmp_path / "snapshot.json"), "--requests", "8", "--context", "7200"]
    assert main([*question, "--now"]) == 0
    assert "level     not used: no step was heard of in the last 10 s" in capsys.readouterr().out
    assert main(question) == 0
    assert "level" not in capsys.readouterr().out
