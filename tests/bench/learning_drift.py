"""Changes of speed: how soon they are reported, what is reported of machines that did not change, and the error after.

Constants of the test were chosen on the recordings and on the machines of tests/support/uneven_steps.py with seeds
below 200; here are seeds from 7000 on. Recordings come from ``--captures DIR``, else from those that are bundled.
"""

from __future__ import annotations

import gzip

import numpy as np

from collector.config import Config
from online.change import DETECTORS
from online.features import portable
from online.rows import RowBlock, Target
from online.target import TargetState
from tests.bench.captured import _rows
from tests.support.paths import DATA
from tests.support.uneven_steps import STEADY, plain, ramp, since, uneven

CALM = {"c1": "c1_mixed", "c5": "c5_offload", "c6": "c6_saturated", "c7": "c7_async_sim", "c10": "c10_long"}
CALM |= {"f1": "f1_fork_parity", "p1": "p1_engine_stats"}
GAINS = {1.38: 200, 1.15: 450, 0.8: 450}
"""New time per old time, and the rows within which it must be reported."""
SEEDS, FALSE_SEEDS, SLOW_SEEDS = range(7000, 7020), range(7000, 7025), range(7000, 7006)
ROWS, ONSET = 14_000, 8000
GROWN_ONSET, GROWN_ROWS = 20_000, 22_000
"""A change while blocks are as long as they become."""
NEVER = 10**9
DETECTOR_SEEDS, PREFILL_LIMIT = range(7000, 7010), 1500


def lines(line, pool, captures):
    """Recordings as they are and sped up or slowed down, uneven machines, steady ones, slow and partial changes."""
    yield from _recordings(line, captures)
    for gain, limit in GAINS.items():
        found = list(pool.map(_changed, [(gain, seed, ONSET, ROWS) for seed in SEEDS]))
        rows = sorted(each[0] for each in found)
        within = sum(each <= limit for each in rows)
        what = f"uneven machines x{gain}: reported, median of {len(SEEDS)} ({within} in time)"
        yield line(what, f"{int(np.median(rows))} rows", f"<= {limit} rows", bool(np.median(rows) <= limit))
        worst = max(each[1] for each in found)
        what = f"uneven machines x{gain}: error of rows 600-1200 / without the change, worst"
        yield line(what, f"{worst:.2f}", "<= 1.5", bool(worst <= 1.5))
        early = sum(each[2] for each in found)
        yield line(f"uneven machines x{gain}: reported before the change", str(early), "0", early == 0)
    yield from _grown(line, pool)
    for kind in STEADY:
        counts = list(pool.map(_reports, [(kind, seed) for seed in FALSE_SEEDS]))
        per_million = 1e6 * sum(counts) / (len(FALSE_SEEDS) * 20_000)
        yield line(f"false reports per 1e6, {kind}", f"{per_million:.0f}", "<= 20", bool(per_million <= 20))
    yield from _beside(line, pool)
    for what in ("prefill x2", "ramp x1.3"):
        found = np.array(list(pool.map(_slow, [(what, seed) for seed in SLOW_SEEDS])))
        shaped, alone = found.max(axis=0)
        name = f"{what}: error after 6,000 rows / floor, worst of {len(SLOW_SEEDS)} (beta alone {alone:.2f})"
        yield line(name, f"{shaped:.2f}", "<= 1.5", bool(shaped <= 1.5))


def _beside(line, pool):
    """Each detector on the same medians: rows until it reports, and false reports."""
    for detector in DETECTORS[:3]:
        for gain in (1.38, 1.15):
            rows = sorted(pool.map(_delay, [(f"x{gain}", seed, detector) for seed in DETECTOR_SEEDS]))
            yield line(f"{detector}: uneven machines x{gain}, median of 10", f"{int(np.median(rows))} rows", "", None)
        rows = list(pool.map(_delay, [("prefill", seed, detector) for seed in SEEDS]))
        within = sum(each <= PREFILL_LIMIT for each in rows)
        good = within >= 16 if detector == DETECTORS[0] else None
        what = f"{detector}: prefill x2 reported within {PREFILL_LIMIT} rows"
        yield line(what, f"{within} of {len(SEEDS)}", "" if good is None else ">= 16", good)
        jobs = [(kind, seed, detector) for kind in STEADY for seed in DETECTOR_SEEDS]
        per_million = 1e6 * sum(pool.map(_reports, jobs)) / (len(jobs) * 20_000)
        yield line(f"{detector}: false reports per 1e6, all kinds", f"{per_million:.0f}", "", None)


def _delay(job):
    what, seed, detector = job
    n = ONSET + 2500
    gain = 2.0 if what == "prefill" else float(what[1:])
    change = since(n, ONSET, gain)
    rows = plain("iid", seed, n, prefill_gain=change) if what == "prefill" else uneven(seed, n, speed=change)
    return Watched(rows, detector).reported_after(ONSET)


