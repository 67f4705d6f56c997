"""What stands where Tempo or Jaeger would: a second OTLP receiver."""

from __future__ import annotations

from concurrent import futures

import grpc

from collector.ingest.forward import METHODS
from collector.telemetry import Signal


class Backend:
    """An OTLP/gRPC server that keeps what it gets; ``answer`` may abort a call, or say what the reply is."""

    def __init__(self, answer=lambda _context: None, port=0, credentials=None):
        self.got: list[tuple[str, bytes]] = []
        self._answer = answer
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        for signal, name in METHODS.items():
            service = name.split("/")[1]
            handler = grpc.unary_unary_rpc_method_handler(self._taker(signal))
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": handler}),))
        address = f"127.0.0.1:{port}"
        server = self._server
        self.port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        self._server.start()

    def _taker(self, signal):
        def take(payload, context):
            reply = self._answer(context)
            self.got.append((signal, payload))
            return reply or b""

        return take

    def traces(self):
        return [payload for signal, payload in self.got if signal is Signal.TRACES]

    def stop(self):
        self._server.stop(0).wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
