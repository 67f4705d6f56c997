"""It can never hurt serving: errors stay inside, hooks come off, an unknown vLLM is left alone."""

import ast
import logging
import socket
import sys
import types

import pytest
import tracefit_vllm
from tracefit_vllm.tap import ERRORS_MAX

from tests.plugin.conftest import PLUGIN, kept_scheduler, scheduler_to
from tests.plugin.fakes import Request, Scheduler, drive
from tests.support.processes import free_port


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

    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):  # a sidecar that ran before leaves it at INFO
        scheduler, kept = kept_scheduler(wire, Changed)
        scheduler.add_request(Request("a", 20, 30))
        drive(scheduler, 40)
    assert len(scheduler.truth) == 40
    assert kept.lost == ERRORS_MAX
    assert kept.stopped == [0]  # without waiting on the engine's thread
    assert [record.getMessage() for record in caplog.records] == ["tracefit: off after 5 errors, the last in scheduled"]
    assert name in caplog.text


@pytest.mark.parametrize(("scheme", "hangs"), [("tcp", False), ("http", False), ("http", True)])
def test_an_endpoint_where_nobody_is_or_that_hangs_costs_the_engine_nothing(scheme, hangs, monkeypatch):
    """The hang is a socket that accepts and never answers; who publishes does not know who listens."""
    monkeypatch.setattr("tracefit_vllm.publisher.QUEUE_STEPS", 500)
    monkeypatch.setattr("tracefit_vllm.otlp.GIVE_UP_S", 0.1)  # its thread shall not log into a later test
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        scheduler = scheduler_to(f"{scheme}://127.0.0.1:{hanging.getsockname()[1] if hangs else free_port()}")
        for number in range(8):
            scheduler.add_request(Request(f"r{number}", 50, 2000))
        drive(scheduler, 2000)
        assert len(scheduler.truth) == 2000
        assert scheduler._tracefit.is_on
        assert (scheduler._tracefit.publisher.lost > 1000) or scheme == "tcp"
        scheduler.shutdown()
        assert scheduler.shut_down


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


def test_a_bad_setting_keeps_the_plugin_off_and_is_named(caplog):
    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
        scheduler = scheduler_to("ftp://x")
    assert "TRACEFITVLLM_ENDPOINT: expected tcp://host:port or http(s)://host:port, got 'ftp://x'" in caplog.text
    drive(scheduler, 3)
    assert len(scheduler.truth) == 3


def test_the_hook_watches_what_vllm_chooses_once_and_only_where_it_is_asked_for(monkeypatch, caplog):
    class SchedulerConfig:
        def get_scheduler_cls(self):
            return Scheduler

    def registered(config, asked):
        monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace())
        monkeypatch.setitem(sys.modules, "vllm.config", config)
        monkeypatch.setenv("TRACEFITVLLM_HOOK", asked)
        tracefit_vllm.register()
        return SchedulerConfig().get_scheduler_cls()

    config = types.SimpleNamespace(SchedulerConfig=SchedulerConfig)
    for asked in ("", "0"):
        assert registered(config, asked) is Scheduler
    for _ in range(2):
        watched = registered(config, "1")
        assert (watched.__name__, watched.__mro__.count(Scheduler), len(watched.__mro__)) == ("TracedScheduler", 1, 3)
    with caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"):
        registered(None, "1")
    assert "could not be installed" in caplog.text


def test_the_plugin_imports_nothing_of_tracefit_and_only_what_it_declares():
    allowed = {"grpc", "opentelemetry", "msgspec", "zmq", "vllm"} | set(sys.stdlib_module_names)
    for path in sorted((PLUGIN / "tracefit_vllm").glob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        imported += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        assert {name.partition(".")[0] for name in imported} <= allowed, path.name
