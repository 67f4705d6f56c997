"""What is received is passed on: same bytes, same order, nothing lost that is not counted, and nobody waits for it."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.app import check_config
from collector.config import ConfigError, load, load_or_degrade
from collector.ingest import forward
from collector.ingest.forward import METHODS, without_scopes
from collector.runtime import SystemClock
from collector.telemetry import ForwardOutcome, Signal, table
from tests.conftest import find_tool
from tests.support.clocks import eventually
from tests.support.otlp_backend import Backend
from tests.support.page_server import PageServer
from tests.support.sidecars import call_export, metric, running_sidecar
from tests.support.step_exports import make_export
from tests.wire.certificates import Authority

STEPS = make_export()
STEP_SCOPE = STEPS.resource_spans[0].scope_spans[0].scope.name
OTHERS = make_export()
OTHERS.resource_spans[0].scope_spans[0].scope.name = "app"
ONE = OTHERS.SerializeToString()


@pytest.fixture
def backend():
    made = Backend()
    yield made
    made.stop()


def forwarded(sidecar, outcome, signal="traces"):
    return metric(sidecar.http_port, f'tracefit_forward_exports_total{{outcome="{outcome}",signal="{signal}"}}')


def test_bytes_of_a_newer_protocol_are_not_touched(tmp_path, backend):
    mentions = make_export()
    mentions.resource_spans[0].scope_spans[0].scope.name = f"beside {STEP_SCOPE}"
    unknown = b"\xba\x3e\x03abc"
    sent = [ONE + unknown, unknown + mentions.SerializeToString(), ONE]
    with running_sidecar(tmp_path, FORWARD=f"grpc://127.0.0.1:{backend.port}") as sidecar:
        for payload in sent:
            call_export(sidecar.grpc_port, payload)
        eventually(lambda: forwarded(sidecar, "sent") == 3)
    assert backend.traces() == sent


def test_steps_may_stay_here_while_all_else_goes_on(tmp_path, backend):
    both = make_export()
    both.resource_spans[0].scope_spans.append(OTHERS.resource_spans[0].scope_spans[0])
    with running_sidecar(tmp_path, FORWARD=f"grpc://127.0.0.1:{backend.port}") as sidecar:
        call_export(sidecar.grpc_port, both.SerializeToString())
        call_export(sidecar.grpc_port, STEPS.SerializeToString())
        eventually(lambda: forwarded(sidecar, "left_out") == 1)
        assert forwarded(sidecar, "sent") == 1
    (payload,) = backend.traces()
    assert ExportTraceServiceRequest.FromString(payload) == OTHERS
    assert without_scopes(payload, frozenset({STEP_SCOPE})) == payload


def test_a_backend_that_comes_back_gets_what_was_held_and_nobody_waited(tmp_path, monkeypatch):
    monkeypatch.setattr(forward, "PAUSE_S", 0.05)
    gone = Backend()
    port = gone.port
    gone.stop()
    with running_sidecar(tmp_path, FORWARD=f"grpc://127.0.0.1:{port}") as sidecar:
        for _ in range(20):
            call_export(sidecar.grpc_port, ONE, timeout_s=1)
        assert forwarded(sidecar, "sent") == 0
        back = Backend(port=port)
        eventually(lambda: len(back.traces()) == 20)
        back.stop()


def test_what_has_no_room_is_dropped_and_counted_and_the_oldest_is_kept(tmp_path, monkeypatch):
    room = 3 * (len(ONE) + forward.WAITING_BYTES)
    monkeypatch.setattr(forward, "QUEUE_BYTES", room)
    monkeypatch.setattr(forward, "FLUSH_S", 0.0)
    with running_sidecar(tmp_path, FORWARD="grpc://127.0.0.1:1") as sidecar:
        for _ in range(10):
            call_export(sidecar.grpc_port, ONE)
        assert forwarded(sidecar, "dropped") == 7
        assert metric(sidecar.http_port, 'tracefit_size_bytes{of="forward"}') == room


def numbered(number, steps=10):
    """An export that is told from others by its name."""
    request = make_export(first_step=1 + steps * number, steps_per_span=steps)
    request.resource_spans[0].scope_spans[0].scope.name = f"app {number}"
    return request.SerializeToString()


def test_the_log_is_the_queue_of_a_backend_that_is_gone_also_over_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(forward, "PAUSE_S", 0.05)
    monkeypatch.setattr(forward, "FLUSH_S", 0.0)
    monkeypatch.setattr(forward, "QUEUE_BYTES", 16 << 10)  # four of them here, the others in the log
    gone = Backend()
    gone.stop()
    settings = {"FORWARD": f"grpc://127.0.0.1:{gone.port}", "DURABILITY": "log", "CHECKPOINT_INTERVAL_S": "0.1"}
    exports = [numbered(number) for number in range(60)]
    with running_sidecar(tmp_path, **settings) as sidecar:
        for payload in exports[:20]:
            call_export(sidecar.grpc_port, payload, timeout_s=1)
        assert metric(sidecar.http_port, 'tracefit_size_bytes{of="forward"}') <= 16 << 10
    assert sidecar.metrics.value(table.FORWARDED, Signal.TRACES, ForwardOutcome.DROPPED) == 0
    with running_sidecar(tmp_path, **settings) as sidecar:
        for payload in exports[20:40]:
            call_export(sidecar.grpc_port, payload, timeout_s=1)
        back = Backend(port=gone.port)
        eventually(lambda: forwarded(sidecar, "sent") == 40)
        for payload in exports[40:]:
            call_export(sidecar.grpc_port, payload, timeout_s=1)
        eventually(lambda: forwarded(sidecar, "sent") == 60)
    with running_sidecar(tmp_path, **settings) as sidecar:
        assert metric(sidecar.http_port, 'tracefit_size_bytes{of="forward"}') == 0
    back.stop()
    assert back.traces() == exports


def test_a_log_that_is_full_of_what_a_backend_does_not_take_makes_room_for_learning(tmp_path, monkeypatch):
    monkeypatch.setattr(forward, "PAUSE_S", 0.05)
    monkeypatch.setattr(forward, "QUEUE_BYTES", 256 << 10)
    gone = Backend()
    gone.stop()
    settings = {"FORWARD": f"grpc://127.0.0.1:{gone.port}", "DURABILITY": "log", "LOG_CAPACITY_MIB": "1"}
    exports = [numbered(number, 100) for number in range(32)]
    with running_sidecar(tmp_path, CHECKPOINT_INTERVAL_S="0.1", **settings) as sidecar:
        for payload in exports:
            call_export(sidecar.grpc_port, payload, timeout_s=10)
            eventually(lambda: sidecar.queue.in_flight_bytes < 32 << 10)
        assert sidecar.metrics.value(table.SPANS, "grpc", table.ACCEPTED) == len(exports)
        back = Backend(port=gone.port)
        eventually(lambda: metric(sidecar.http_port, 'tracefit_size_bytes{of="forward"}') == 0)
        back.stop()
        sent, lost = forwarded(sidecar, "sent"), forwarded(sidecar, "dropped")
        assert sent + lost == len(exports)
        assert lost > 0
        places = [exports.index(payload) for payload in back.traces()]
        assert places == sorted(set(places))
        assert len(places) == sent


def refusing(code):
    """A backend that takes nothing."""
    return Backend(lambda context: context.abort(code, "no"))


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    return [Authority(tmp_path_factory.mktemp(name), find_tool("openssl")) for name in ("ours", "strangers")]


def encrypted(authority):
    """A backend over TLS, with a certificate of this authority."""
    certificate, key = authority.pair("backend")
    return Backend(credentials=grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())]))


@pytest.mark.parametrize(
    ("target", "outcome"),
    [
        ("is not there", "dropped"),
        ("hangs", "dropped"),
        ("is always busy", "dropped"),
        ("refuses", "refused"),
        ("wants less", "refused"),
        ("has a certificate of a stranger", "dropped"),
        ("has one of ours", "sent"),
    ],
)
def test_whatever_a_target_does_nobody_waits_for_it_and_each_export_is_counted(
    tmp_path, monkeypatch, authorities, target, outcome
):
    for name, seconds in (("PAUSE_S", 0.05), ("CALL_S", 5.0 if outcome == "sent" else 0.2), ("GIVE_UP_S", 0.5)):
        monkeypatch.setattr(forward, name, 300.0 if (name, outcome) == ("GIVE_UP_S", "sent") else seconds)
    hang = threading.Event()
    make = {
        "is not there": Backend,
        "hangs": lambda: Backend(lambda _: hang.wait(60)),
        "is always busy": lambda: refusing(grpc.StatusCode.UNAVAILABLE),
        "refuses": lambda: refusing(grpc.StatusCode.INVALID_ARGUMENT),
        "wants less": lambda: refusing(grpc.StatusCode.RESOURCE_EXHAUSTED),
        "has a certificate of a stranger": lambda: encrypted(authorities[1]),
        "has one of ours": lambda: encrypted(authorities[0]),
    }
    backend = make[target]()
    if target == "is not there":
        backend.stop()
    scheme = "grpcs" if "certificate" in target or "ours" in target else "grpc"
    settings = {"FORWARD": f"{scheme}://127.0.0.1:{backend.port}", "CA_FILE": str(authorities[0].ca)}
    with running_sidecar(tmp_path, **settings) as sidecar:
        for _ in range(5):
            call_export(sidecar.grpc_port, ONE, timeout_s=5)
        eventually(lambda: forwarded(sidecar, outcome) == 5)
        assert metric(sidecar.http_port, 'tracefit_size_bytes{of="forward"}') == 0
    hang.set()
    backend.stop()


def test_what_is_left_at_the_end_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(forward, "FLUSH_S", 0.0)
    with running_sidecar(tmp_path, FORWARD="grpc://127.0.0.1:1") as sidecar:
        call_export(sidecar.grpc_port, ONE)
    assert sidecar.metrics.value(table.FORWARDED, Signal.TRACES, ForwardOutcome.DROPPED) == 1


def in_a_trailer(retry):
    return "google.rpc.retryinfo-bin", retry.SerializeToString()


def among_the_details(retry):
    """Where OTLP has it, and servers that are written in Go put it."""
    status = status_pb2.Status(code=8, message="busy", details=[any_pb2.Any()])
    status.details[0].Pack(retry)
    return "grpc-status-details-bin", status.SerializeToString()


def busy_once(trailer, seconds=0, nanos=50_000_000):
    """Answers the first call with when it wants to be asked again."""
    asked = []

    def answer(context):
        if not asked:
            asked.append(1)
            retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds, nanos=nanos))
            context.set_trailing_metadata((trailer(retry),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")

    return answer


@pytest.mark.parametrize("trailer", [in_a_trailer, among_the_details])
def test_a_backend_says_when_it_wants_to_be_asked_again(tmp_path, monkeypatch, trailer):
    monkeypatch.setattr(forward, "PAUSE_S", 60.0)  # nobody waits for that: the backend's own word counts

    backend = Backend(busy_once(trailer))
    with running_sidecar(tmp_path, FORWARD=f"grpc://127.0.0.1:{backend.port}") as sidecar:
        call_export(sidecar.grpc_port, ONE)
        eventually(lambda: len(backend.traces()) == 1)
    backend.stop()


def test_a_backend_that_wants_to_be_left_alone_for_an_hour_holds_nothing_longer_than_others(tmp_path, monkeypatch):
    monkeypatch.setattr(forward, "GIVE_UP_S", 0.3)
    backend = Backend(busy_once(among_the_details, seconds=3600))
    with running_sidecar(tmp_path, FORWARD=f"grpc://127.0.0.1:{backend.port}") as sidecar:
        call_export(sidecar.grpc_port, ONE)
        eventually(lambda: forwarded(sidecar, "dropped") == 1)
        call_export(sidecar.grpc_port, ONE)
        eventually(lambda: len(backend.traces()) == 1)
    backend.stop()


def test_metrics_and_logs_are_passed_on_and_without_a_backend_unimplemented(tmp_path, backend):
    def call(port, signal):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            return channel.unary_unary(METHODS[signal])(b"\x0a\x00", timeout=10, wait_for_ready=True)

    with running_sidecar(tmp_path / "on", FORWARD=f"grpc://127.0.0.1:{backend.port}") as sidecar:
        for signal in (Signal.METRICS, Signal.LOGS):
            call(sidecar.grpc_port, signal)
        eventually(lambda: [signal for signal, _ in backend.got] == [Signal.METRICS, Signal.LOGS])
        asked = urllib.request.Request(
            f"http://127.0.0.1:{sidecar.otlp_http_port}/v1/logs", b"{}", {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as unread:
            urllib.request.urlopen(asked, timeout=10)
        assert "JSON is read of traces only" in json.loads(unread.value.read())["message"]
    with running_sidecar(tmp_path / "off") as sidecar, pytest.raises(grpc.RpcError) as refused:
        call(sidecar.grpc_port, Signal.METRICS)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_http_goes_to_http_with_the_headers_of_a_file_and_comes_back_when_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setattr(forward, "PAUSE_S", 60.0)
    (tmp_path / "headers").write_text("X-Scope: tenant-1\n")
    with PageServer(lambda *_: ({1: 302, 2: 429}.get(len(server.asked), 200), {"Retry-After": "1"}, b"")) as server:
        settings = {"FORWARD": f"http://127.0.0.1:{server.port}", "FORWARD_HEADERS_FILE": str(tmp_path / "headers")}
        with running_sidecar(tmp_path / "dir", **settings) as sidecar:
            call_export(sidecar.grpc_port, ONE)
            eventually(lambda: forwarded(sidecar, "refused") == 1)  # a page of somebody's proxy is no backend
            call_export(sidecar.grpc_port, ONE)
            eventually(lambda: forwarded(sidecar, "sent") == 1)
    told = [(path, headers["X-Scope"], headers["Content-Type"]) for path, headers in server.asked]
    assert told == [("/v1/traces", "tenant-1", "application/x-protobuf")] * 3
    assert server.bodies == [ONE] * 3


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"FORWARD": "grpc://a:1", "FORWARD_HEADERS_FILE": "/nowhere"}, "forward_headers_file"),
        ({"FORWARD": "grpc://a:1", "FORWARD_HEADERS_FILE": __file__}, "forward_headers_file"),
        ({"FORWARD": "grpcs://a:1", "CA_FILE": "/nowhere"}, "ca_file"),
        ({"FORWARD": "https://a:1", "CA_FILE": __file__}, "ca_file"),
        ({"FORWARD": "tcp://a:1"}, "TRACEFIT_FORWARD"),
    ],
)
def test_what_cannot_be_used_ends_the_start_with_the_key_named(tmp_path, settings, key):
    with pytest.raises(ConfigError) as wrong, running_sidecar(tmp_path, **settings):
        pass
    assert wrong.value.key == key


@pytest.mark.parametrize(
    "settings",
    [
        {"LISTEN": "127.0.0.1:4317", "FORWARD": "grpc://localhost:4317"},
        {"LISTEN": "0.0.0.0:4317", "FORWARD": "grpc://127.0.0.1"},
        {"LISTEN": "127.0.0.1:4317", "FORWARD": "grpc://LocalHost:4317"},
        {"LISTEN": "0.0.0.0:4317", "FORWARD": "grpc://127.0.0.2:4317"},
        {"LISTEN": "[::]:4317", "FORWARD": f"grpc://{socket.gethostname()}:4317"},
        {"LISTEN": "127.0.0.1:4317", "FORWARD": "grpc://0.0.0.0:4317"},
        {"LISTEN_HTTP": "127.0.0.1:4318", "FORWARD": "http://127.0.0.1:4318/v1"},
    ],
)
def test_a_sidecar_never_sends_to_itself_by_whatever_name(tmp_path, settings):
    with pytest.raises(ConfigError, match=r"forward: .*itself receives"), running_sidecar(tmp_path, **settings):
        pass


def test_another_address_of_this_machine_is_somebody_else_and_so_is_a_name_that_nobody_knows():
    for target in ("127.0.0.2", "tempo.invalid"):
        check_config(load(None, {"TRACEFIT_FORWARD": f"grpc://{target}:4317"}), SystemClock())


@pytest.mark.parametrize("settings", [{}, {"FORWARD": "http://a", "FORWARD_HEADERS_FILE": "/nowhere"}])
def test_a_wrong_target_is_found_before_the_start_which_then_holds_the_defaults(settings):
    given = {"FORWARD": "grpc://localhost", "ON_ERROR": "degrade", **settings}
    environ = {f"TRACEFIT_{key}": value for key, value in given.items()}
    config, fallback = load_or_degrade(None, environ, None, lambda wanted: check_config(wanted, SystemClock()))
    assert config.forward == ""
    assert fallback.problem.startswith("forward")
