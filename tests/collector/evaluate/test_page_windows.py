"""Recorded pages in the bench: our forecast of the latency between tokens beside a line's."""

import gzip
import json

import msgspec

from collector.cli import main
from collector.evaluate.baselines import LINE, TRACEFIT
from collector.evaluate.protocol import Report
from tests.support.page_server import RECORDED


def test_a_recording_of_pages_is_scored_beside_what_users_have_otherwise(tmp_path, capsys):
    out = tmp_path / "report.json"
    assert main(["lab", "evaluate", str(RECORDED), "--out", str(out)]) == 0
    report = msgspec.json.decode(out.read_bytes(), type=Report)
    (pages,) = report.pages
    errors = {score["model"]: score["mean"] for score in pages.scores}
    assert list(errors) == [TRACEFIT, LINE]
    assert errors[TRACEFIT] < 0.095 < errors[LINE]
    assert report.captures == []
    printed = capsys.readouterr().out
    assert "m1_pages  492 pages, learned from 209 rows, scored on 7 windows of 15 s" in printed
    assert "ITL = A k + B" in printed
    assert main(["lab", "evaluate", str(RECORDED), "--json"]) == 0
    assert capsys.readouterr().out.encode() == out.read_bytes() + b"\n"


def test_too_few_pages_are_a_failure_and_servers_of_one_recording_are_told_apart(tmp_path, capsys):
    few = tmp_path / "few.jsonl"
    entries = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).splitlines()[:12]]
    named = [{"url": f"http://{'abb'[number % 3]}", **entry} for number, entry in enumerate(entries)]
    few.write_text("".join(json.dumps(entry) + "\n" for entry in named))
    assert main(["lab", "evaluate", str(few)]) != 0
    printed = capsys.readouterr().out
    assert "few http://a  4 pages" in printed
    assert "few http://b  8 pages" in printed
    assert "nothing to score" in printed
