"""Recorded pages in the bench: our forecast of the latency between tokens beside a line's and a Kalman filter's."""

import gzip
import json
import math

import msgspec

from collector.cli import main
from collector.evaluate.baselines import LINE, TRACEFIT, TimedReading, evaluate_pages, load_pages
from collector.evaluate.protocol import Report
from tests.collector.join.pages.test_scrape_windows import SimulatedEngine
from tests.support.page_server import RECORDED


def test_a_recording_of_pages_is_scored_beside_what_users_have_otherwise(tmp_path, capsys):
    out = tmp_path / "report.json"
    assert main(["lab", "evaluate", str(RECORDED), "--out", str(out)]) == 0
    report = msgspec.json.decode(out.read_bytes(), type=Report)
    (pages,) = report.pages
    errors = {score["model"]: score["mean"] for score in pages.scores}
    assert list(errors) == [TRACEFIT, LINE]
    assert errors[TRACEFIT] < 0.10
    assert errors[TRACEFIT] < errors[LINE]
    assert report.captures == []
    printed = capsys.readouterr().out
    assert "m1_pages  492 pages, learned from 209 rows, scored on 7 windows of 15 s" in printed
    assert "ITL = A k + B" in printed


def test_too_few_pages_are_a_failure_and_said(tmp_path, capsys):
    few = tmp_path / "few.jsonl"
    few.write_bytes(b"\n".join(gzip.decompress(RECORDED.read_bytes()).splitlines()[:12]))
    assert main(["lab", "evaluate", str(few)]) != 0
    assert "few  12 pages" in (out := capsys.readouterr().out)
    assert "nothing to score" in out


def test_servers_of_one_recording_are_scored_apart(tmp_path):
    both = tmp_path / "two.jsonl"
    entries = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).splitlines()[:6]]
    named = [{"url": f"http://{'ab'[number % 2]}", **entry} for number, entry in enumerate(entries)]
    both.write_text("".join(json.dumps(entry) + "\n" for entry in named))
    assert {name: len(each) for name, each in load_pages([both]).items()} == {"two http://a": 3, "two http://b": 3}


def readings_of(without=(), seconds=180):
    engine, readings = SimulatedEngine(seed=3), []
    for number in range(seconds):
        engine.run(1.0, (3, 8, 1, 5)[number // 10 % 4])
        at_ns = int(engine.now_us * 1e3)
        gone = dict.fromkeys(without, math.nan)
        readings.append(TimedReading(10**18 + at_ns, at_ns, engine.reading(**gone)))
    return readings


def test_where_the_step_is_linear_in_its_work_ours_is_nearly_exact():
    report = evaluate_pages("simulated", readings_of(), 0.6)
    errors = {score["model"]: score["mean"] for score in report.scores}
    assert errors[TRACEFIT] < 0.03
    assert errors[LINE] > 2 * errors[TRACEFIT]
