"""`tracefit doctor URL`: what comes, what is left out, what waits and what to change, of a sidecar and of a server."""

import gzip
import json
import re
import time
from itertools import islice

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.cli import main
from tests.support.clocks import eventually
from tests.support.page_server import PageServer
from tests.support.paths import DATA
from tests.support.recordings import payloads as recorded
from tests.support.sidecars import call_export, get, running_sidecar
from tests.support.step_exports import delimited
from tests.support.stock_requests import DIALECTS, as_told_by, kept, served_in
from tests.support.toy_spans import exports_of
from tests.tracefit.example_snapshot import tree

PAGE = gzip.decompress((DATA / "m1_pages" / "metrics.txt.gz").read_bytes())


def serving(page, status=200):
    """A server that has one page."""
    return PageServer(lambda path, _: (status, {}, page) if path == "/metrics" else (404, {}, b"nothing"))


def test_a_sidecar_that_hears_nothing_is_told_what_to_point_at_it(tmp_path, capsys):
    with running_sidecar(tmp_path) as sidecar:
        code, port = main(["doctor", f"127.0.0.1:{sidecar.http_port}"]), sidecar.grpc_port
        page = get(sidecar.http_port, "/").decode()
    printed = capsys.readouterr().out
    assert code == 1
    assert "good  running" in printed
    assert "poor  receiving" in printed
    assert f"--otlp-traces-endpoint http://127.0.0.1:{port}\n" in printed
    assert f"--otlp-traces-endpoint http://127.0.0.1:{port}<" in page


def test_what_comes_without_a_token_is_told_how_to_bring_one(tmp_path, capsys):
    (tokens := tmp_path / "tokens").write_text("0123456789abcdef\n")
    with running_sidecar(tmp_path, TOKEN_FILE=str(tokens), PAGES_TOKEN_FILE=str(tokens)) as sidecar:
        with pytest.raises(grpc.RpcError):
            call_export(sidecar.grpc_port, b"")
        main(["doctor", f"127.0.0.1:{sidecar.http_port}"])
    told = capsys.readouterr().out
    assert "poor  left out   1 calls were refused: 1 without a token that is accepted\n" in told
    assert 'OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20…"\n' in told
    assert "wants a token (token=…): give --token-file FILE\n" in told


def test_of_a_server_that_is_scraped_and_does_not_answer_the_address_is_named(tmp_path, capsys):
    gone = "http://127.0.0.1:9/metrics"
    with running_sidecar(tmp_path, SCRAPE=gone) as sidecar:
        address = f"127.0.0.1:{sidecar.http_port}"
        eventually(lambda: main(["doctor", address]) and "unreachable" in capsys.readouterr().out)
        assert main(["doctor", address]) == 1
        page = get(sidecar.http_port, "/").decode()
    assert f"Nothing has been learned yet of <code>{gone}</code>" in " ".join(page.split())
    (found,) = [line for line in capsys.readouterr().out.splitlines() if " receiving " in line]
    assert found.startswith("poor ")
    assert f"of {gone} could not be used: 1 unreachable" in found


