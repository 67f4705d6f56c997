"""The plugin is a distribution of its own; here it is imported from its source tree."""

from __future__ import annotations

import sys

import pytest

from tests.support.paths import ROOT

PLUGIN = ROOT / "deploy" / "vllm-plugin"
sys.path.insert(0, str(PLUGIN))


@pytest.fixture
def receiver():
    from tests.plugin.receiver import Receiver

    server = Receiver()
    yield server
    server.close()


class ListSink:
    """A sink that keeps all it is offered."""

    def __init__(self):
        self.items = []
        self.counts = []
        self.stopped = []

    def offer(self, item):
        self.items.append(item)

    def count(self, reason):
        self.counts.append(reason)

    def stop(self, wait_s=1.0):
        self.stopped.append(wait_s)


@pytest.fixture
def sink():
    return ListSink()
