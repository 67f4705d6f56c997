"""The plugin is a distribution of its own; here it is imported from its source tree."""

import os
import sys
from unittest import mock

import pytest

from tests.support.paths import ROOT

PLUGIN = ROOT / "deploy" / "vllm-plugin"
sys.path.insert(0, str(PLUGIN))


@pytest.fixture
def receiver():
    from tests.plugin.receiver import Receiver

    server = Receiver()
    yield server
    server.stop()


class Kept:
    """A publisher that keeps all it is offered."""

    def __init__(self):
        self.steps = []
        self.lost = 0
        self.stopped = []

    def enqueue(self, step):
        self.steps.append(step)

    def stop(self, wait_s=1.0):
        self.stopped.append(wait_s)


def scheduler_to(endpoint, base=None, **shape):
    """A fake scheduler that is watched and tells its steps to this endpoint."""
    from tracefit_vllm.tap import traced

    from tests.plugin.fakes import Scheduler

    with mock.patch.dict(os.environ, TRACEFITVLLM_ENDPOINT=endpoint):
        return traced(base or Scheduler)(**shape)


def kept_scheduler(wire, base=None, **shape):
    """The same, and what it would have published."""
    endpoint = {"fpm": "tcp://127.0.0.1:20380", "otlp": "http://127.0.0.1:4317"}[wire]
    scheduler = scheduler_to(endpoint, base, **shape)
    scheduler._tracefit.publisher = Kept()
    return scheduler, scheduler._tracefit.publisher
