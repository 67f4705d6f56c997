"""It can never hurt serving: errors stay inside, hooks come off, an unknown vLLM is left alone."""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import random
import sys
import types
from pathlib import Path

import pytest
import tracefit_vllm
import tracefit_vllm.install as install_module
from tracefit_vllm.install import MODULE, SchedulerFinder, install, patch
from tracefit_vllm.settings import Settings
from tracefit_vllm.tap import ERRORS_MAX, REQUIRED, Tap

from tests.plugin.conftest import PLUGIN
from tests.plugin.fakes import Publisher, Request, Scheduler, drive
from tests.plugin.test_batch import rows, tapped

HOOKED = ("schedule", "update_from_output", "shutdown", "add_request", "finish_requests")


class Poison:
    """Raises whatever is asked of it."""

    def __getattr__(self, name):
        raise ZeroDivisionError(name)


@pytest.mark.parametrize("where", ["_on_schedule", "_on_update", "_close_journeys"])
def test_errors_in_a_hook_do_not_reach_the_engine_and_take_the_hooks_off(sink, caplog, monkeypatch, where):
    scheduler = Scheduler()
    tap = tapped(scheduler, sink)
    monkeypatch.setattr(tap, where, lambda *_: 1 / 0)
    scheduler.add_request(Request("a", 20, 30))
    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
        drive(scheduler, 40)
    assert scheduler.finished[0].num_output_tokens == 30
    assert tap.errors == ERRORS_MAX
    assert sum("unhooked after 5 errors" in message for message in caplog.messages) == 1
    assert not [name for name in HOOKED if name in vars(scheduler)]
    assert sink.counts == ["hook_error"] * ERRORS_MAX
    assert sink.stopped == [0]  # without waiting on the engine's thread


def test_poisoned_requests_are_errors_of_ours_only(sink):
    scheduler = Scheduler()
    tap = tapped(scheduler, sink)
    for number in range(8):
        scheduler.add_request(Request(f"r{number}", 5, 2))
    for journey in tap._journeys.open.values():
        journey.request = Poison()
    drive(scheduler, 10)
    assert len(scheduler.finished) == 8
    assert tap.errors


def test_vllms_own_exceptions_pass_through_unchanged(sink):
    scheduler = Scheduler()
    scheduler.schedule = lambda *_: (_ for _ in ()).throw(RuntimeError("vLLM's"))
    tap = tapped(scheduler, sink)
    with pytest.raises(RuntimeError, match="vLLM's"):
        scheduler.schedule()
    assert tap.errors == 0


def test_arguments_and_results_are_vllms(sink):
    scheduler = Scheduler()
    tapped(scheduler, sink)
    scheduler.add_request(Request("a", 5, 2))
    output = scheduler.schedule(throttle_prefills=True)
    assert scheduler.update_from_output(output, "outputs") == {0: "outputs"}
    assert scheduler.update_from_output(scheduler_output=scheduler.schedule(), model_runner_output="x") == {0: "x"}
    assert len(rows(sink)) == 2


@pytest.mark.parametrize("path", REQUIRED)
def test_a_scheduler_without_a_needed_attribute_is_named_and_left_alone(sink, caplog, path):
    scheduler = Scheduler()
    owner_path, _, name = path.rpartition(".")
    owner = scheduler
    for part in owner_path.split(".") if owner_path else ():
        owner = getattr(owner, part)
    if name in vars(owner):
        delattr(owner, name)
    else:
        setattr(owner, name, None)
    before = dict(vars(scheduler))
    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
        assert not Tap(scheduler, Settings(), sink, random.Random(1)).attach()
    assert path in caplog.text
    assert vars(scheduler) == before


@pytest.mark.parametrize("name", ["num_scheduled_tokens", "scheduled_cached_reqs", "finished_req_ids"])
def test_a_scheduler_output_without_a_needed_attribute_is_named_and_the_hooks_come_off(sink, caplog, name):
    scheduler = Scheduler()
    original = scheduler.schedule

    def schedule(*args):
        output = original(*args)
        return types.SimpleNamespace(**{k: v for k, v in vars(output).items() if k != name})

    scheduler.schedule = schedule
    tapped(scheduler, sink)
    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
        scheduler.schedule()
    assert f"no {name}" in caplog.text
    assert "update_from_output" not in vars(scheduler)


