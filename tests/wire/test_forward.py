"""What is received is passed on: same bytes, same order, nothing lost that is not counted, and nobody waits for it."""

import socket
import threading
import urllib.request

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from collector.app import Sidecar
from collector.config import ConfigError, load
from collector.ingest import forward
from collector.ingest.forward import METHODS, without_scopes
from collector.runtime import Clock
from collector.telemetry import ForwardOutcome, Signal, table
from tests.conftest import find_tool
from tests.support.clocks import eventually
from tests.support.otlp_backend import Backend
from tests.support.page_server import PageServer
from tests.support.pipelines import value_of
from tests.support.processes import free_port
from tests.support.sidecars import call_export, metric, running_sidecar
from tests.support.step_exports import make_export
from tests.wire.certificates import Authority

STEPS = make_export()
STEP_SCOPE = STEPS.resource_spans[0].scope_spans[0].scope.name
OTHERS = make_export()
OTHERS.resource_spans[0].scope_spans[0].scope.name = "app"
ONE = OTHERS.SerializeToString()


def forwarding(directory, port, **settings):
    """A sidecar that passes on what it receives to a port here."""
    return running_sidecar(directory, **{"FORWARD": f"grpc://127.0.0.1:{port}"} | settings)


def forwarded(sidecar, outcome):
    return metric(sidecar.http_port, f'tracefit_forward_exports_total{{outcome="{outcome}",signal="traces"}}')


def held_bytes(sidecar):
    return metric(sidecar.http_port, 'tracefit_size_bytes{of="forward"}')


def send(sidecar, *payloads):
    for payload in payloads:
        call_export(sidecar.grpc_port, payload, timeout_s=10)


@pytest.fixture
def soon(monkeypatch):
    """Who does not answer is asked again soon, and nothing is waited for at the end."""
    monkeypatch.setattr(forward, "PAUSE_S", 0.05)
    monkeypatch.setattr(forward, "FLUSH_S", 0.0)


def test_steps_stay_here_and_of_all_else_no_byte_is_touched(tmp_path):
    mentions, both = make_export(), make_export()
    mentions.resource_spans[0].scope_spans[0].scope.name = f"beside {STEP_SCOPE}"
    both.resource_spans[0].scope_spans.append(OTHERS.resource_spans[0].scope_spans[0])
    newer = b"\xba\x3e\x03abc"
    whole = [ONE + newer, newer + mentions.SerializeToString(), ONE]
    with Backend() as backend, forwarding(tmp_path, backend.port) as sidecar:
        send(sidecar, *whole, STEPS.SerializeToString(), both.SerializeToString())
        eventually(lambda: forwarded(sidecar, "sent") == 4)
        assert forwarded(sidecar, "left_out") == 1
    *untouched, payload = backend.traces()
    assert untouched == whole
    assert ExportTraceServiceRequest.FromString(payload) == OTHERS
    assert without_scopes(payload, frozenset({STEP_SCOPE})) == payload


@pytest.mark.usefixtures("soon")
def test_what_has_no_room_is_dropped_the_oldest_is_kept_and_what_is_left_at_the_end_is_counted(tmp_path, monkeypatch):
    room = 3 * (len(ONE) + forward.WAITING_BYTES)
    monkeypatch.setattr(forward, "QUEUE_BYTES", room)
    with forwarding(tmp_path, 1) as sidecar:
        send(sidecar, *[ONE] * 10)
        assert forwarded(sidecar, "dropped") == 7
        assert held_bytes(sidecar) == room
    assert value_of(sidecar.metrics, table.FORWARDED, Signal.TRACES, ForwardOutcome.DROPPED) == 10


def numbered(number, steps=10):
    """An export that is told from others by its name."""
    request = make_export(first_step=1 + steps * number, steps_per_span=steps)
    request.resource_spans[0].scope_spans[0].scope.name = f"app {number}"
    return request.SerializeToString()


@pytest.mark.usefixtures("soon")
def test_a_backend_that_comes_back_gets_what_was_held_in_its_order_and_nobody_waited(tmp_path):
    exports, port = [numbered(number) for number in range(20)], free_port()
    with forwarding(tmp_path, port) as sidecar:
        send(sidecar, *exports)
        assert forwarded(sidecar, "sent") == 0
        with Backend(port=port) as back:
            eventually(lambda: back.traces() == exports)


@pytest.mark.usefixtures("soon")
def test_the_log_is_the_queue_of_a_backend_that_is_gone_also_over_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(forward, "QUEUE_BYTES", 16 << 10)  # four of them here, the others in the log
    port, settings = free_port(), {"DURABILITY": "log", "CHECKPOINT_INTERVAL_S": "0.1"}
    exports = [numbered(number) for number in range(60)]
    with forwarding(tmp_path, port, **settings) as sidecar:
        send(sidecar, *exports[:20])
        assert held_bytes(sidecar) <= 16 << 10
    assert value_of(sidecar.metrics, table.FORWARDED, Signal.TRACES, ForwardOutcome.DROPPED) == 0
    with forwarding(tmp_path, port, **settings) as sidecar:
        send(sidecar, *exports[20:40])
        back = Backend(port=port)
        eventually(lambda: forwarded(sidecar, "sent") == 40)
        send(sidecar, *exports[40:])
        eventually(lambda: forwarded(sidecar, "sent") == 60)
    with back, forwarding(tmp_path, port, **settings) as sidecar:
        assert held_bytes(sidecar) == 0
    assert back.traces() == exports


