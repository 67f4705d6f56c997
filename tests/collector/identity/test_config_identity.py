"""Who is this: the strongest source of a fact wins, equal identities share, a later fact renames."""

import json

import pytest

from collector.decode import parts_by_emitter
from collector.identity.resolver import IDENTITY, ConfigResolver, EngineFacts, FactSource, config_id, resource_facts
from collector.ingest.discovery import read_models
from collector.telemetry import table
from collector.telemetry.reasons import JoinEvent
from tests.support.pipelines import new_pipeline
from tests.support.toy_engine import MONO_NS, many_jobs, run_engine
from tests.support.toy_spans import STEP_SCOPE, Piece, export_of, exports_of, pieces, step_span, telemetry_in


def facts_of(source=FactSource.RESOURCE, **told):
    facts = EngineFacts()
    facts.learn(told, source)
    return facts


def test_identity_holds_what_identifies_and_the_instance_where_nobody_names_the_model():
    facts = facts_of(model="m", num_gpu_blocks=100, tensor_parallel_size=2)
    assert facts.identity("i", "") == {"model": "m", "tensor_parallel_size": 2}
    assert facts.as_dict()["num_gpu_blocks"] == 100
    unnamed = facts_of(gpu="H100")
    assert unnamed.identity("one", "") != unnamed.identity("two", "")
    others = ({}, {"pipeline_parallel_size": 2}, {"speculative_decoding": True}, {"enable_lora": True})
    assert len({config_id(facts_of(model="m", **other).identity("i", "")) for other in others}) == 4


def test_a_recording_is_a_source_of_its_own_unless_its_resource_names_a_model():
    facts = facts_of(FactSource.TELEMETRY, model="m")
    assert facts.identity("i", "a.pb.gz") != facts.identity("i", "b.pb.gz")
    facts.learn({"model": "m"}, FactSource.RESOURCE)
    assert facts.identity("i", "a.pb.gz") == facts.identity("i", "b.pb.gz") == {"model": "m"}


def test_only_known_knobs_of_a_resource_are_facts():
    told = {"vllm.max_num_seqs": "8", "hw.gpu.name": "H100", "vllm.version": "0.15.1"}
    found = resource_facts(told | {"vllm.secret": "x", "vllm.dtype": ""})
    assert found == {"max_num_seqs": 8, "gpu": "H100", "vllm_version": "0.15.1"}
    assert resource_facts({f"vllm.{name}": "1" for name in IDENTITY}) == dict.fromkeys(IDENTITY, 1)


def said(run, **knobs):
    """What an engine sent, with these knobs as attributes of its resource."""
    return pieces(run, facts=tuple((f"vllm.{name}", value) for name, value in knobs.items()))


def learned(sent):
    """The pipeline after all that, and of each configuration what it is and its rows and price of prefill."""
    pipeline = new_pipeline()
    for one in exports_of(sent, 5):
        pipeline.process([one])
    pipeline.flush()
    found = {}
    for name in pipeline._bank.configs():
        model = pipeline._bank.targets(name)["step_time"].models["portable"]
        (prefill,) = (each.coefficient for each in model.features if each.name == "prefill_tokens")
        found[name] = dict(pipeline._bank.facts(name)), model.rows, prefill
    return pipeline, found


def test_a_fact_learned_later_renames_the_configuration_and_keeps_what_it_learned():
    run = run_engine(many_jobs(120))
    unnamed, named = said(run), said(run, model="better known")
    half = len(unnamed) // 2
    ((before, _),) = learned(unnamed[:half])[1].items()
    ((after, (facts, rows, prefill_us)),) = learned(unnamed[:half] + named[half:])[1].items()
    assert after != before
    assert (facts["model"], rows > 1000) == ("better known", True)
    assert prefill_us == pytest.approx(45, rel=1e-3)


def test_a_server_that_comes_back_with_other_flags_starts_anew_from_what_it_was():
    first, second = run_engine(many_jobs(120)), run_engine(many_jobs(8, seed=3), start_ns=MONO_NS + 3600 * 10**9)
    pipeline, found = learned(said(first, model="m", max_num_seqs="64") + said(second, model="m", max_num_seqs="128"))
    (old, old_rows, _), (new, new_rows, prefill_us) = found.values()
    assert (old["max_num_seqs"], new["max_num_seqs"]) == (64, 128)
    assert old_rows > 1000 > new_rows
    assert prefill_us == pytest.approx(45, rel=0.02)
    assert pipeline.take_counts()[table.JOIN_EVENTS, JoinEvent.ENGINE_RESTART] == 1


def sent_by(peer, **attributes):
    """What is read of a span of such a resource, and whose part of the export it is."""
    piece = Piece("", STEP_SCOPE, step_span(run_engine(many_jobs(2)), 1, 3), tuple(attributes.items()))
    payload = export_of([piece]).SerializeToString()
    (telemetry,) = telemetry_in(payload, peer=peer)
    (part,) = parts_by_emitter(payload, peer)
    return telemetry, part


@pytest.mark.parametrize(
    ("peer", "attributes", "instance"),
    [
        ("ipv4:10.0.0.9:4001", {"k8s.pod.uid": "7f3c"}, "7f3c"),
        ("ipv4:10.0.0.9:4001", {"k8s.pod.uid": "7f3c", "service.instance.id": "engine-0"}, "engine-0"),
        ("ipv4:127.0.0.1:4001", {"k8s.pod.uid": "7f3c"}, "7f3c ipv4:127.0.0.1:4001"),
        ("ipv4:10.0.0.9:4001", {}, "ipv4:10.0.0.9:4001"),
    ],
)
def test_behind_a_gateway_an_engine_is_its_pod_and_beside_us_its_own_connection(peer, attributes, instance):
    telemetry, part = sent_by(peer, **attributes)
    assert (telemetry.instance, part.instance) == (instance, instance)


@pytest.mark.parametrize(
    ("service", "more", "role"),
    [
        ("llama-prefill", {}, "prefill"),
        ("llama-decode", {}, "decode"),
        ("llama-decode", {"vllm.role": "prefill"}, "prefill"),
        ("vllm", {}, None),
    ],
)
def test_servers_that_prefill_and_servers_that_decode_are_two_configurations(service, more, role):
    telemetry, _ = sent_by("", **{"service.name": service}, **more)
    assert facts_of(**resource_facts(telemetry.facts)).identity("e", "").get("role") == role


def test_an_alias_says_which_model_is_behind_it_and_whether_adapters_are_served():
    cards = [{"id": "default", "root": "Qwen/Qwen3-30B-A3B", "max_model_len": 4096}, {"id": "sql", "parent": "default"}]
    told = read_models(json.dumps({"data": cards}).encode())
    assert told == {"model": "default", "model_root": "Qwen/Qwen3-30B-A3B", "enable_lora": True, "max_model_len": 4096}
    assert read_models(json.dumps({"data": [{"id": "m", "root": "m", "parent": None}]}).encode()) == {"model": "m"}
    resolver, facts = ConfigResolver(), EngineFacts()
    resolver.discovered("*", told)
    resolver.apply(facts, {}, "e", "")
    assert facts.get("num_experts") == 128, "as the model's own name says"
