"""Telemetry that tells every step exactly: rows are differences of done stamps, whatever order it comes in."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from collector.config.schema import Config
from collector.decode import STEP_DTYPE, Telemetry
from collector.join import Joiner
from collector.join.events import Rows
from collector.telemetry import JoinEvent, RowDrop, table
from online import STEP_FEATURES, Quality, Target
from tests.support.clocks import T0_NS
from tests.support.pipelines import by_label

CONTEXT = STEP_FEATURES.index("decode_context_tokens")


def steps_of(first, stop, *, begin_ns=10**12, step_ns=20_000_000):
    """A busy engine that decodes two requests; step n takes step_ns + n microseconds."""
    ids = np.arange(first, stop)
    steps = np.zeros(len(ids), STEP_DTYPE)
    steps["step_id"] = ids
    steps["ts_start_ns"] = begin_ns + ids * step_ns + 500 * ids * ids
    steps["ts_end_ns"] = steps["ts_start_ns"] + 90_000
    steps["ts_done_ns"] = begin_ns + (ids + 1) * step_ns + 500 * (ids + 1) * (ids + 1) - 10_000
    steps["unix_ns"] = T0_NS + steps["ts_end_ns"]
    steps["duration_us"] = 90
    steps["running"] = steps["decode_requests"] = steps["decode_tokens"] = steps["scheduled_tokens"] = 2
    steps["context_tokens_single"] = steps["attention_pairs"] = 400 + ids
    return steps


def rows_of(pieces, *, at_the_end=True):
    """(end, elapsed, context, quality) of each step row, by engine; what happened or was dropped, by reason."""
    joiner, rows = Joiner(Config()), {}
    for number, steps in enumerate(pieces):
        joiner.add(Telemetry("a", {"model": "m"}, steps=steps))
        events = joiner.drain()
        if at_the_end and number == len(pieces) - 1:
            events += joiner.drain(flush=True)
        for event in events:
            if isinstance(event, Rows) and event.target is Target.STEP_TIME:
                block = event.rows
                columns = (block.end_ns, block.elapsed_us, block.raw[:, CONTEXT], block.quality, block.engine)
                for *row, engine in zip(*(column.tolist() for column in columns), strict=True):
                    rows.setdefault(engine, []).append(tuple(row))
    counts = joiner.take_counts()
    return rows, Counter(by_label(counts, table.JOIN_EVENTS) | by_label(counts, table.DROPPED_ROWS))


def plain_rows(steps):
    """The same with nothing but sorting and differences."""
    steps = np.sort(steps, order="step_id")
    done = steps["ts_done_ns"]
    unix_ns = (done + steps["unix_ns"] - steps["ts_end_ns"])[1:]
    elapsed_us = np.diff(done) / 1e3
    context = steps["context_tokens_single"][1:].astype(float)
    return list(zip(unix_ns.tolist(), elapsed_us.tolist(), context.tolist(), itertools.repeat(int(Quality.STEPS_PLUS))))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_without_done_stamps_steps_end_when_the_next_begins_one_later_where_the_engine_schedules_ahead(asynchronous):
    steps, joiner = steps_of(1, 601), Joiner(Config())
    steps["ts_done_ns"] = -1
    joiner.add(Telemetry("a", {"vllm.async_scheduling": str(asynchronous)}, steps=steps))
    (rows,) = (one.rows for one in joiner.drain(flush=True) if isinstance(one, Rows) and one.target is Target.STEP_TIME)
    step, begun = rows.raw[:, CONTEXT] - 400, rows.elapsed_us - 20_000.5
    assert len(rows) > 590
    np.testing.assert_allclose(begun - step, asynchronous)


@pytest.mark.parametrize("seed", range(4))
def test_neither_order_nor_pieces_nor_repeats_change_a_row(seed):
    draw, steps = random.Random(seed), steps_of(1, 1521)
    pieces = [*np.split(steps, range(40, 1520, 40))]
    repeated = [*pieces, *draw.sample(pieces, 10)]
    # each comes up to eight pieces late: 6.4 s of 20 that are allowed
    repeated.sort(key=lambda piece: piece["step_id"][0] + draw.uniform(0, 8 * 40))
    rows, counts = rows_of(repeated)
    assert rows == {0: plain_rows(steps)}
    assert counts[JoinEvent.DUPLICATE] == 10 * 40


def test_a_missing_step_is_waited_for_and_then_costs_two_rows():
    steps = steps_of(1, 3000)
    gap = (steps["step_id"] > 500) & (steps["step_id"] <= 510)
    waiting, _ = rows_of([steps[~gap][:600]], at_the_end=False)
    assert waiting == {}, "nothing leaves before it is as old as a span may be late"
    rows, counts = rows_of([steps[~gap][:600], steps[gap], steps[~gap][600:]])
    assert rows == {0: plain_rows(steps)}
    assert counts[JoinEvent.MISSING] == 0
    rows, counts = rows_of([steps[~gap], steps[gap]])
    told = zip(plain_rows(steps), steps["step_id"][1:], strict=True)
    expected = [row for row, step in told if not 500 < step <= 511]
    assert rows == {0: expected}
    assert counts[JoinEvent.MISSING] == 10
    assert counts[JoinEvent.STEP_LATE] == 10
    assert counts[RowDrop.INCOMPLETE] == 1


def test_a_restart_begins_anew_and_no_row_spans_it_also_where_its_exports_overtake_those_before():
    before, after = steps_of(1, 500), steps_of(1, 400, begin_ns=10**12 + 60 * 10**9)
    overtaking = [before[:300], after[50:100], before[300:], after[:50], after[100:]]
    for pieces in ([np.concatenate([before, after])], overtaking):
        rows, counts = rows_of(pieces)
        assert rows == {0: plain_rows(before) + plain_rows(after)}
        assert counts[JoinEvent.ENGINE_RESTART] == 1


def test_rows_of_a_configuration_leave_by_their_end_and_a_silent_engine_holds_the_others_for_the_timeout():
    joiner, ends_ns, left_ns = Joiner(Config()), [], 0
    for number in range(120):
        for name in "ab" if number < 30 else "a":  # two seconds of steps
            steps = steps_of(1 + 100 * number, 101 + 100 * number, begin_ns=10**12 + 7_000_000 * (name == "b"))
            joiner.add(Telemetry(name, {"model": "m"}, steps=steps))
            left_ns = int(steps["unix_ns"][-1]) if name == "b" else left_ns
        blocks = [one.rows for one in joiner.drain() if isinstance(one, Rows) and one.target is Target.STEP_TIME]
        ends_ns += [block.end_ns for block in blocks]
        if blocks and number >= 30 and steps["unix_ns"][-1] < left_ns + 179 * 10**9:
            assert blocks[-1].end_ns[-1] <= left_ns
    assert (np.diff(np.concatenate(ends_ns)) >= 0).all()
    assert ends_ns[-1][-1] > left_ns + 180 * 10**9


def test_an_empty_step_is_idle_time():
    steps = steps_of(1, 300)
    empty = steps["step_id"] == 200
    for name in ("scheduled_tokens", "decode_tokens", "decode_requests", "running"):
        steps[name][empty] = 0
    steps["ts_done_ns"][empty] = -1
    rows, counts = rows_of([steps])
    assert len(rows[0]) == 297
    assert counts[RowDrop.IDLE] == 1
    ((elapsed_us,),) = ([row[1] for row in rows[0] if row[2] == 400 + 201],)
    after = steps[steps["step_id"] == 201][0]
    assert elapsed_us == (after["ts_done_ns"] - after["ts_start_ns"]) / 1e3


@pytest.mark.parametrize("told_finished", [True, False])
def test_idle_time_whose_empty_step_was_not_sent_is_no_stall(told_finished):
    """Nobody is left of step 200: all that ran have ended, or the prompt of the next step begins with it."""
    steps = steps_of(1, 300)
    steps["prefill_requests"][steps["step_id"] == 200] = 1
    later = steps["step_id"] > 200
    for stamp in ("ts_start_ns", "ts_end_ns", "ts_done_ns", "unix_ns"):
        steps[stamp][later] += 900_000_000
    first = steps["step_id"] == 201
    steps["finished"][first] = 2 if told_finished else 0
    for name, value in {"decode_requests": 0, "decode_tokens": 0, "prefill_requests": 1, "prefill_tokens": 2}.items():
        steps[name][first] = value
    steps["attention_pairs"][first] = 2000 if told_finished else 3
    rows, _ = rows_of([steps])
    ((elapsed_us,),) = ([row[1] for row in rows[0] if row[2] == 400 + 201],)
    (prompt,) = steps[first]
    assert elapsed_us == (prompt["ts_done_ns"] - prompt["ts_start_ns"]) / 1e3
    assert max(row[1] for row in rows[0]) < 30_000
