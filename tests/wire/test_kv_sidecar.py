"""The sidecar with KV endpoints: it starts and serves whatever they do, and what they say is on the page."""

from __future__ import annotations

import json
from base64 import b64decode

import pytest

from collector.config.load import ConfigError
from tests.support.clocks import eventually
from tests.support.kv_batches import payload, stored
from tests.support.recordings import kv_lines
from tests.support.recordings import payloads as exports
from tests.support.sidecars import call_export, metric, running_sidecar

zmq = pytest.importorskip("zmq")

NOBODY = "tcp://127.0.0.1:1"


@pytest.fixture
def publisher():
    with zmq.Context() as context, context.socket(zmq.XPUB) as pub:
        pub.setsockopt(zmq.LINGER, 0)
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        yield pub, f"tcp://127.0.0.1:{port}"


def test_what_publishers_say_garbage_included_is_on_the_page(tmp_path, publisher):
    pub, endpoint = publisher
    with running_sidecar(tmp_path, KV=f"{endpoint},{NOBODY}") as sidecar:
        assert pub.poll(10_000)
        pub.send_multipart([b"garbage"])
        transfer = ["TransferInitiated", 1, "r", "GPU", "CPU", 8, 7]
        for seq in (0, 1, 4):
            pub.send_multipart([b"", seq.to_bytes(8, "big"), payload(stored(2), transfer)])
        page = sidecar.http_port
        eventually(lambda: metric(page, 'tracefit_kv_batches_total{outcome="accepted"}') == 3)
        assert metric(page, 'tracefit_messages_total{feed="kv",outcome="accepted"}') == 3
        eventually(lambda: metric(page, 'tracefit_messages_total{feed="kv",outcome="undecodable"}') == 1)
        assert metric(page, "tracefit_kv_missing_messages_total") == 2
        assert metric(page, "tracefit_kv_unbound_publishers") == 1
        assert metric(page, 'tracefit_kv_events_total{outcome="accepted"}') == 6


def test_steps_learned_beside_live_kv_events_carry_their_blocks(tmp_path, publisher):
    """c5 again, live: its KV messages by ZMQ, its spans by gRPC; the publisher is the only engine's."""

    pub, endpoint = publisher
    with running_sidecar(tmp_path, KV=endpoint) as sidecar:
        page = sidecar.http_port
        assert pub.poll(10_000)
        for line in map(json.loads, kv_lines("c5_offload")):
            pub.send_multipart([b"", line["seq"].to_bytes(8, "big"), b64decode(line["payload_b64"])])
        eventually(lambda: metric(page, 'tracefit_kv_batches_total{outcome="accepted"}') == 520)
        assert metric(page, "tracefit_kv_unbound_publishers") == 1
        for export in exports("c5_offload"):
            call_export(sidecar.grpc_port, export)
        eventually(lambda: metric(page, "tracefit_kv_unbound_publishers") == 0)
        assert metric(page, "tracefit_kv_missing_messages_total") == 0


def test_an_address_nobody_can_use_ends_the_start_with_the_key_named(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"kv: tcp://no-port"),
        running_sidecar(tmp_path, KV="tcp://no-port"),
    ):
        pass