@pytest.mark.usefixtures("soon")
def test_a_log_that_is_full_of_what_a_backend_does_not_take_makes_room_for_learning(tmp_path, monkeypatch):
    monkeypatch.setattr(forward, "QUEUE_BYTES", 256 << 10)
    port, settings = free_port(), {"DURABILITY": "log", "LOG_CAPACITY_MIB": "1", "CHECKPOINT_INTERVAL_S": "0.1"}
    exports = [numbered(number, 100) for number in range(22)]
    with forwarding(tmp_path, port, **settings) as sidecar:
        for payload in exports:
            send(sidecar, payload)
            eventually(lambda: sidecar.queue.in_flight_bytes < 32 << 10)
            eventually(lambda: value_of(sidecar.metrics, table.SIZE_BYTES, "log") < 980_000), "one more fits"
        assert value_of(sidecar.metrics, table.SPANS, "grpc", table.ACCEPTED) == len(exports)
        with Backend(port=port) as back:
            eventually(lambda: held_bytes(sidecar) == 0)
        sent, lost = forwarded(sidecar, "sent"), forwarded(sidecar, "dropped")
    places = [exports.index(payload) for payload in back.traces()]
    assert places == sorted(set(places))
    assert (len(places), sent + lost) == (sent, len(exports))
    assert lost > 0


def refusing(code):
    """A backend that takes nothing."""
    return Backend(lambda context: context.abort(code, "no"))


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    return [Authority(tmp_path_factory.mktemp(name), find_tool("openssl")) for name in ("ours", "strangers")]


def encrypted(authority):
    """A backend over TLS, with a certificate of this authority."""
    certificate, key = (path.read_bytes() for path in authority.pair("backend"))
    return Backend(credentials=grpc.ssl_server_credentials([(key, certificate)]))


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
    scheme = "grpcs" if target.startswith("has") else "grpc"
    with make[target]() as backend:
        if target == "is not there":
            backend.stop()
        settings = {"FORWARD": f"{scheme}://127.0.0.1:{backend.port}", "CA_FILE": str(authorities[0].ca)}
        with running_sidecar(tmp_path, **settings) as sidecar:
            send(sidecar, *[ONE] * 5)
            eventually(lambda: forwarded(sidecar, outcome) == 5)
            assert held_bytes(sidecar) == 0
        hang.set()


def among_the_details(retry):
    """Where OTLP has it."""
    status = status_pb2.Status(code=8, message="busy", details=[any_pb2.Any()])
    status.details[0].Pack(retry)
    return "grpc-status-details-bin", status.SerializeToString()


