"""Slower, and in which term: recordings of a real server that were made slower, of which the term is named."""

import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from collector.decode import Export
from collector.service.pipeline import make_pipeline
from online import Bank, RowBlock, Snapshot, Target
from online.moved_term import moved_term
from online.snapshot import ConfigSnapshot
from tests.support.banks import merge_states
from tests.support.gpu_server import serve, step_exports
from tests.support.linear_steps import BETA, repeated, steps
from tests.support.paths import DOCS
from tests.support.pipelines import new_pipeline, only_config
from tests.support.slower import (
    CONFIG,
    CONFIG_ID,
    bank_of,
    decode_longer,
    every_step_longer,
    everything_longer,
    learned,
    noisy,
    pages_of_a_slower_server,
    prefill_longer,
    slowed,
    step_rows,
)
from tracefit import OutlierReplica, load, term_text

STEP, ONSET, TEN_MINUTES_NS = "step_time", 7_900, 600 * 10**9


@cache
def changed(slower):
    """What is said ten minutes after a server became slower."""
    rows = slowed(step_rows(), slower, since=ONSET)
    return learned(bank_of(rows.take(rows.end_ns < rows.end_ns[ONSET] + TEN_MINUTES_NS))).drift


@pytest.mark.parametrize(
    ("slower", "term", "added"),
    [
        (every_step_longer(30_800.0), "intercept", 30_800.0),
        (decode_longer(3.3), "decode", 2.3),
        (everything_longer(1.42), "all", 0.42),
    ],
    ids=["30.8 ms more on every step", "decode 3.3 times as long", "all 1.42 times as long"],
)
def test_a_change_names_its_term_within_ten_minutes_of_traffic(slower, term, added):
    after = changed(slower)
    assert (after.count >= 1, after.term) == (True, term)
    assert after.added == pytest.approx(added, rel=0.2)


def test_on_a_gpu_each_change_is_told_once_and_by_the_term_that_rose_and_fell():
    """Steps with prefill take many times as long there, so that a constant is a small share of them."""
    engine = serve("llama8b-h100", 165.0, 4, slower=lambda second, us: us + 3000.0 * (45.0 <= second < 105.0))
    pipeline, told = new_pipeline(), []
    exports = [Export(each, "x", 1) for each in step_exports("llama8b-h100", engine)]
    for start in range(0, len(exports), 15):
        pipeline.process(exports[start : start + 15])
        target = pipeline.snapshot(1, 1).configs[0].targets.get(STEP)
        if target and target.drift.count:
            told.append((target.drift.count, target.drift.gain > 1.0, target.drift.term))
    assert [each for each in dict.fromkeys(told) if each[2]] == [(1, True, "intercept"), (2, False, "intercept")]


def sibling(number):
    """Rows of one of four servers that do the same."""
    return noisy(step_rows(), number)


@cache
def state_of(number, slower=None):
    """What the sidecar of a sibling knows, which may be slower than the others."""
    rows = sibling(number) if slower is None else slowed(sibling(number), slower)
    return bank_of(rows, f"engine-{number}").state()


def joined(states):
    """What is known of engines, each of which has a sidecar."""
    bank = bank_of(step_rows().slice(0, 512))
    bank.restore(merge_states(states, CONFIG))
    return learned(bank)


@cache
def merged(slower):
    """The same of four siblings, of which the third is slower."""
    return joined([state_of(0), state_of(1), state_of(2, slower), state_of(3)])


def of_one_sidecar(slower):
    """The same of engines that send to one, ten minutes after they began."""
    siblings = [sibling(0), sibling(1), slowed(sibling(2), slower), sibling(3)]
    rows = RowBlock.concatenate(
        [replace(each, engine=np.full(len(each), number)) for number, each in enumerate(siblings)]
    )
    order = np.argsort(rows.end_ns, kind="stable")
    order = order[rows.end_ns[order] < rows.end_ns.min() + TEN_MINUTES_NS]
    bank, names = Bank(CONFIG), {number: f"engine-{number}" for number in range(len(siblings))}
    bank.learn(CONFIG_ID, Target.STEP_TIME, rows.take(order), engines=names)
    return learned(bank)


