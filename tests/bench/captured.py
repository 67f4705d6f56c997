"""The learning core on the bundled recordings, through the collector's own decoding and join."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

import numpy as np
from google.protobuf.internal.encoder import _VarintBytes

from collector.commands.replay import replay
from collector.config.schema import Config
from collector.runtime.tasks import SystemClock
from online.bank import Bank
from online.features import portable
from online.rows import RowBlock, Target
from tests.bench.prequential import prequential
from tests.support.recordings import messages, otlp_file, received

NAMES = {"c1": "c1_mixed", "c4": "c4_abort_errors", "c5": "c5_offload", "c6": "c6_saturated", "c7": "c7_async_sim"}
NAMES["c10"] = "c10_long"
MAPE_LIMITS = {"c1": 6.0, "c5": 10.0}
TAIL = 0.6
NAMES_OF_PREDICTIONS = {"portable": "slow", "portable × shape": "shaped"}


def lines(line, pool, outside):
    """Gates, error before learning, drift and the compile step of each recording."""
    if outside.tools is None:
        yield line("gates of the recordings", "SKIPPED", "needs --tools", None)
    for found in pool.map(_measure, NAMES.items(), [outside] * len(NAMES)):
        yield from (line(*each) for each in found)


def _measure(item, outside):
    short, name = item
    found = []
    if outside.tools is not None:
        found = [_gate(short, name, gate, outside) for gate in ("holdout_100", "fit_100")]
    rows = recorded_rows(name)
    best, drift = _measured(rows)
    limit, value = MAPE_LIMITS.get(short), min(best.values())
    each = ", ".join(f"{k} {v:.1f}" for k, v in best.items())
    target, good = ("", None) if limit is None else (f"<= {limit}", value <= limit)
    found.append((f"MAPE % before learning, last 40 %, {short} ({each})", f"{value:.1f}", target, good))
    if short == "c10":
        found.append(("c10: drift reported or acted on", str(drift), "0", drift == 0))
    return found


def _gate(short, name, gate, outside):
    scorer = outside.score("score")
    limit = outside.thresholds()[name][gate]
    fraction = 1.0 if gate.startswith("fit") else scorer.K.cut_of(short)
    with tempfile.TemporaryDirectory() as directory:
        part, out = Path(directory) / f"{name}.pb.gz", Path(directory) / "snapshot.json"
        with gzip.open(part, "wb", compresslevel=1) as file:
            file.write(_bytes_until(name, fraction))
        replay([part], out, Config(learners=("rls",)), SystemClock(), say=_quiet, note=_quiet)
        snapshot = json.loads(out.read_text())
    result = scorer.score(snapshot, scorer.K.path_of(short), 0.0 if gate.startswith("fit") else None)
    mape, e2e = result["step"]["mape"], result["request"]["e2e_gate"]
    good = mape <= limit["mape"] and e2e <= limit["e2e"] and not result["negative_or_nonfinite"]
    return f"{short} {gate}: MAPE / E2E %", f"{mape:.1f} / {e2e:.1f}", f"<= {limit['mape']} / {limit['e2e']}", good


def _quiet(_text):
    pass


def _bytes_until(name, fraction):
    """Length-delimited exports received in the first part of the recording, by receive time."""
    path = otlp_file(name)
    stamps = [line["recv_unix_ns"] for line in received(path)]
    cut = min(stamps) + int(fraction * (max(stamps) - min(stamps)))
    pairs = zip(stamps, messages(path), strict=True)
    return b"".join(_VarintBytes(len(payload)) + payload for stamp, payload in pairs if stamp <= cut)


def recorded_rows(name):
    """Those of a whole recording."""
    return _rows(_bytes_until(name, 1.0))


def _rows(data):
    with tempfile.TemporaryDirectory() as directory:
        part = Path(directory) / "all.pb.gz"
        with gzip.open(part, "wb", compresslevel=1) as file:
            file.write(data)
        return step_rows([part])


def step_rows(files):
    """The published lane's step_time rows of recordings, as the collector hands them to the bank."""
    kept = []

    def learn(self, config_id, target, rows, engines=None):
        if target is Target.STEP_TIME and len(rows):
            kept.append(rows)
        return original(self, config_id, target, rows, engines)

    original, Bank.learn = Bank.learn, learn
    try:
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "snapshot.json"
            replay(files, out, Config(learners=("rls",)), SystemClock(), say=_quiet, note=_quiet)
    finally:
        Bank.learn = original
    return RowBlock.concatenate(kept)


def _measured(rows):
    run = prequential(rows, portable(Target.STEP_TIME), settings=Config(learners=("rls",)))
    tail = (np.arange(len(run.y)) >= TAIL * len(run.y)) & np.isfinite(run.slow)
    best = {name: 100 * run.ape(which)[tail].mean() for name, which in NAMES_OF_PREDICTIONS.items()}
    return best, run.model.drift.confirmed
