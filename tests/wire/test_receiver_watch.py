"""Whoever of the process may be late is named in the runbook."""

from collector.app import Sidecar
from collector.runtime import running
from tests.support.clocks import FakeClock, eventually
from tests.support.paths import DOCS
from tests.support.sidecars import call_export, get, make_config
from tests.support.silent_calls import own_channel, silent_calls
from tests.support.step_exports import make_export

LATE_S = 61.0
"""Longer than anybody may go without a check-in."""


def test_the_runbook_names_everybody_who_may_be_late_and_silent_calls_make_nobody_late(tmp_path):
    clock = FakeClock()
    sidecar = Sidecar(make_config(tmp_path, PUBLISH_INTERVAL_S="0.5"), clock)
    with running(sidecar):
        with own_channel(sidecar.grpc_port) as channel, silent_calls(channel, 120):
            for number in range(3):
                assert call_export(sidecar.grpc_port, make_export(1 + 10 * number).SerializeToString()) == b""
                assert get(sidecar.http_port, "/healthz")
        clock.advance(10 * LATE_S)
        chapter = (DOCS / "runbooks.md").read_text(encoding="utf-8").split("## TracefitDown")[1].split("\n## ")[0]
        assert all(f"`{name}`" in chapter for name in sidecar.health.late())
        eventually(lambda: not sidecar.health.late())
