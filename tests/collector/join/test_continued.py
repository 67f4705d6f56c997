"""Exports that are laid together say what they say one by one."""

from __future__ import annotations

import numpy as np
import pytest

from collector.config.learning_config import JoinConfig
from collector.decode.records import Telemetry
from collector.join.continued import together
from collector.join.events import Rows
from collector.join.joiner import Joiner
from tests.support.toy_engine import MONO_NS, many_jobs, run_engine
from tests.support.toy_spans import columns_of, core_of

FACTS = {"vllm.model": "m"}
LEAN = JoinConfig(warm_up_rows=0, steps_max=4096, grace_s=1, window_s=20)


def told(name: str, seed: int, *, start_s: int = 0, process: int = 0, requests: bool = False) -> list[Telemetry]:
    """An engine's steps, 16 an export; ``requests``: some of the exports tell one, too."""
    jobs = many_jobs(150, seed=seed)
    run = run_engine(jobs, start_ns=MONO_NS + start_s * 10**9)
    steps = columns_of(run)
    exports = [
        Telemetry(name, FACTS, steps=steps[first : first + 16], process=process) for first in range(0, len(steps), 16)
    ]
    finished = [job for job in jobs if job.marks]
    for number, job in enumerate(finished[::3] if requests else ()):
        exports[3 * number % len(exports)].core.append(core_of(run, job))
    return exports


def interleaved(*streams: list[Telemetry]) -> list[Telemetry]:
    longest = max(map(len, streams))
    return [stream[place] for place in range(longest) for stream in streams if place < len(stream)]


def swapped(exports: list[Telemetry]) -> list[Telemetry]:
    """Two change places, one comes twice, one has its steps in disorder, one is lost."""
    out = [*exports]
    out[80], out[81] = out[81], out[80]
    out[90] = out[89]
    out[93].steps = out[93].steps[::-1].copy()
    del out[100]
    return out


CASES = {
    "two engines": interleaved(told("a", 1), told("b", 2)),
    "requests in between": interleaved(told("a", 1, requests=True), told("b", 2)),
    "disorder": interleaved(swapped(told("a", 1)), told("b", 2)),
    "a restart": [*told("a", 1), *told("a", 3, start_s=100)],
    "a restart beside another engine": interleaved([*told("a", 1), *told("a", 3, start_s=100)], told("b", 2)),
    "one id of two processes": interleaved(told("a", 1, process=7), told("a", 3, process=8)),
    "one engine of two emitters": interleaved(told("a", 1), told("b", 1)),
}


def joined(exports: list[Telemetry], batch: int, *, as_one: bool) -> tuple[list[object], dict, int]:
    joiner, out, added = Joiner(LEAN), [], 0
    for first in range(0, len(exports), batch):
        group = [("", each) for each in exports[first : first + batch]]
        for recording, telemetry in together(group, joiner.goes_on) if as_one else group:
            joiner.add(telemetry, recording)
            added += 1
        out += joiner.drain()
    out += joiner.drain(flush=True)
    events = [
        (event.config_id, event.target, *map(np.ndarray.tobytes, (event.rows.raw, event.rows.elapsed_us)))
        if isinstance(event, Rows)
        else repr(event)
        for event in out
    ]
    return events, {repr(row): number for row, number in joiner.take_counts().items() if number}, added


@pytest.mark.parametrize("batch", [1, 7, 24])
@pytest.mark.parametrize("name", CASES)
def test_rows_and_counts_are_those_of_exports_that_are_added_one_by_one(name, batch):
    events, counts, added = joined(CASES[name], batch, as_one=True)
    expected_events, expected_counts, exports = joined(CASES[name], batch, as_one=False)
    assert events == expected_events
    assert counts == expected_counts
    assert added <= exports == len(CASES[name])


def test_exports_of_an_engine_that_has_given_rows_are_laid_together():
    exports = CASES["two engines"]
    assert joined(exports, 24, as_one=True)[2] < len(exports) / 3


def test_what_is_laid_together_counts_as_so_many_exports():
    joiner, exports = Joiner(LEAN), told("a", 1)
    for first in range(0, len(exports), 24):
        for recording, telemetry in together([("", each) for each in exports[first : first + 24]], joiner.goes_on):
            joiner.add(telemetry, recording)
        joiner.drain()
    assert sum(joiner._heard.values()) == len(exports)
