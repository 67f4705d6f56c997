"""A small fleet: states of replicas with a known truth, and sidecars' pages that serve them."""

from itertools import islice

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.commands.demo import Stamps, restamped
from online import Bank, Target
from tests.support.banks import PORTABLE as CONFIG
from tests.support.linear_steps import BETA, steps
from tests.support.otlp_bytes import varint
from tests.support.page_server import PageServer
from tests.support.recordings import payloads

FACTS = {"model": "llama", "gpu": "H100", "tensor_parallel_size": 1}
NOW_NS = 1_800_000_000_000_000_000
"""After every state that is kept in tests/data."""


def state_of(engine, seed, *, config_id="0f3c52aa9b1e", facts=FACTS, gain=1.0, rows=600, begin_ns=NOW_NS - 36 * 10**11):
    """The state of a sidecar whose one engine took these steps."""
    bank = Bank(CONFIG)
    bank.describe(config_id, facts)
    made = steps(rows, seed, noise=0.03, beta=gain * BETA, start_ns=begin_ns).rows
    bank.learn(config_id, Target.STEP_TIME, made, engines={int(made.engine[0]): engine})
    return bank.state()


def step_coefficients(state):
    """By configuration, of the portable model."""
    bank = Bank(CONFIG)
    bank.restore(state)
    models = {each: bank.targets(each)["step_time"].models["portable"] for each in bank.configs()}
    return {each: {f.name: f.coefficient for f in model.features} for each, model in models.items()}


def state_server(states):
    """A server of ``/NAME`` by name: bytes, a status, or ``(status, headers, body)``."""

    def answer(path, _elapsed_s):
        known = states.get(path.strip("/").split("?")[0], 404)
        if isinstance(known, tuple):
            return known
        if isinstance(known, int):
            return known, {}, b"no\n"
        return 200, {}, known

    return PageServer(answer)


def as_another_engine(payload, number):
    """Engines and API servers of their own, with spans and clocks of their own: no two are one."""
    shift = Stamps(unix_ns=number * 1_000_003, mono_ns=number * 1_000_000_000_000)
    request = ExportTraceServiceRequest.FromString(restamped(payload, shift))
    is_api = any(span.name == "llm_request" for r in request.resource_spans for s in r.scope_spans for span in s.spans)
    for resource in request.resource_spans:
        for attribute in resource.resource.attributes:
            if attribute.key == "service.instance.id":
                attribute.value.string_value = f"engine-{100 + number if is_api else number}"
        for scope in resource.scope_spans:
            for span in scope.spans:
                for name in ("span_id", "parent_span_id"):
                    old = getattr(span, name)
                    setattr(span, name, old[:-1] + bytes([old[-1] ^ number]) if old else old)
    return request.SerializeToString()


def record_two_minutes(directory, folder):
    """Two engines, their exports in the folders of two minutes; ``folder``: a name with a place for the minute."""
    exports = [*islice(payloads("c10_long"), 16)]
    for minute, part in enumerate((exports[:8], exports[8:])):
        path = directory / folder.format(minute=minute)
        path.mkdir(parents=True)
        own = [as_another_engine(export, number) for export in part for number in range(2)]
        (path / "traces_1.binpb").write_bytes(b"".join(varint(len(each)) + each for each in own))