@pytest.mark.parametrize(
    ("asked_for", "give_up_s", "outcome"),
    [
        pytest.param({"nanos": 50_000_000}, 300.0, "sent", id="soon"),
        pytest.param({"seconds": 3600}, 0.3, "dropped", id="in an hour"),
        pytest.param({"seconds": -5}, 300.0, "refused", id="before it was asked"),
    ],
)
def test_a_backend_says_when_it_wants_to_be_asked_again_and_holds_nothing_longer_than_others(
    tmp_path, monkeypatch, asked_for, give_up_s, outcome
):
    monkeypatch.setattr(forward, "PAUSE_S", 60.0)  # nobody waits for that: the backend's own word counts
    monkeypatch.setattr(forward, "GIVE_UP_S", give_up_s)
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(**asked_for))
    asked = []

    def busy_once(context):
        asked.append(1)
        if len(asked) == 1:
            context.set_trailing_metadata((among_the_details(retry),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")

    with Backend(busy_once) as backend, forwarding(tmp_path, backend.port) as sidecar:
        send(sidecar, ONE)
        eventually(lambda: forwarded(sidecar, outcome) == 1)
        send(sidecar, ONE)
        eventually(lambda: len(backend.traces()) == (2 if outcome == "sent" else 1))


def test_metrics_and_logs_are_passed_on_and_without_a_backend_unimplemented(tmp_path):
    def call(port, signal):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            return channel.unary_unary(METHODS[signal])(b"\x0a\x00", timeout=10, wait_for_ready=True)

    others = (Signal.METRICS, Signal.LOGS)
    with Backend() as backend, forwarding(tmp_path / "on", backend.port) as sidecar:
        for signal in others:
            call(sidecar.grpc_port, signal)
        eventually(lambda: [signal for signal, _ in backend.got] == [*others])
        asked = urllib.request.Request(
            f"http://127.0.0.1:{sidecar.otlp_http_port}/v1/logs",
            b"\x0a\x00",
            {"Content-Type": "application/x-protobuf"},
        )
        assert urllib.request.urlopen(asked, timeout=10).read() == b""
        eventually(lambda: len(backend.got) == 3)
        assert backend.got[2][0] is Signal.LOGS
    with running_sidecar(tmp_path / "off") as sidecar:
        for signal in others:
            with pytest.raises(grpc.RpcError) as refused:
                call(sidecar.grpc_port, signal)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_http_goes_to_http_with_the_headers_of_a_file_and_comes_back_when_it_is_asked_to_or_soon(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(forward, "PAUSE_S", 0.1)
    (tmp_path / "headers").write_text("X-Scope: tenant-1\n")
    answers = {1: (302, ""), 2: (503, "\u00b2"), 3: (429, "1")}  # the second hint makes no sense

    def answer(*_):
        status, retry_after = answers.get(len(server.asked), (200, ""))
        return status, {"Retry-After": retry_after}, b""

    with PageServer(answer) as server:
        settings = {"FORWARD": f"http://127.0.0.1:{server.port}", "FORWARD_HEADERS_FILE": str(tmp_path / "headers")}
        with running_sidecar(tmp_path / "dir", **settings) as sidecar:
            send(sidecar, ONE)
            eventually(lambda: forwarded(sidecar, "refused") == 1)  # a page of somebody's proxy is no backend
            send(sidecar, ONE)
            eventually(lambda: forwarded(sidecar, "sent") == 1)
    told = [(path, headers["X-Scope"], headers["Content-Type"]) for path, headers in server.asked]
    assert told == [("/v1/traces", "tenant-1", "application/x-protobuf")] * 4
    assert server.bodies == [ONE] * 4
    said = [line.rpartition(" ")[2] for line in caplog.messages if "not take" in line]
    assert said == ["302", "503"]


def test_what_a_backend_takes_in_part_is_refused_and_not_sent_again(tmp_path, caplog):
    reply = ExportTraceServiceResponse()
    reply.partial_success.rejected_spans, reply.partial_success.error_message = 1, "too old"
    with Backend(lambda _: reply.SerializeToString()) as backend, forwarding(tmp_path, backend.port) as sidecar:
        send(sidecar, ONE)
        eventually(lambda: forwarded(sidecar, "refused") == 1)
        assert len(backend.traces()) == 1
    assert "1 rejected, too old" in caplog.text
    reply.partial_success.error_message *= 5000
    pieces = [bytes([byte]) for byte in reply.SerializeToString()]
    with (
        PageServer(lambda *_: (200, {}, pieces)) as server,
        running_sidecar(tmp_path / "http", FORWARD=f"http://127.0.0.1:{server.port}") as sidecar,
    ):
        send(sidecar, ONE)
        eventually(lambda: forwarded(sidecar, "refused") + forwarded(sidecar, "sent") == 1)
        assert forwarded(sidecar, "refused") == 1


HERE, ANYWHERE, ITSELF = "127.0.0.1:4317", "0.0.0.0:4317", "forward: .*itself receives"


@pytest.mark.parametrize(
    ("forward", "settings", "problem"),
    [
        ("grpc://a:1", {"FORWARD_HEADERS_FILE": "/nowhere"}, "forward_headers_file: "),
        ("grpc://a:1", {"FORWARD_HEADERS_FILE": __file__}, "forward_headers_file: "),
        ("grpcs://a:1", {"CA_FILE": "/nowhere"}, "ca_file: "),
        ("https://a:1", {"CA_FILE": __file__}, "ca_file: "),
        ("tcp://a:1", {}, "TRACEFIT_FORWARD: "),
        ("grpc://localhost:4317", {"LISTEN": HERE}, ITSELF),
        ("grpc://LocalHost:4317", {"LISTEN": HERE}, ITSELF),
        (f"grpc://{ANYWHERE}", {"LISTEN": HERE}, ITSELF),
        ("grpc://127.0.0.1", {"LISTEN": ANYWHERE}, ITSELF),
        ("grpc://127.0.0.2:4317", {"LISTEN": ANYWHERE}, ITSELF),
        ("grpc://[::ffff:127.0.0.1]:4317", {"LISTEN": ANYWHERE}, ITSELF),
        (f"grpc://{socket.gethostname()}:4317", {"LISTEN": "[::]:4317"}, ITSELF),
        ("http://127.0.0.1:4318/v1", {"LISTEN_HTTP": "127.0.0.1:4318"}, ITSELF),
    ],
)
def test_a_target_that_cannot_be_used_or_is_the_sidecar_itself_ends_the_start_with_the_key_named(
    tmp_path, forward, settings, problem
):
    with pytest.raises(ConfigError, match=problem), running_sidecar(tmp_path, FORWARD=forward, **settings):
        pass


def test_another_address_of_this_machine_is_somebody_else_and_so_is_a_name_that_nobody_knows():
    for target in ("127.0.0.2", "tempo.invalid"):
        Sidecar(load(None, {"TRACEFIT_FORWARD": f"grpc://{target}:4317"}), Clock())