def test_without_the_methods_of_journeys_steps_are_still_sent(sink, caplog):
    scheduler = Scheduler()
    scheduler.finish_requests = None
    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
        tapped(scheduler, sink)
    assert "steps only, this vLLM's scheduler has no finish_requests" in caplog.text
    drive(scheduler, 3)
    assert len(rows(sink)) == 3


def test_a_hook_that_something_else_wrapped_since_stays_as_a_pass_through(sink):
    scheduler = Scheduler()
    tap = tapped(scheduler, sink)
    ours = scheduler.schedule
    scheduler.schedule = functools.partial(ours)
    tap.detach()
    assert "schedule" in vars(scheduler)
    assert "update_from_output" not in vars(scheduler)
    drive(scheduler, 3)
    assert len(scheduler.truth) == 3
    assert not rows(sink)


def test_the_null_publisher_is_not_wrapped_and_a_real_one_is(sink):
    scheduler = Scheduler()
    tapped(scheduler, sink)
    assert "publish" not in vars(scheduler.kv_event_publisher)
    scheduler = Scheduler()
    scheduler.kv_event_publisher = Publisher()
    tapped(scheduler, sink)
    assert "publish" in vars(scheduler.kv_event_publisher)


def test_attach_to_anything_does_not_raise_through_the_patched_constructor(caplog, monkeypatch):
    monkeypatch.setattr(install_module, "LOG", logging.getLogger("vllm.plugins.tracefit"))
    module = types.ModuleType(MODULE)

    class Bare:
        def __init__(self, a, *, b=2):
            self.made = (a, b)

    module.Scheduler = Bare
    patch(module, Settings())
    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
        assert module.Scheduler(1, b=3).made == (1, 3)
    assert "has no schedule" in caplog.text
    first = module.Scheduler.__init__
    patch(module, Settings())
    assert module.Scheduler.__init__ is first  # once only


@pytest.fixture
def clean_finders():
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before


@pytest.mark.usefixtures("clean_finders")
def test_register_twice_leaves_one_finder_and_imports_nothing_heavy(monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    tracefit_vllm.register()
    tracefit_vllm.register()
    assert sum(isinstance(finder, SchedulerFinder) for finder in sys.meta_path) == 1
    assert MODULE not in sys.modules


@pytest.mark.usefixtures("clean_finders")
def test_a_bad_setting_keeps_the_plugin_off_and_is_named(monkeypatch, caplog):
    monkeypatch.setenv("TRACEFITVLLM_STEP_SAMPLE", "2")
    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
        install()
    assert "TRACEFITVLLM_STEP_SAMPLE: expected 0 to 1, got '2'" in caplog.text
    assert not any(isinstance(finder, SchedulerFinder) for finder in sys.meta_path)


@pytest.mark.usefixtures("clean_finders")
def test_switched_off_it_does_nothing(monkeypatch):
    monkeypatch.setenv("TRACEFITVLLM_ENABLED", "0")
    install()
    assert not any(isinstance(finder, SchedulerFinder) for finder in sys.meta_path)


@pytest.mark.usefixtures("clean_finders")
def test_whatever_goes_wrong_register_does_not_raise(monkeypatch, caplog):
    monkeypatch.setattr(install_module, "read_settings", lambda _: 1 / 0)
    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
        tracefit_vllm.register()
    assert "could not be installed" in caplog.text


def test_a_scheduler_that_is_shut_down_stops_the_exporter(sink):
    scheduler = Scheduler()
    tapped(scheduler, sink)
    scheduler.shutdown()
    assert scheduler.shut_down
    assert len(sink.stopped) == 1


def test_the_plugin_imports_nothing_of_tracefit_and_only_what_it_declares():
    allowed = {"grpc", "opentelemetry"} | set(sys.stdlib_module_names) | {"__future__"}
    for path in sorted((PLUGIN / "tracefit_vllm").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in names:
                assert name.partition(".")[0] in allowed, f"{path.name} imports {name}"


def test_grpc_and_protobuf_are_not_imported_before_the_exporters_thread():
    """The import costs 0.2 s; every one of vLLM's processes calls register()."""
    source = Path(importlib.util.find_spec("tracefit_vllm").origin).parent
    for name in ("__init__", "install", "settings", "tap", "exporter", "sender", "batch", "journeys", "facts"):
        tree = ast.parse((source / f"{name}.py").read_text())
        for node in tree.body:
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [m for m in modules if m.startswith(("grpc", "opentelemetry", "encode"))], name
