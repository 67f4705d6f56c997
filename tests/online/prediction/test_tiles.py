"""Machines that compute whole tiles of tokens: what their rows say of it, and what plans make of that."""

import dataclasses

import numpy as np
import pytest

import tracefit
from collector.config import Config
from online.bank import Bank, merge_states
from online.prediction.tiles import Tiles
from online.rows import STEP_FEATURES, RowBlock, Target
from online.snapshot import ConfigSnapshot, Snapshot

ROWS = 12_000
PER_TOKEN_US = 30.0
RLS = Config(learners=("rls",), feature_sets=("portable",))


def padded(tokens, tile):
    return tile * np.ceil(tokens / tile) if tile else tokens


def served(tile, prompts=None, seed=4, steps=1, price=1.0, floor=0):
    """Steps of a prompt, of six tiles or so, and some decodes; padding costs ``price`` of what a prompt's tokens do.

    Fewer tokens than ``floor`` take as long as so many.
    """
    draw = np.random.default_rng(seed)
    with_prompt = draw.random(ROWS) < 0.4
    prefill = (
        np.floor(6 * max(tile, 64) * np.exp(draw.normal(0.0, 0.7, ROWS)))
        if prompts is None
        else draw.choice(prompts, ROWS)
    )
    prefill *= with_prompt
    decodes = draw.integers(8, 60, ROWS).astype(float)
    tokens = prefill + decodes
    paid = np.where(with_prompt, tokens + price * (padded(tokens, tile) - tokens), decodes)
    paid = np.maximum(paid, floor)
    elapsed_us = (6_000.0 + PER_TOKEN_US * paid + 0.04 * 400 * decodes) * np.exp(0.02 * draw.standard_normal(ROWS))
    lines = np.zeros((ROWS, len(STEP_FEATURES)))
    values = {"prefill_tokens": prefill, "prefill_requests": with_prompt, "requests": decodes + with_prompt}
    values |= {"decode_requests": decodes, "decode_tokens": decodes, "decode_context_tokens": 400 * decodes}
    for name, column in values.items():
        lines[:, STEP_FEATURES.index(name)] = column
    rows = RowBlock.of_lines(lines, elapsed_us, end_ns=np.cumsum(elapsed_us * steps * 1e3).astype(np.int64))
    if steps == 1:
        return rows
    offsets = np.arange(0, ROWS * steps + 1, steps)
    return dataclasses.replace(
        rows, raw=np.repeat(lines, steps, axis=0), offsets=offsets, elapsed_us=elapsed_us * steps
    )


def bank_of(rows):
    bank = Bank(RLS)
    bank.learn("c0", Target.STEP_TIME, rows)
    return bank


def target_of(bank):
    return bank.targets("c0")["step_time"]


def client_of(bank):
    published = ConfigSnapshot(config_id="c0", config={}, engines=[], telemetry="steps", targets=bank.targets("c0"))
    snapshot = Snapshot(generation=1, created_unix_nano=1, tracefit_version="0", configs=[published])
    return tracefit.load(snapshot.to_json()).config()


@pytest.mark.parametrize("tile", [64, 128, 256])
def test_the_tile_of_a_machine_is_found(tile):
    target = target_of(bank_of(served(tile)))
    assert target.tile == tile
    told = {name: each.padding for name, each in target.shape_factors.items() if each.padding is not None}
    assert told
    assert all(name.startswith("prefill") and 0.0 <= padding < tile for name, padding in told.items())


SHORT = np.round(np.exp(np.random.default_rng(7).normal(4.8, 0.5, 2000)))
"""Prompts of 120 tokens or so."""


@pytest.mark.parametrize("floor", [220, 245])
def test_a_machine_that_waits_for_its_memory_up_to_so_many_tokens_is_not_one_of_tiles(floor):
    bank = Bank(RLS)
    for seed in range(4):
        bank.learn("c0", Target.STEP_TIME, served(0, prompts=SHORT, floor=floor, seed=seed))
    assert target_of(bank).tile is None


@pytest.mark.parametrize(
    "rows", [served(0), served(64, price=0.2), served(64, steps=4)], ids=["none", "cheap", "several steps to a row"]
)
def test_no_tile_is_told_where_rows_do_not_say_so(rows):
    target = target_of(bank_of(rows))
    assert target.tile is None
    assert all(each.padding is None for each in target.shape_factors.values())


def test_prompts_of_one_length_are_foretold_with_their_own_padding():
    near = client_of(bank_of(served(64)))._model().near
    for prompt in (505, 560, 600, 633):
        tokens = prompt + 19
        true_us = 6_000.0 + PER_TOKEN_US * padded(tokens, 64) + 0.04 * 400 * 19
        assert near.band(prompt, 20, 400 * 19, 19)[0] == pytest.approx(true_us, rel=0.015)


def test_a_mean_prompt_is_padded_by_half_a_tile():
    near = client_of(bank_of(served(64)))._model().near
    between = [near.band(float(tokens), 20, 7_600, 19)[0] for tokens in range(550, 614)]
    assert near.band(581.5, 20, 7_600, 19)[0] == pytest.approx(np.mean(between), rel=0.005)


def test_a_server_of_one_prompt_knows_its_padding_already():
    bank = bank_of(served(64, prompts=[600.0]))
    near = client_of(bank)._model().near
    true_us = 6_000.0 + PER_TOKEN_US * padded(619, 64) + 0.04 * 400 * 19
    assert near.band(600.0, 20, 7_600, 19)[0] == pytest.approx(true_us, rel=0.02)


def test_tiles_survive_a_restart_and_a_merge():
    one, other = bank_of(served(128)), bank_of(served(128, seed=5))
    again = Bank(RLS)
    again.restore(one.state())
    assert target_of(again) == target_of(one)
    merged = Bank(RLS)
    merged.restore(merge_states([one.state(), other.state()], RLS))
    assert target_of(merged).tile == 128


def test_a_set_without_these_columns_has_no_tile():
    tiles = Tiles(("intercept", "requests"))
    tiles.learn(None, None, None)
    assert tiles.tile() is None
    assert tiles.usual_padding() == {}
