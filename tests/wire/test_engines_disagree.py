"""Two engines that a rule makes one configuration, one of them three times as slow: neither is taken for the other."""

from __future__ import annotations

import json
import logging
import time

import pytest

import tracefit
from tests.support.clocks import eventually
from tests.support.paced_engine import PacedEngine
from tests.support.sidecars import call_export, get, running_sidecar

SETTINGS = {
    "ALLOWED_LATENESS_S": "0.5",
    "IDLE_TIMEOUT_S": "1",
    "RULES": '[{"match": {}, "facts": {"model": "tiny", "gpu": "H100"}}]',
}


def send(sidecar, *engines, steps=800, factors):
    """Each engine in its turn, each for as long as its steps take."""
    for engine, factor in zip(engines, factors, strict=True):
        for payload in engine.exports(steps, factor):
            call_export(sidecar.grpc_port, payload)
        for other in engines:
            other.pause_until(engine.unix_ns)


def step_of(sidecar):
    """What is published of the steps of the only configuration that has learned any; empty before."""
    snapshot = sidecar.snapshot()
    configs = () if snapshot is None else snapshot.configs
    return next((each.targets["step_time"] for each in configs if "step_time" in each.targets), None)


def rows(sidecar):
    """Rows of steps that are published."""
    step = step_of(sidecar)
    return 0 if step is None else step.models["portable"].rows


def intercept_us(sidecar):
    """Of the published coefficients."""
    features = step_of(sidecar).models["portable"].features
    return next(each.coefficient for each in features if each.name == "intercept")


@pytest.fixture
def engines():
    """Two engines that are told apart by their names alone."""
    start_ns = time.time_ns() - 240_000_000_000
    return PacedEngine("honest", start_ns, 1), PacedEngine("slow", start_ns, 2)


def test_the_last_speaker_does_not_own_the_coefficients_and_the_disagreement_is_said(tmp_path, engines, caplog):
    caplog.set_level(logging.INFO)
    with running_sidecar(tmp_path, **SETTINGS) as sidecar:
        send(sidecar, *engines, factors=(1.0, 3.0))
        send(sidecar, *engines, factors=(1.0, 3.0))
        eventually(lambda: rows(sidecar) > 3000)
        assert intercept_us(sidecar) < (4000.0 + 3.0 * 4000.0) / 2.0  # nearer to the first speaker
        assert step_of(sidecar).drift.count == 0
    clause = "its engines disagree: engine slow takes 3.0 × as long as the others"
    with running_sidecar(tmp_path, **SETTINGS) as sidecar:  # a restart does not forget it
        send(sidecar, *engines, factors=(1.0, 3.0), steps=160)
        eventually(lambda: rows(sidecar) > 3300)
        config = tracefit.load(get(sidecar.http_port, "/snapshot")).config()
        assert (config.usable, config.reasons[0]) == (False, clause)
        assert json.loads(get(sidecar.http_port, "/readyz"))["not_usable"] == [f"tiny: {clause}"]
        odd = [f"tiny: {engine.text}" for engine in config.verdict.odd]
        assert json.loads(get(sidecar.http_port, "/readyz"))["speed_changed"] == odd
        assert clause in get(sidecar.http_port, "/").decode()
        assert config.verdict.odd[0].term == "all"
        page = get(sidecar.http_port, "/metrics").decode().splitlines()
        of_slow = (line for line in page if line.startswith("tracefit_replica_speed_ratio{"))
        [apart] = [line for line in of_slow if 'instance="slow"' in line]
        assert float(apart.rsplit(" ", 1)[1]) == pytest.approx(3.0, rel=0.1)
        assert step_of(sidecar).drift.count == 0
    assert f"tiny: not usable: {clause}" in caplog.text
    assert "tiny: engine 'slow' takes " in caplog.text


def test_a_change_of_all_engines_is_still_a_change_of_speed(tmp_path, engines):
    with running_sidecar(tmp_path, **SETTINGS) as sidecar:
        for _ in range(20):
            send(sidecar, *engines, steps=48, factors=(1.0, 1.05))
        for _ in range(20):
            send(sidecar, *engines, steps=48, factors=(1.5, 1.57))
        eventually(lambda: rows(sidecar) > 1800)
        eventually(lambda: step_of(sidecar).drift.count == 1)
        assert tracefit.load(get(sidecar.http_port, "/snapshot")).config().usable


def test_a_change_of_one_of_two_engines_is_not_one_of_both(tmp_path, engines):
    with running_sidecar(tmp_path, **SETTINGS) as sidecar:
        for _ in range(4):
            send(sidecar, *engines, steps=160, factors=(1.0, 1.0))
        for _ in range(4):
            send(sidecar, *engines, steps=160, factors=(1.0, 1.4))
        eventually(lambda: rows(sidecar) > 2300)
        assert step_of(sidecar).drift.count == 0
        clause = "its engines disagree: engine slow takes 1.4 × as long as the others"
        assert json.loads(get(sidecar.http_port, "/readyz"))["not_usable"] == [f"tiny: {clause}"]
