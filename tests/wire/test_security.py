"""Tokens, TLS, mutual TLS and their rotation, on the real sidecar."""

import contextlib
import http.client
import shutil
import socket
import ssl
from pathlib import Path

import grpc
import pytest

from collector.config import ConfigError
from collector.ingest.otlp_http import CONTENT_TYPE
from collector.telemetry.table import ACCEPTED, REQUESTS, SPANS
from tests.conftest import find_tool
from tests.support.clocks import eventually
from tests.support.pipelines import value_of
from tests.support.sidecars import ask, code_of, get, post, running_sidecar
from tests.support.step_exports import make_export, put
from tests.wire.certificates import Authority

CODE = grpc.StatusCode
ONE = make_export().SerializeToString()
TOKEN, OTHER = "ingest-token-0123456789", "reader-token-0123456789"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"), find_tool("openssl"))


def grpc_code(port, **how):
    return code_of(port, ONE, wait=False, **how)


def http_status(port, *more, tls=None):
    status, _, answered = post(port, ONE, {"Content-Type": CONTENT_TYPE, **dict(more)}, tls=tls)
    assert (answered["WWW-Authenticate"] == "Bearer") == (status == 401)
    return status


def test_with_a_token_file_both_receivers_ask_for_the_token_and_read_nothing_before(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    with running_sidecar(tmp_path, TOKEN_FILE=str(tmp_path / "token")) as sidecar:
        good, bad = ((("authorization", f"Bearer {token}"),) for token in (TOKEN, OTHER))
        for metadata in ((), bad, bad + good):
            assert grpc_code(sidecar.grpc_port, metadata=metadata) is CODE.UNAUTHENTICATED
        for headers in ((), bad):
            assert http_status(sidecar.otlp_http_port, *headers) == 401
        assert not any(value_of(sidecar.metrics, SPANS, each, ACCEPTED) for each in ("grpc", "http"))
        assert value_of(sidecar.metrics, REQUESTS, "grpc", "unauthenticated") == 3
        assert grpc_code(sidecar.grpc_port, metadata=good) is CODE.OK
        assert http_status(sidecar.otlp_http_port, *good) == 200


def test_pages_ask_for_their_own_token_except_metrics_and_health(tmp_path):
    (tmp_path / "reader").write_text(OTHER)
    with running_sidecar(tmp_path, PAGES_TOKEN_FILE=str(tmp_path / "reader")) as sidecar:
        assert grpc_code(sidecar.grpc_port) is CODE.OK
        assert [ask(sidecar.http_port, path)[0] for path in ("/metrics", "/healthz", "/readyz")] == [200] * 3
        assert [ask(sidecar.http_port, path)[0] for path in ("/snapshot", "/")] == [401] * 2
        assert ask(sidecar.http_port, "/snapshot", Authorization=f"Bearer {TOKEN}")[0] == 401
        reader = {"Authorization": f"Bearer {OTHER}"}
        assert ask(sidecar.http_port, "/", **reader)[0] == 200
        eventually(lambda: ask(sidecar.http_port, "/snapshot", **reader)[0] in (200, 503))


def put_pair(directory, pair):
    directory.mkdir(exist_ok=True)
    for source, name in zip(pair, ("tls.crt", "tls.key"), strict=True):
        shutil.copy(source, directory / f"{name}.new")
        (directory / f"{name}.new").replace(directory / name)


def tls_settings(directory, **more):
    return {"TLS_CERT_FILE": str(directory / "tls.crt"), "TLS_KEY_FILE": str(directory / "tls.key"), **more}


def client_context(authority, pair=None):
    context = ssl.create_default_context(cafile=str(authority.ca))
    if pair:
        context.load_cert_chain(*pair)
    return context


def client_credentials(authority, pair=None):
    key, cert = (pair[1].read_bytes(), pair[0].read_bytes()) if pair else (None, None)
    return grpc.ssl_channel_credentials(authority.ca.read_bytes(), key, cert)


def test_tls_serves_those_who_speak_it_and_nobody_else(tmp_path, authority):
    put_pair(tmp_path / "tls", authority.pair("server"))
    with running_sidecar(tmp_path, **tls_settings(tmp_path / "tls")) as sidecar:
        assert grpc_code(sidecar.grpc_port, credentials=client_credentials(authority)) is CODE.OK
        assert http_status(sidecar.otlp_http_port, tls=client_context(authority)) == 200
        assert grpc_code(sidecar.grpc_port) is CODE.UNAVAILABLE
        with pytest.raises((http.client.HTTPException, OSError)):
            http_status(sidecar.otlp_http_port)
        descriptors = len([*Path("/proc/self/fd").iterdir()])
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(socket.create_connection(("127.0.0.1", sidecar.otlp_http_port)))
            assert http_status(sidecar.otlp_http_port, tls=client_context(authority)) == 200
            assert len([*Path("/proc/self/fd").iterdir()]) < descriptors + 200 + 80, (
                "who begins no handshake has a place"
            )


def test_mutual_tls_turns_away_a_client_without_a_certificate_of_the_right_authority(tmp_path, authority):
    put_pair(tmp_path / "tls", authority.pair("server"))
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", find_tool("openssl")).pair("stranger")
    settings = tls_settings(tmp_path / "tls", TLS_CLIENT_CA_FILE=str(authority.ca))
    with running_sidecar(tmp_path, **settings) as sidecar:
        client = authority.pair("client")
        assert grpc_code(sidecar.grpc_port, credentials=client_credentials(authority, client)) is CODE.OK
        assert http_status(sidecar.otlp_http_port, tls=client_context(authority, client)) == 200
        for pair in (None, stranger):
            assert grpc_code(sidecar.grpc_port, credentials=client_credentials(authority, pair)) is CODE.UNAVAILABLE
            with pytest.raises((http.client.HTTPException, OSError)):
                http_status(sidecar.otlp_http_port, tls=client_context(authority, pair))


def test_an_expired_certificate_is_replaced_while_running_and_a_broken_one_is_not_taken(
    tmp_path, authority, monkeypatch
):
    monkeypatch.setattr("collector.ingest.access.READ_EVERY_NS", 100_000_000)
    tls, mismatched = tmp_path / "tls", (authority.pair("a")[0], authority.pair("b")[1])
    for pair, problem in ((mismatched, "tls_cert_file"), (authority.pair("secret", passphrase="hello"), "passphrase")):
        put_pair(tls, pair)
        with pytest.raises(ConfigError, match=problem), running_sidecar(tmp_path, **tls_settings(tls)):
            pass
    put_pair(tls, authority.pair("a"))
    (tls / "tls.key").unlink()
    with pytest.raises(ConfigError, match=r"tls\.key: No such file"), running_sidecar(tmp_path, **tls_settings(tls)):
        pass
    put_pair(tls, authority.pair("expired", days=-1))
    with running_sidecar(tmp_path, **tls_settings(tls)) as sidecar:

        def codes():
            code = grpc_code(sidecar.grpc_port, credentials=client_credentials(authority))
            try:
                return code, http_status(sidecar.otlp_http_port, tls=client_context(authority))
            except ssl.SSLCertVerificationError as error:
                return code, error.verify_message

        assert codes() == (CODE.UNAVAILABLE, "certificate has expired")
        put_pair(tls, authority.pair("fresh"))
        eventually(lambda: codes() == (CODE.OK, 200))
        put_pair(tls, mismatched)
        eventually(lambda: codes() == (CODE.OK, 200))
        (tls / "tls.crt").write_text("not a certificate")
        assert codes() == (CODE.OK, 200)


def test_what_requests_say_is_nowhere_but_in_the_join_window(tmp_path, caplog):
    export = make_export()
    marker = "do-not-tell-anybody"
    scope = export.resource_spans[0].scope_spans.add()
    scope.scope.name = "vllm.scheduler"
    span = scope.spans.add(name="llm_core", span_id=b"12345678", trace_id=b"1" * 16)
    span.start_time_unix_nano = span.end_time_unix_nano = (
        export.resource_spans[0].scope_spans[0].spans[0].end_time_unix_nano
    )
    for node in (span, export.resource_spans[0].resource):
        put(node, {key: f"{marker}-{key}" for key in ("gen_ai.request.id", "gen_ai.prompt", "user.text")})
    event = span.events.add(name="journey.QUEUED", time_unix_nano=span.end_time_unix_nano)
    values = {"ts.monotonic_ns": 10**12, "scheduler.step": 1, "decode.done_tokens": 0, "prefill.total_tokens": 7}
    put(event, values | {"note": marker, marker: marker})
    with caplog.at_level("DEBUG"), running_sidecar(tmp_path) as sidecar:
        assert code_of(sidecar.grpc_port, export.SerializeToString()) is CODE.OK
        eventually(lambda: sidecar.queue.in_flight_bytes == 0)
        metrics = get(sidecar.http_port, "/metrics")
        sidecar.halt()
        files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        told = [metrics, caplog.text.encode(), *files]
    assert value_of(sidecar.metrics, SPANS, "grpc", ACCEPTED) == 2
    assert len(told) >= 3
    assert not any(marker.encode() in text for text in told)
