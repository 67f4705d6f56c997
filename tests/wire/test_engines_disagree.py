"""Two engines that a rule makes one configuration, one of them three times as slow: neither is taken for the other."""

import json
import logging
import time

import pytest

import tracefit
from tests.support.clocks import eventually
from tests.support.paced_engine import PacedEngine
from tests.support.sidecars import call_export, get, running_sidecar

MODEL = {"vllm.model": "tiny"}


@pytest.fixture
def engines():
    """Two engines that are told apart by their names alone."""
    start_ns = time.time_ns() - 240_000_000_000
    return PacedEngine("honest", start_ns, 1, **MODEL), PacedEngine("slow", start_ns, 2, **MODEL)


def is_load_balanced(engines, factors, steps=800):
    """What each engine sends in its turn, each for as long as its steps take."""
    for engine, factor in zip(engines, factors, strict=True):
        yield from engine.exports(steps, factor)
        for other in engines:
            other.pause_until(engine.unix_ns)


def step_time(sidecar):
    """What is published of the steps of the only configuration that has learned any; None before."""
    snapshot = sidecar.snapshot()
    configs = () if snapshot is None else snapshot.configs
    return next((each.targets["step_time"] for each in configs if "step_time" in each.targets), None)


def learn(sidecar, payloads, rows):
    """Send them; what is published of the steps once so many rows are learned."""
    for payload in payloads:
        call_export(sidecar.grpc_port, payload)
    eventually(lambda: (step := step_time(sidecar)) and step.models["portable"].rows > rows)
    return step_time(sidecar)


def of_one_generation(sidecar, *paths):
    """What the pages say, and the snapshot, if no newer one came meanwhile."""
    snapshot, *pages = (get(sidecar.http_port, path) for path in ("/snapshot", *paths))
    return (snapshot, *pages) if get(sidecar.http_port, "/snapshot") == snapshot else None


def test_the_last_speaker_does_not_own_the_coefficients_and_the_disagreement_is_said(tmp_path, engines, caplog):
    caplog.set_level(logging.INFO)
    soon = {"ALLOWED_LATENESS_S": "0.2", "IDLE_TIMEOUT_S": "1"}
    with running_sidecar(tmp_path, **soon) as sidecar:
        payloads = [*is_load_balanced(engines, (1.0, 3.0)), *is_load_balanced(engines, (1.0, 3.0))]
        step = learn(sidecar, payloads, 3000)
        intercept = next(each for each in step.models["portable"].features if each.name == "intercept")
        assert intercept.coefficient < (4000.0 + 3.0 * 4000.0) / 2.0  # nearer to the first speaker
        assert step.drift.count == 0
    clause = "its engines disagree: engine slow takes 3.0 × as long as the others"
    with running_sidecar(tmp_path, **soon) as sidecar:  # a restart does not forget it
        assert learn(sidecar, is_load_balanced(engines, (1.0, 3.0), steps=160), 3300).drift.count == 0
        document, page, told, metrics = eventually(lambda: of_one_generation(sidecar, "/", "/readyz", "/metrics"))
    config = tracefit.load(document).config()
    assert (config.usable, config.reasons[0]) == (False, clause)
    assert config.verdict.outliers[0].term == "all"
    outliers = [f"tiny: {engine.text}" for engine in config.verdict.outliers]
    assert json.loads(told)["news"] == [f"tiny: not usable: {clause}", *outliers]
    assert clause in page.decode()
    of_slow = (line for line in metrics.decode().splitlines() if line.startswith("tracefit_replica_speed_ratio{"))
    [apart] = [line for line in of_slow if 'instance="slow"' in line]
    assert float(apart.rsplit(" ", 1)[1]) == pytest.approx(3.0, rel=0.1)
    assert f"tiny: not usable: {clause}" in caplog.text
    assert "tiny: engine 'slow' takes " in caplog.text
