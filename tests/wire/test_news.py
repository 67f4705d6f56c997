"""A change of speed reaches people: one line in the log, a banner on the page, a line of `tracefit doctor`."""

import json
import logging
import re
import time
from contextlib import contextmanager

import pytest

from collector.cli import main
from collector.runtime import Clock
from tests.support.clocks import eventually
from tests.support.paced_engine import PacedEngine
from tests.support.sidecars import call_export, get, ready, running_sidecar


@pytest.fixture
def told(caplog):
    """The lines of news so far, with their levels."""
    caplog.set_level(logging.INFO)
    return lambda: [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "collector.service.publish"]


@contextmanager
def beside_an_engine(directory, began_s):
    """A sidecar, and an engine that began so long ago."""
    engine = PacedEngine("engine-0", time.time_ns() - began_s * 10**9, **{"vllm.model": "tiny"})
    with running_sidecar(directory, ALLOWED_LATENESS_S="1") as sidecar:
        yield engine, sidecar


def diagnosis(sidecar, capsys):
    """What `tracefit doctor` says, the page, and what readiness says."""
    main(["doctor", f"127.0.0.1:{sidecar.http_port}"])
    return capsys.readouterr().out, get(sidecar.http_port, "/").decode(), ready(sidecar)


def learned(sidecar):
    """Rows of the steps that are published."""
    configs = json.loads(get(sidecar.http_port, "/snapshot"))["configs"]
    return sum(c["targets"]["step_time"]["models"]["portable"]["rows"] for c in configs if c["targets"])


def send(sidecar, payloads):
    for payload in payloads:
        call_export(sidecar.grpc_port, payload)


def test_a_change_of_speed_is_told_once_in_the_log_on_the_page_and_by_doctor_also_after_a_restart(
    tmp_path, told, capsys
):
    with beside_an_engine(tmp_path, 60) as (engine, sidecar):
        send(sidecar, engine.exports(640))
        assert told() == []
        eventually(lambda: b'<span class="state ok">ready</span>' in get(sidecar.http_port, "/"))
        send(sidecar, engine.exports(640, 1.5))
        eventually(told)
        doctor, page, now = diagnosis(sidecar, capsys)
    [(level, line)] = told()
    assert now["news"] == [line]
    assert level == "WARNING"
    assert line.startswith("tiny: steps take 1.4")
    assert line.endswith(" UTC ± 1 min: no single term is sure")
    text = line.removeprefix("tiny: ")
    [found] = [each for each in doctor.splitlines() if " speed " in each]
    assert found.startswith("poor ")
    assert found.endswith(text)
    assert text in page[page.index('id="news"') :]
    assert '<span class="state fair">ready, 1 problem</span>' in page
    with running_sidecar(tmp_path, ALLOWED_LATENESS_S="1") as sidecar:
        eventually(lambda: b"tracefit_snapshot_configs 1" in get(sidecar.http_port, "/metrics"))
        assert "nothing since its start; what it knows was learned before" in diagnosis(sidecar, capsys)[0]
        send(sidecar, engine.exports(320, 1.5))
        eventually(lambda: learned(sidecar) > 1400)
        eventually(lambda: any("every term alike" in said for _, said in told())), "of the same change"
        before = len(told())
        send(sidecar, engine.exports(640, 3.0))
        eventually(lambda: len(told()) > before)


def test_a_change_of_prefill_alone_is_told_as_one_in_every_place_for_a_day(tmp_path, told, capsys, monkeypatch):
    with beside_an_engine(tmp_path, 120) as (engine, sidecar):
        send(sidecar, [*engine.exports(1280, prefill_us=50.0), *engine.exports(1280, prefill_us=150.0)])
        eventually(told)
        doctor, page, now = diagnosis(sidecar, capsys)
        monkeypatch.setattr(Clock, "unix_nano", lambda _: time.time_ns() + 2 * 86_400 * 10**9)
        assert "news" in now
        assert "news" not in ready(sidecar)
    [(level, line)] = told()
    assert level == "WARNING"
    words = r"tiny: (steps with prefill take [12]\.\d\d × as long since .* UTC ± 1 min: prefill, by its tokens).*"
    text = re.fullmatch(words, line)[1]
    assert [each for each in doctor.splitlines() if " speed " in each and text in each]
    assert text in page[page.index('id="news"') :]


def test_a_configuration_whose_learner_failed_is_named_by_readiness(tmp_path, monkeypatch):
    with beside_an_engine(tmp_path, 60) as (engine, sidecar):
        monkeypatch.setattr(sidecar.pipeline._bank, "learn", lambda *_: 1 / 0)
        send(sidecar, engine.exports(640))
        told = eventually(lambda: ready(sidecar).get("news"))
    assert told == ["tiny: quarantined, its learner failed"]
