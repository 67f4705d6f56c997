"""Changes of speed: how soon they are reported, what is reported of machines that did not change, and the error after.

Constants of the test were chosen on the recordings and on the machines of tests/support/uneven_steps.py with seeds
below 200; here are seeds from 7000 on. Recordings come from ``--captures DIR``, else from those that are bundled.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from online.change import DETECTORS
from online.rows import RowBlock
from tests.support.paths import DATA
from tests.support.pipelines import new_pipeline, step_rows
from tests.support.uneven_steps import STEADY, plain, ramp, since, uneven
from tests.support.watched import NEVER, Watched

CALM = {"c1": "c1_mixed", "c5": "c5_offload", "c6": "c6_saturated", "c7": "c7_async_sim", "c10": "c10_long"}
CALM |= {"f1": "f1_fork_parity", "p1": "p1_engine_stats"}
GAINS = {1.38: 200, 1.15: 450, 0.8: 450}
"""New time per old time, and the rows within which it must be reported."""
SEEDS, FALSE_SEEDS, SLOW_SEEDS = range(7000, 7020), range(7000, 7025), range(7000, 7006)
ONSET = 8000
LENGTHS = {"": (SEEDS, ONSET, 14_000), ", blocks full-grown": (SEEDS[:8], 20_000, 22_000)}
"""Seeds, the row of the change, and rows; the second while blocks are as long as they become."""
DETECTOR_SEEDS, PREFILL_LIMIT = range(7000, 7010), 1500


def measure(board, pool, captures):
    """Recordings as they are and sped up or slowed down, uneven machines, steady ones, slow and partial changes."""
    _recordings(board, captures)
    for (length, (seeds, onset, n)), (gain, limit) in product(LENGTHS.items(), GAINS.items()):
        found = pool.map(_changed, [(gain, seed, onset, n) for seed in seeds])
        late, ratio, early = map(np.array, zip(*found, strict=True))
        rows, what = int(np.median(late)), f"uneven machines x{gain}{length}"
        in_time = f"median of {len(seeds)} ({sum(late <= limit)} in time)"
        board.line(f"{what}: reported, {in_time}", f"{rows} rows", f"<= {limit} rows", rows <= limit)
        board.at_most(f"{what}: error of rows 600-1200 / without the change, worst", ratio.max(), 1.5)
        board.line(f"{what}: reported before the change", early.sum(), "0", not early.any())
    for kind in STEADY:
        counts = list(pool.map(_reports, [(kind, seed) for seed in FALSE_SEEDS]))
        board.at_most(f"false reports per 1e6, {kind}", 1e6 * sum(counts) / (len(counts) * 20_000), 20)
    _beside(board, pool)
    for what in ("prefill x2", "ramp x1.3"):
        found = np.array(list(pool.map(_slow, [(what, seed) for seed in SLOW_SEEDS])))
        shaped, alone = found.max(axis=0)
        name = f"{what}: error after 6,000 rows / floor, worst of {len(SLOW_SEEDS)} (beta alone {alone:.2f})"
        board.at_most(name, shaped, 1.5)


def _beside(board, pool):
    """Each detector on the same medians: rows until it reports, and false reports."""
    for detector in DETECTORS[:3]:
        for gain in (1.38, 1.15):
            rows = sorted(pool.map(_delay, [(f"x{gain}", seed, detector) for seed in DETECTOR_SEEDS]))
            board.line(f"{detector}: uneven machines x{gain}, median of 10", f"{int(np.median(rows))} rows")
        rows = list(pool.map(_delay, [("prefill", seed, detector) for seed in SEEDS]))
        within = sum(each <= PREFILL_LIMIT for each in rows)
        good = within >= 16 if detector == DETECTORS[0] else None
        what = f"{detector}: prefill x2 reported within {PREFILL_LIMIT} rows"
        board.line(what, f"{within} of {len(SEEDS)}", "" if good is None else ">= 16", good)
        jobs = [(kind, seed, detector) for kind in STEADY for seed in DETECTOR_SEEDS]
        per_million = 1e6 * sum(pool.map(_reports, jobs)) / (len(jobs) * 20_000)
        board.line(f"{detector}: false reports per 1e6, all kinds", f"{per_million:.0f}")


def _delay(job):
    what, seed, detector = job
    n = ONSET + 2500
    gain = 2.0 if what == "prefill" else float(what[1:])
    change = since(n, ONSET, gain)
    rows = plain("iid", seed, n, prefill_gain=change) if what == "prefill" else uneven(seed, n, speed=change)
    return Watched(rows, detector).reported_after(ONSET)


def _recordings(board, captures):
    for short, name in CALM.items():
        path = (DATA if captures is None else captures) / name / "otlp.pb.gz"
        if not path.exists():
            board.skip(f"reports, {short} as it is", "--captures")
            continue
        _, rows = step_rows(new_pipeline(), [path])
        calm = Watched(rows)
        board.line(f"reports, {short} as it is", str(len(calm.reports)), "0", not calm.reports)
        if short != "c10":
            continue
        n = len(rows)
        for gain, limit in GAINS.items():
            found = Watched(_scaled(rows, since(n, n // 2, gain)))
            late = found.reported_after(n // 2)
            value = "never" if late == NEVER else f"{late} rows"
            board.line(f"c10 x{gain} from half time: reported", value, f"<= {limit} rows", late <= limit)
            ratio = found.error(n // 2 + 600, 600) / calm.error(n // 2 + 600, 600)
            board.at_most(f"c10 x{gain}: error of rows 600-1200 / without the change", ratio, 1.5)


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
