"""It can never hurt serving: errors stay inside, hooks come off, an unknown vLLM is left alone."""

from __future__ import annotations

import ast
import logging
import sys
import types

import pytest
import tracefit_vllm
from tracefit_vllm.tap import ERRORS_MAX, traced

from tests.plugin.conftest import PLUGIN, kept_scheduler, scheduler_to
from tests.plugin.fakes import Request, Scheduler, drive
from tests.support.processes import output_of


@pytest.mark.parametrize("wire", ["fpm", "otlp"])
@pytest.mark.parametrize("name", ["num_scheduled_tokens", "scheduled_cached_reqs", "scheduled_new_reqs"])
def test_a_batch_of_an_unknown_shape_takes_the_hooks_off_after_five_errors_with_one_line(caplog, wire, name):
    class Changed(Scheduler):
        def schedule(self, *args):
            output = super().schedule(*args)
            return types.SimpleNamespace(**{key: value for key, value in vars(output).items() if key != name})

        def update_from_output(self, _output, model_output):
            for request in [*self.running]:
                request.outputs.append(7)
            return {0: model_output}

    scheduler, kept = kept_scheduler(wire, Changed)
    scheduler.add_request(Request("a", 20, 30))
    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
        drive(scheduler, 40)
    assert len(scheduler.truth) == 40
    assert kept.lost == {"hook_error": ERRORS_MAX}
    assert kept.stopped == [0]  # without waiting on the engine's thread
    assert [record.getMessage() for record in caplog.records] == ["tracefit: off after 5 errors, the last in scheduled"]
    assert name in caplog.text


@pytest.mark.parametrize("wire", ["fpm", "otlp"])
def test_a_scheduler_without_a_needed_method_serves_all_the_same(wire):
    class Changed(Scheduler):
        get_request_counts = None

        def _record_truth(self, *_):
            pass

    scheduler, kept = kept_scheduler(wire, Changed)
    for number in range(8):
        scheduler.add_request(Request(f"r{number}", 5, 2))
    drive(scheduler, 10)
    assert len(scheduler.finished) == 8
    assert kept.lost == {"hook_error": ERRORS_MAX}


def test_vllms_own_exceptions_arguments_and_results_pass_through_unchanged():
    class Failing(Scheduler):
        def schedule(self, throttle_prefills=False):
            if throttle_prefills:
                raise RuntimeError("vLLM's")
            return super().schedule()

    scheduler, kept = kept_scheduler("fpm", Failing)
    with pytest.raises(RuntimeError, match="vLLM's"):
        scheduler.schedule(throttle_prefills=True)
    output = scheduler.schedule()
    assert scheduler.update_from_output(scheduler_output=output, model_runner_output="x") == {0: "x"}
    assert not kept.lost


def test_a_class_is_watched_once_and_keeps_its_name():
    once = traced(Scheduler)
    assert traced(once) is once
    assert once.__name__ == "TracedScheduler"
    assert issubclass(once, Scheduler)


def test_a_bad_setting_keeps_the_plugin_off_and_is_named(caplog):
    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
        scheduler = scheduler_to("ftp://x")
    assert "TRACEFITVLLM_ENDPOINT: expected tcp://host:port or http(s)://host:port, got 'ftp://x'" in caplog.text
    drive(scheduler, 3)
    assert len(scheduler.truth) == 3


def test_the_hook_watches_what_vllm_chooses_only_where_it_is_asked_for(monkeypatch):
    class SchedulerConfig:
        def get_scheduler_cls(self):
            return Scheduler

    chosen = SchedulerConfig.get_scheduler_cls
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.config", types.SimpleNamespace(SchedulerConfig=SchedulerConfig))
    for off in ("", "0"):
        monkeypatch.setenv("TRACEFITVLLM_HOOK", off)
        tracefit_vllm.register()
        assert SchedulerConfig.get_scheduler_cls is chosen
    monkeypatch.setenv("TRACEFITVLLM_HOOK", "1")
    tracefit_vllm.register()
    tracefit_vllm.register()
    assert SchedulerConfig().get_scheduler_cls().__mro__.count(Scheduler) == 1
    assert SchedulerConfig().get_scheduler_cls().__name__ == "TracedScheduler"


def test_without_the_hook_vllms_processes_import_nothing_and_with_it_no_failure_reaches_them(monkeypatch, caplog):
    code = "import sys, tracefit_vllm; tracefit_vllm.register(); print(sorted(m for m in sys.modules if '.' not in m))"
    imported = ast.literal_eval(output_of(sys.executable, "-c", code, cwd=PLUGIN))
    assert not {"grpc", "zmq", "msgspec", "opentelemetry", "vllm"} & set(imported)
    monkeypatch.setenv("TRACEFITVLLM_HOOK", "1")
    monkeypatch.setitem(sys.modules, "vllm.config", None)
    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
        tracefit_vllm.register()
    assert "could not be installed" in caplog.text


def test_a_scheduler_that_is_shut_down_stops_the_publisher():
    scheduler, kept = kept_scheduler("fpm")
    scheduler.shutdown()
    assert scheduler.shut_down
    assert kept.stopped == [1.0]


def test_the_plugin_imports_nothing_of_tracefit_and_only_what_it_declares():
    allowed = {"grpc", "opentelemetry", "msgspec", "zmq", "vllm"} | set(sys.stdlib_module_names)
    for path in sorted((PLUGIN / "tracefit_vllm").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in names:
                assert name.partition(".")[0] in allowed, f"{path.name} imports {name}"
