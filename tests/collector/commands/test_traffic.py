"""``tracefit export --format blis-trace``: one's own traffic as BLIS replays it."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import pytest
import yaml

from collector import cli
from exporters.blis import TracedRequest, render_trace
from tests.support.paths import DATA

SECOND_NS = 10**9


def table(data):
    return list(csv.DictReader(data.decode().splitlines()))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    def export(name):
        out = tmp_path_factory.mktemp(name) / "trace"
        code = cli.main(["export", str(DATA / name / "otlp.pb.gz"), "--format", "blis-trace", "--out", str(out)])
        return SimpleNamespace(code=code, out=out)

    return export


def test_every_request_of_a_recording_is_in_the_trace_once(exported, capsys):
    found = exported("c1_mixed")
    shown = capsys.readouterr()
    assert found.code == 0
    assert shown.out.split() == [
        "--trace-header",
        str(found.out / "trace.yaml"),
        "--trace-data",
        str(found.out / "trace.csv"),
    ]
    rows = table((found.out / "trace.csv").read_bytes())
    assert len(rows) == 156
    assert f"{len(rows)} requests" in shown.err
    arrivals = [int(row["arrival_time_us"]) for row in rows]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    for row in rows:
        assert int(row["output_tokens"]) > 0
        assert int(row["arrival_time_us"]) < int(row["first_chunk_time_us"]) <= int(row["last_chunk_time_us"])
    assert yaml.safe_load((found.out / "trace.yaml").read_bytes())["trace_version"] == 2


def test_a_request_given_up_has_a_deadline_and_the_others_none():
    whole = TracedRequest(5 * SECOND_NS, 100, 20, 6 * SECOND_NS, 8 * SECOND_NS, False)
    given_up = TracedRequest(4 * SECOND_NS, 50, 0, None, 7 * SECOND_NS, True)
    first, second = table(render_trace([whole, given_up])["trace.csv"])
    assert (first["deadline_us"], first["status"], first["first_chunk_time_us"]) == ("3000000", "timeout", "0")
    assert (second["deadline_us"], second["status"], second["arrival_time_us"]) == ("0", "ok", "1000000")
    assert list(first) == list(second)
    assert len(first) == 27


def test_without_requests_it_says_what_is_missing(tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"resourceSpans":[]}\n')
    assert cli.main(["export", str(empty), "--format", "blis-trace", "--out", str(tmp_path / "x")]) == 1
    assert "no finished request" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
