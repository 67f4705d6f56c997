"""A small fleet: states of replicas with a known truth, and sidecars' pages that serve them."""

from __future__ import annotations

import hashlib

from collector.config import Config
from online import Bank, Target
from tests.support.linear_steps import BETA, steps
from tests.support.page_server import PageServer

CONFIG = Config(learners=("rls",), feature_sets=("portable",))
FACTS = {"model": "llama", "gpu": "H100", "tensor_parallel_size": 1}
NOW_NS = 1_800_000_000_000_000_000
"""After every state that is kept in tests/data."""


def replica_rows(seed, *, gain=1.0, rows=600, begin_ns=NOW_NS - 3_600_000_000_000, noise=0.03):
    return steps(rows, seed, noise=noise, beta=gain * BETA, start_ns=begin_ns).rows


def state_of(engine, seed, *, config_id="0f3c52aa9b1e", facts=FACTS, config=CONFIG, **kwargs):
    """The state of a sidecar whose one engine took these steps."""
    bank = Bank(config)
    bank.describe(config_id, facts)
    rows = replica_rows(seed, **kwargs)
    bank.learn(config_id, Target.STEP_TIME, rows, engines={int(rows.engine[0]): engine})
    return bank.state()


def state_server(states):
    """A server of ``/NAME`` by name: bytes, a status, or ``(status, headers, body)``; 304 where the ETag is known."""

    def answer(path, _elapsed_s):
        known = states.get(path.strip("/").split("?")[0], 404)
        if isinstance(known, tuple):
            return known
        if isinstance(known, int):
            return known, {}, b"no\n"
        tag = f'"{hashlib.sha256(known).hexdigest()}"'
        asked = server.asked[-1][1].get("If-None-Match")
        return (304, {"ETag": tag}, b"") if asked == tag else (200, {"ETag": tag}, known)

    server = PageServer(answer)
    return server