def _grown(line, pool):
    for gain, limit in GAINS.items():
        found = list(pool.map(_changed, [(gain, seed, GROWN_ONSET, GROWN_ROWS) for seed in SEEDS[:8]]))
        what = f"uneven machines x{gain}, blocks full-grown"
        rows = int(np.median([each[0] for each in found]))
        yield line(f"{what}: reported, median of 8", f"{rows} rows", f"<= {limit} rows", rows <= limit)
        worst = max(each[1] for each in found)
        yield line(f"{what}: error of rows 600-1200, worst", f"{worst:.2f}", "<= 1.5", bool(worst <= 1.5))
        early = sum(each[2] for each in found)
        yield line(f"{what}: reported before the change", str(early), "0", early == 0)


def _recordings(line, captures):
    for short, name in CALM.items():
        path = (DATA if captures is None else captures) / name / "otlp.pb.gz"
        if not path.exists():
            yield line(f"reports, {short} as it is", "SKIPPED", "needs --captures", None)
            continue
        rows = _rows(gzip.decompress(path.read_bytes()))
        calm = Watched(rows)
        yield line(f"reports, {short} as it is", str(len(calm.reports)), "0", not calm.reports)
        if short != "c10":
            continue
        n = len(rows)
        for gain, limit in GAINS.items():
            found = Watched(_scaled(rows, since(n, n // 2, gain)))
            late = found.reported_after(n // 2)
            value = "never" if late == NEVER else f"{late} rows"
            yield line(f"c10 x{gain} from half time: reported", value, f"<= {limit} rows", late <= limit)
            ratio = found.error(n // 2 + 600, 600) / calm.error(n // 2 + 600, 600)
            what = f"c10 x{gain}: error of rows 600-1200 / without the change"
            yield line(what, f"{ratio:.2f}", "<= 1.5", bool(ratio <= 1.5))


class Watched:
    """One stream, learned block by block.

    Attributes:
        shaped, slow: relative errors of x beta F and x beta before each row was learned, (n,), NaN before the first
            fit.
        reports: rows learned when each change was reported.
    """

    def __init__(self, rows: RowBlock, detector: str = DETECTORS[0]) -> None:
        settings = Config(learners=("rls",), detector=detector)
        self._state = TargetState(Target.STEP_TIME, settings)
        self._state.offer(portable(Target.STEP_TIME), lambda _features: None)
        self._model = self._state.models["portable"]
        self._learn, self._state._learn_block = self._state._learn_block, self._learn_watched
        self.shaped, self.slow = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
        self.reports: list[int] = []
        self._at = 0
        self._state.learn(rows)
        self._state.flush()

    def _learn_watched(self, block):
        model, here = self._model, slice(self._at, self._at + len(block))
        if model.started:
            predicted = block.x @ model.fit.beta[: block.x.shape[1]]
            self.slow[here] = np.abs(predicted / block.elapsed_us - 1)
            self.shaped[here] = np.abs(predicted * np.exp(model.log_factors(block.cell)) / block.elapsed_us - 1)
        self._learn(block)
        self._at += len(block)
        confirmed = model.drift.confirmed
        self.reports += [self._at] * (confirmed - len(self.reports))

    def reported_after(self, onset):
        """Rows from the onset to the first report."""
        return next((at - onset for at in self.reports if at > onset), NEVER)

    def error(self, start, rows, which="shaped"):
        """Mean relative error of so many rows."""
        return float(np.nanmean(getattr(self, which)[start : start + rows]))


def _scaled(rows, gain):
    us = rows.elapsed_us * gain
    end_ns = rows.end_ns + np.cumsum((us - rows.elapsed_us) * 1e3).astype(np.int64)
    return RowBlock(rows.raw, rows.offsets, us, rows.phase, rows.weight, end_ns, rows.engine, rows.quality)


def _changed(job):
    gain, seed, onset, rows = job
    calm, found = Watched(uneven(seed, rows)), Watched(uneven(seed, rows, speed=since(rows, onset, gain)))
    ratio = found.error(onset + 600, 600) / calm.error(onset + 600, 600)
    return found.reported_after(onset), ratio, sum(at <= onset for at in found.reports)


def _reports(job):
    kind, seed, *detector = job
    return len(Watched(plain(kind, seed), *detector).reports)


def _slow(job):
    what, seed = job
    n = ONSET + 6500
    change = {"speed": ramp(n, ONSET, 4000, 1.3)} if what == "ramp x1.3" else {"prefill_gain": since(n, ONSET, 2.0)}
    found = Watched(plain("iid", seed, n, **change))
    floor = found.error(ONSET - 2000, 2000)
    return found.error(ONSET + 6000, 500) / floor, found.error(ONSET + 6000, 500, "slow") / floor
