"""ForwardPassMetrics: a record for each forward pass over ZMQ, as other engines publish them.

    frames   topic (empty) | sequence, 8 bytes, big endian | msgpack map
    address  tcp://host:(port + data-parallel rank), bound here; whoever wants the records connects

``wall_time`` is host time, from output to output while the engine is busy, and ``timing_scope`` says so. A request
prefills as long as it computes tokens that were known before; whose last known token is all that is left to compute,
decodes. ``sum_decode_kv_tokens`` counts what the decoding requests had computed before the pass, and
``sum_prefill_kv_tokens`` what the others had, cached tokens among them. Left out are variances and the tokens of those
who wait: they would cost a walk over all requests. A record of zeros each second says that the engine is idle.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any, Final

from .publisher import Step
from .settings import Settings, data_parallel_rank

VERSION: Final = 1
HEARTBEAT_S: Final = 1.0
SEND_MESSAGES: Final = 20_000
"""Records that wait in ZMQ for a subscriber that is slow; without any, a record goes at once."""
SCHEDULED: Final = (
    *("num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens"),
    *("num_decode_requests", "sum_decode_kv_tokens"),
)
_IDLE: Final = (0.0, (0, 0, 0, 0, 0, 0))
"""Seconds; the numbers of ``SCHEDULED``, and how many wait."""


class ForwardPasses:
    """The records of one scheduler."""

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        rank = data_parallel_rank(scheduler) or 0
        host, _, port = settings.endpoint.rpartition(":")
        self.address = f"{host}:{int(port) + rank}"
        self._scheduler = scheduler
        worker = settings.resource.get("service.instance.id") or socket.gethostname()  # a pod is called like its host
        self._who = {"version": VERSION, "worker_id": worker, "dp_rank": rank, "timing_scope": "host"}
        self._computing: set[str] = set()
        """Requests that were scheduled and do not decode yet, or again."""
        self._number = 0
        self._lost = 0
        self._sent_s = 0.0

    # On the engine's thread.

    def batch(self, output: Any) -> tuple[int, ...]:
        """Sum up what was scheduled, right after ``schedule()``: the numbers of ``SCHEDULED``, and how many wait.

        A batch that only decodes costs a sum over a list that vLLM has made anyway.
        """
        scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        computed = sum(cached.num_computed_tokens)
        for new in output.scheduled_new_reqs:
            computed += new.num_computed_tokens
            self._computing.add(new.req_id)
        self._computing.update(cached.resumed_req_ids)
        requests = tokens = before = 0
        for key in [*self._computing]:
            request, now = self._scheduler.requests.get(key), scheduled.get(key)
            if request is None:
                self._computing.remove(key)
            elif now is not None:
                done = request.num_computed_tokens - now  # vLLM has counted this step already
                if done < max(request.num_prompt_tokens, request.num_tokens - 1):
                    requests, tokens, before = requests + 1, tokens + now, before + done
                else:
                    self._computing.remove(key)
        _, waiting = self._scheduler.get_request_counts()
        return requests, tokens, before, len(scheduled) - requests, computed - before, waiting

    # On the publisher's thread.

    def open(self) -> None:
        """Bind the socket. Both packages are vLLM's own."""
        import msgspec  # noqa: PLC0415
        import zmq  # noqa: PLC0415

        self._encode, self._more = msgspec.msgpack.Encoder().encode, zmq.SNDMORE
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, SEND_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(f"{self.address}: {error.strerror}") from None

    def send(self, steps: Sequence[Step], lost: int) -> bool:
        """Publish those that computed something; always True, for a publisher does not know who listens."""
        now_s = time.monotonic()
        self._number += lost - self._lost  # whoever counts the records sees how many there were
        self._lost = lost
        told = [((step.done_ns - step.since_ns) / 1e9, step.batch) for step in steps if step.batch[0] + step.batch[3]]
        for wall_s, (*scheduled, waiting) in told or ([_IDLE] if now_s > self._sent_s + HEARTBEAT_S else ()):
            record = {
                **self._who,
                "counter_id": self._number,
                "wall_time": wall_s,
                "scheduled_requests": dict(zip(SCHEDULED, scheduled, strict=True)),
                "queued_requests": {"num_prefill_requests": waiting},
            }
            self._socket.send(b"", self._more)  # a third of what send_multipart costs
            self._socket.send(self._number.to_bytes(8, "big"), self._more)
            self._socket.send(self._encode(record))
            self._number += 1
            self._sent_s = now_s
        return True

    def close(self) -> None:
        """Close the socket; what is on its way has half a second."""
        self._socket.close()
        self._context.term()