def test_what_a_sidecar_left_out_and_what_waits_stand_in_the_diagnosis(tmp_path, capsys):
    payloads = [*islice(recorded("c1_mixed"), 40)]
    until = r"not learned yet: .* at \d\d:\d\d:\d\d UTC at the latest"
    missing = "Some steps do not arrive"
    wanted = (
        "good receiving",
        "fair left out .*sent twice",
        r"fair left out .* of \w+: ",
        "fair left out 778 events were dropped by the SDK",
        f"fair telemetry tiny .*: {missing}",
        f"fair pending .* of 1 sender, {until}",
    )

    def diagnosis():
        main(["doctor", f"http://127.0.0.1:{sidecar.http_port}/", "--json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
        return "\n".join(f"{each['grade']} {each['topic']} {each['text']}" for each in findings)

    with running_sidecar(tmp_path, IDLE_TIMEOUT_S="60") as sidecar:
        for payload in [*payloads, payloads[0]]:
            call_export(sidecar.grpc_port, payload)
        eventually(lambda: all(re.search(each, text) for text in [diagnosis()] for each in wanted))
        page = " ".join(get(sidecar.http_port, "/").decode().split())
        assert re.search(until, page)
        assert re.search(missing, page)


def test_request_spans_that_are_sampled_are_said_to_be_in_every_answer(tmp_path, capsys):
    spans = kept(as_told_by(DIALECTS["vLLM 0.33"], served_in(3)), 0.1)
    payloads = [export.payload for export in exports_of(spans, 50)]
    recording = tmp_path / "spans.pb"
    recording.write_bytes(delimited(*map(ExportTraceServiceRequest.FromString, payloads)))
    assert main(["replay", str(recording), "--snapshot", str(tmp_path / "snapshot.json")]) == 1
    assert "nothing was learned from" in (said := capsys.readouterr().err)
    assert "request spans are sampled at about" in said
    with running_sidecar(tmp_path, IDLE_TIMEOUT_S="1") as sidecar:
        for payload in payloads:
            call_export(sidecar.grpc_port, payload)
        url = f"http://127.0.0.1:{sidecar.http_port}"
        eventually(lambda: sidecar.snapshot() and sidecar.snapshot().configs[0].doubts)
        assert main(["doctor", url]) == 1
        printed, page = capsys.readouterr().out, get(sidecar.http_port, "/").decode()
        (config,) = sidecar.snapshot().configs
    assert config.config["trace_sampling"] == pytest.approx(0.1, rel=0.05)
    assert re.search(r"fair  hidden .*: a span of [\d.]+% of the requests", printed)
    assert "not usable; request spans are sampled at about" in printed
    assert "request spans are sampled at about" in page
    assert "trace_sampling" in page
    assert config.targets == {}


VERDICTS = """
{} usable
{"doubts": ["its engines disagree"]} not usable; its engines disagree
{"quarantined": "step_time: ValueError"} quarantined; configuration 0f3c5a9b77e1 is quarantined: step_ti
{"telemetry": "metrics"} means of many steps, from pages of counters | usable
{"last_heard_unix_nano": 1} since 1970-01-01 00:00 UTC | usable
{"replaced_by": "another"} UTC; its server sends another configuration now
"""
"""What is published of a configuration beside the rest, and what each line about it says."""


@pytest.mark.parametrize("line", VERDICTS.strip().splitlines())
def test_of_each_configuration_the_verdict_is_said_and_of_one_that_was_replaced_no_more_than_that(line, capsys):
    config, end = json.JSONDecoder().raw_decode(line)
    said = line[end + 1 :].split(" | ")
    snapshot, now = tree(), time.time_ns()
    snapshot["configs"][0] |= {"last_heard_unix_nano": now, **config}
    if "replaced_by" in config:
        snapshot["configs"][0]["targets"]["step_time"]["drift"] = {"last_unix_nano": now, "gain": 1.4, "count": 1}
    build = 'tracefit_build_info{version="\x1b[31m"} 1\n'
    pages = {"/metrics": build, "/readyz": "{}", "/snapshot": json.dumps(snapshot)}
    kind = {"Content-Type": "application/json"}
    with PageServer(lambda path, _: (200, kind, pages[path].encode())) as server:
        main(["doctor", server.url])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    lines = [line for line in printed.splitlines() if "(0f3c5a9b77e1)" in line]
    told = [line.partition("(0f3c5a9b77e1): ")[2] for line in lines if " telemetry " not in line]
    assert len(told) == len(said)
    assert all(words in line for words, line in zip(said, told, strict=True))


LESS = b"\n".join(line for line in PAGE.split(b"\n") if b"generation_tokens" not in line)


@pytest.mark.parametrize(("page", "code", "said"), [(PAGE, 0, "tracefit run --scrape http"), (LESS, 1, "generation_t")])
def test_a_server_is_told_the_one_command_that_it_needs_or_the_family_that_it_lacks(page, code, said, capsys):
    with serving(page) as server:
        assert main(["doctor", server.url]) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "status", "word"),
    [
        (b"", 404, "404"),
        (b"", 401, "wants a token: give --token-file FILE"),
        (b"up 1\n" * (14 << 20), 200, "larger than 64 MiB"),
        (b"up 1\n", 200, "neither a sidecar nor a server"),
        (b"tracefit_build_info{ 1\n", 200, "no page of metrics"),
        (b"tracefit_build_info 1\nup +Inf\n", 200, "no page of metrics"),
    ],
)
def test_what_is_neither_is_one_sentence(page, status, word, capsys):
    with serving(page, status) as server:
        assert main(["doctor", server.url]) == 1
    assert word in capsys.readouterr().err


def test_a_server_without_tls_is_told_by_what_tls_says(capsys):
    with serving(PAGE) as server:
        assert main(["doctor", server.url.replace("http:", "https:")]) == 1
    assert "[SSL: WRONG_VERSION_NUMBER]" in capsys.readouterr().err


def test_a_token_goes_to_the_address_alone_and_not_where_that_points_or_a_proxy_of_the_environment(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "token").write_text("a token of sixteen")
    with serving(PAGE) as other:
        elsewhere = {"Location": f"{other.url}/metrics"}
        monkeypatch.setenv("http_proxy", other.url)
        monkeypatch.setenv("no_proxy", "")
        with PageServer(lambda *_: (302, elsewhere, b"")) as server:
            assert main(["doctor", server.url, "--token-file", str(tmp_path / "token")]) == 1
        assert [headers["Authorization"] for _, headers in server.asked] == ["Bearer a"]
        assert not other.asked
    assert "answers with 302" in capsys.readouterr().err