@pytest.mark.parametrize(
    ("slower", "term", "added", "told"),
    [
        (prefill_longer(1.5), "prefill_tokens", 341.0, merged),
        (prefill_longer(1.5), "prefill_tokens", 341.0, of_one_sidecar),
        (everything_longer(1.15), "all", 0.15, merged),
        (everything_longer(1.15), "", None, of_one_sidecar),  # ten minutes do not tell it from decode
    ],
)
def test_a_replica_that_is_slower_from_its_start_is_named_with_its_term(slower, term, added, told):
    (odd,) = [replica for replica in told(slower).replicas if replica.differs]
    assert (odd.engine, odd.term) == ("engine-2", term)
    assert odd.added == (None if added is None else pytest.approx(added, rel=0.15))


def pages_of_eight(betas, *, all_slower_since):
    """Windows of eight engines that one sidecar asks every 15 s: a round of them at a time, and what is said then."""
    windows = [repeated(steps(110, seed, beta=beta).rows, 40) for seed, beta in enumerate(betas)]
    bank, names = Bank(CONFIG), {number: f"engine-{number}" for number in range(8)}
    for at in range(110):
        now = RowBlock.concatenate([rows.slice(at, at + 1) for rows in windows])
        took_us = now.elapsed_us * (1.8 if at >= all_slower_since else 1.0)
        end_ns = 15 * 10**9 * (at + 1) + np.arange(8)
        now = replace(now, elapsed_us=took_us, end_ns=end_ns, engine=np.arange(8))
        bank.learn(CONFIG_ID, Target.STEP_TIME, now, engines=names)
        if (target := bank.targets(CONFIG_ID).get(STEP)) is not None:
            yield target


def test_of_engines_that_one_sidecar_asks_for_pages_only_the_slower_one_is_named_and_in_six_minutes():
    """Which the first fit takes, and its windows count."""
    told = {}
    for target in pages_of_eight([BETA * [1.15, 1.0, 1.15, 1.15], *[BETA] * 7], all_slower_since=110):
        for replica in target.replicas:
            if replica.differs:
                told.setdefault(replica.engine, replica)
    assert list(told) == ["engine-0"]
    assert told["engine-0"].rows <= 24
    assert target.drift.count == 0


def test_a_change_of_all_engines_that_one_sidecar_asks_for_pages_is_reported_once_each_of_them_shows_it():
    """Which takes half of the 64 windows of each, and by then the usual speed of all must not have followed."""
    *_, target = pages_of_eight([BETA] * 8, all_slower_since=60)
    assert target.drift.count == 1
    assert target.drift.gain > 1.5
    assert not any(replica.differs for replica in target.replicas)


@pytest.mark.parametrize(
    ("speeds", "gains", "reported"),
    [([1.15, 1, 1], [1.15] * 3, (1, pytest.approx(1.15, rel=0.02))), ([1] * 3, [1.5, 1.5, 1], (0, None))],
)
def test_a_change_is_what_all_engines_show_though_one_of_them_was_slower_before(speeds, gains, reported):
    each = zip(speeds, gains, strict=True)
    engines = [steps(8000, n, beta=BETA * at, drift_at=6000, gain=gain).rows for n, (at, gain) in enumerate(each)]
    rows = RowBlock.concatenate([replace(each, engine=np.full(8000, n)) for n, each in enumerate(engines)])
    drift = learned(bank_of(rows.take(np.arange(24_000).reshape(3, -1).T.ravel()))).drift
    assert (drift.count, drift.gain) == reported


@pytest.mark.parametrize(
    ("siblings", "slower", "term", "added"),
    [
        (2, [2.0, 1.0, 1.0, 1.0], "intercept", 9_000.0),
        (2, [1.0, 2.0, 1.0, 1.0], "prefill_tokens", 40.0),
        (3, [2.0, 1.0, 2.0, 2.0], "decode", 1.0),
        (7, [1.3] * 4, "all", 0.3),
    ],
)
def test_one_slow_replica_makes_no_other_look_fast(siblings, slower, term, added):
    states = [bank_of(steps(600, seed).rows, f"engine-{seed}").state() for seed in range(siblings)]
    states.append(bank_of(steps(600, 99, beta=BETA * slower).rows, "slow").state())
    (odd,) = [replica for replica in joined(states).replicas if replica.differs]
    assert (odd.engine, odd.term) == ("slow", term)
    assert odd.added == pytest.approx(added, rel=0.1)


def learned_from_pages(slower):
    """What a sidecar says that asks for a page every 15 s, after twenty minutes of traffic or more."""
    pipeline = make_pipeline(CONFIG)
    pipeline.process(pages=pages_of_a_slower_server(slower, 15.0, 2)[0])
    pipeline.flush()
    return load(pipeline.snapshot(1, 1).to_json())


