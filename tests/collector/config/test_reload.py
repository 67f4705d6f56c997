"""A ConfigMap changes while the sidecar runs."""

from __future__ import annotations

import json

import pytest

from collector.app import ConfigSource, Sidecar
from collector.config.load import load
from collector.config.reload import RELOADABLE, Reload, differences
from collector.runtime.clock import SystemClock
from collector.telemetry.table import CONFIG_RELOADS
from tests.support.clocks import eventually
from tests.support.sidecars import call_export, get
from tests.support.step_exports import make_export

ENVIRON = {
    "TRACEFIT_RECEIVERS__GRPC__ENDPOINT": "127.0.0.1:0",
    "TRACEFIT_RECEIVERS__HTTP__ENDPOINT": "127.0.0.1:0",
    "TRACEFIT_EXPORTERS__HTTP__ENDPOINT": "127.0.0.1:0",
    "TRACEFIT_LEARNERS": "[rls]",
    "TRACEFIT_RELOAD_INTERVAL_S": "3600",
}


class Mount:
    """A ConfigMap volume: the file is a link into ..data, which is a link to a directory that is swapped as one."""

    def __init__(self, directory):
        self.directory = directory
        self.path = directory / "tracefit.yaml"
        self.versions = 0
        self.update("")
        self.path.symlink_to("..data/tracefit.yaml")

    def update(self, text):
        self.versions += 1
        version = self.directory / f"..version_{self.versions}"
        version.mkdir()
        (version / "tracefit.yaml").write_text(text)
        link = self.directory / "..data_tmp"
        link.symlink_to(version.name)
        link.replace(self.directory / "..data")


@pytest.fixture
def mount(tmp_path):
    (tmp_path / "mount").mkdir()
    return Mount(tmp_path / "mount")


@pytest.fixture
def sidecar(mount, tmp_path):
    def read():
        return load(mount.path, ENVIRON | {"TRACEFIT_SNAPSHOT__DIRECTORY": str(tmp_path / "snapshots")})

    sidecar = Sidecar(read(), SystemClock(), source=ConfigSource(mount.path, read))
    sidecar.start()
    yield sidecar
    sidecar.stop()


def counted(sidecar):
    return {outcome.value: sidecar.metrics.value(CONFIG_RELOADS, outcome) for outcome in Reload}


def ready(sidecar):
    return json.loads(get(sidecar.http_port, "/readyz"))


def test_what_can_be_swapped_is_swapped_and_counted(sidecar, mount):
    assert sidecar.watch.poll() is None
    mount.update("snapshot: {interval_s: 77, publish_interval_s: 0.05}\n")
    assert sidecar.watch.poll() is Reload.APPLIED
    assert sidecar.watch.poll() is None
    assert sidecar._writer._interval_s == 77
    assert sidecar._publisher._interval_ns == 50_000_000
    assert counted(sidecar) == {"applied": 1, "needs_restart": 0, "invalid": 0}
    assert "config_problem" not in ready(sidecar)


def test_new_rules_hold_for_telemetry_that_comes_afterwards(sidecar, mount):
    mount.update("configurations: {rules: [{facts: {model: renamed}}]}")
    assert sidecar.watch.poll() is Reload.APPLIED
    for first in range(1, 400, 100):
        call_export(sidecar.grpc_port, make_export(steps_per_span=100, first_step=first).SerializeToString())
    eventually(lambda: sidecar.queue.in_flight_bytes == 0)
    (config_id,) = sidecar.pipeline.joiner.config_ids()
    (engine,) = sidecar.pipeline.joiner.emitters_of(config_id)
    assert engine.facts.known()["model"] == "renamed"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("snapshot: {interval_s: 77", "tracefit.yaml"),
        ("snapshot: {interval_s: soon}", "snapshot.interval_s"),
        ("configurations: {rules: [{facts: {colour: red}}]}\nsnapshot: {interval_s: 77}", "facts.colour"),
    ],
)
def test_a_file_that_is_not_valid_changes_nothing_and_is_visible_until_it_is_mended(sidecar, mount, text, told):
    before = sidecar._writer._interval_s
    mount.update(text)
    assert sidecar.watch.poll() is Reload.INVALID
    assert sidecar.watch.poll() is None, "told once"
    assert sidecar._writer._interval_s == before
    assert told in ready(sidecar)["config_problem"]
    assert ready(sidecar)["ok"] is True, "the sidecar works as before"
    assert told in get(sidecar.http_port, "/").decode()
    mount.update("log_level: info\n")
    assert sidecar.watch.poll() is Reload.APPLIED
    assert "config_problem" not in ready(sidecar)
    assert counted(sidecar)["invalid"] == 1


def test_keys_that_need_a_restart_are_named_and_the_others_applied(sidecar, mount):
    mount.update("bank: {configs_max: 3}\nsnapshot: {interval_s: 77}\n")
    assert sidecar.watch.poll() is Reload.NEEDS_RESTART
    assert ready(sidecar)["config_problem"] == "needs a restart: bank.configs_max"
    assert sidecar._writer._interval_s == 77
    mount.update("snapshot: {interval_s: 77}\n")
    assert sidecar.watch.poll() is Reload.APPLIED
    assert "config_problem" not in ready(sidecar)


def test_a_file_that_vanishes_is_not_valid(sidecar, mount):
    mount.path.unlink()
    assert sidecar.watch.poll() is Reload.INVALID
    assert "cannot be read" in ready(sidecar)["config_problem"]


def test_every_reloadable_key_exists():
    from msgspec import to_builtins

    tree = to_builtins(load(None, {}))
    for key in RELOADABLE:
        level = tree
        for part in key.split("."):
            level = level[part] if isinstance(level, dict) else pytest.fail(key)


def test_differences_are_dotted_keys():
    old = load(None, {})
    assert differences(old, old) == []
    assert differences(old, load(None, {"TRACEFIT_QUEUE__WAIT_S": "1"})) == ["queue.wait_s"]