@cache
def first_fit():
    """What was learned in an hour and a half of the same work, which the first fit takes."""
    pipeline = make_pipeline(CONFIG)
    pages, onset_ns = pages_of_a_slower_server(everything_longer(1.0), 15.0, 2, usual=8)
    pipeline.process(pages=[page for page in pages if page.unix_ns < onset_ns])
    return pipeline


@pytest.mark.parametrize(
    ("slower", "soon", "term"),
    [
        (every_step_longer(30_800.0), "intercept", "intercept"),
        (decode_longer(3.3), "not_prefill", "decode"),
        (everything_longer(1.0), "", ""),
    ],
)
def test_pages_at_15_s_tell_a_change_and_its_term_within_ten_minutes_and_no_wrong_one(slower, soon, term):
    pages, onset_ns = pages_of_a_slower_server(slower, 15.0, 2, usual=8)
    pipeline, soon_ns = copy.deepcopy(first_fit()), onset_ns + TEN_MINUTES_NS
    pipeline.process(pages=[page for page in pages if onset_ns <= page.unix_ns < soon_ns])
    found = published_drift(pipeline)
    assert (found.count, found.term) == (bool(term), soon)
    pipeline.process(pages=[page for page in pages if page.unix_ns >= soon_ns])
    pipeline.flush()
    found = published_drift(pipeline)
    assert (found.count, found.term) == (bool(term), term)
    assert not term or abs(found.last_unix_nano - onset_ns) < 240_000_000_000


def published_drift(pipeline):
    return only_config(pipeline).targets["step_time"].drift


@cache
def learned_from_steps(slower):
    """As a client reads it."""
    targets = {STEP: learned(bank_of(slowed(sibling(1).slice(0, 6000), slower)))}
    config = ConfigSnapshot(config_id="id", config={"model": "m"}, engines=[], telemetry="steps", targets=targets)
    return load(Snapshot(generation=1, created_unix_nano=1, tracefit_version="0", configs=[config]).to_json())


@pytest.mark.parametrize(
    ("learned_from", "alike", "prefill"),
    [
        (learned_from_steps, ("all", 0.42), ("prefill_tokens", 341.0)),
        (learned_from_pages, ("", None), ("", None)),  # which hardly tell what prefill costs
    ],
)
def test_two_versions_of_a_server_differ_in_a_term(learned_from, alike, prefill):
    usual = learned_from(everything_longer(1.0))
    for slower, term, added in (
        (every_step_longer(30_800.0), "intercept", 30_800.0),
        (decode_longer(3.3), "decode", 2.3),
        (everything_longer(1.42), *alike),
        (prefill_longer(1.5), *prefill),
        (everything_longer(1.0), "", None),
    ):
        (diff,) = usual.diff(learned_from(slower)).configs
        assert diff.term == term
        assert diff.added == (None if added is None else pytest.approx(added, rel=0.2))


def test_the_three_cases_of_slower_md_say_what_stands_there():
    text = (DOCS / "slower.md").read_text(encoding="utf-8")
    after = changed(every_step_longer(30_800.0))
    assert f"steps take {after.gain:.3g} × as long since" in text
    assert f": {term_text(after.term, after.added)}\n" in text
    (slow,) = (each for each in merged(prefill_longer(1.5)).replicas if each.differs)
    odd = OutlierReplica(slow.engine, slow.ratio, slow.stderr, slow.term, slow.added, siblings=3)
    assert f"{odd.text.replace('engine-2', 'vllm-2')}\n" in text
    (diff,) = learned_from_steps(everything_longer(1.0)).diff(learned_from_steps(decode_longer(3.3))).configs
    assert f"what moved: {term_text(diff.term, diff.added)}\n" in text


@pytest.mark.parametrize(("prefill_tokens", "term"), [((0.0,), ""), ((0.0, 600.0), "not_prefill")])
def test_a_load_that_cannot_tell_terms_apart_names_at_most_what_they_have_in_common(prefill_tokens, term):
    x = np.array([[1.0, tokens, 4000.0, 8.0] for tokens in prefill_tokens * 50])
    beta = np.array([9000.0, 40.0, 0.1, 100.0])
    weight = 1.0 / (x @ beta) ** 2
    a, s = (x.T * weight) @ x, (x.T * weight) @ np.full(len(x), 5000.0)
    names = ("intercept", "prefill_tokens", "decode_context_tokens", "requests")
    assert moved_term(a, s, beta, names, slower=True, noise=0.01).name == term
    assert not moved_term(a, s, beta, names, slower=False, noise=0.01).name
