"""Who is this: the strongest source of a fact wins, equal identities share, a later fact renames."""

from __future__ import annotations

import json

import pytest

from collector.decode import decode, parts_by_emitter
from collector.identity.discovery import read_models
from collector.identity.knowledge import IDENTITY, EngineFacts, FactSource, Knowledge, config_id, resource_facts
from collector.telemetry import Counts, table
from collector.telemetry.reasons import JoinEvent
from tests.support.pipelines import coefficients, new_pipeline
from tests.support.toy_engine import MONO_NS, many_jobs, run_engine
from tests.support.toy_spans import STEP_SCOPE, Piece, export_of, exports_of, pieces, step_span


def test_identity_holds_only_what_identifies():
    facts = EngineFacts()
    facts.learn({"model": "m", "num_gpu_blocks": 100, "tensor_parallel_size": 2}, FactSource.RESOURCE)
    assert facts.identity("i", "") == {"model": "m", "tensor_parallel_size": 2}
    assert facts.known()["num_gpu_blocks"] == 100


def test_without_a_model_the_instance_is_part_of_the_identity():
    facts = EngineFacts()
    facts.learn({"gpu": "H100"}, FactSource.RESOURCE)
    assert facts.identity("one", "") != facts.identity("two", "")


def test_a_recording_is_a_source_of_its_own_unless_its_resource_names_a_model():
    facts = EngineFacts()
    facts.learn({"model": "m"}, FactSource.TELEMETRY)
    assert facts.identity("i", "a.pb.gz") != facts.identity("i", "b.pb.gz")
    facts.learn({"model": "m"}, FactSource.RESOURCE)
    assert facts.identity("i", "a.pb.gz") == facts.identity("i", "b.pb.gz") == {"model": "m"}


def test_only_known_knobs_of_a_resource_are_facts():
    found = resource_facts(
        {
            "vllm.max_num_seqs": "8",
            "hw.gpu.name": "H100",
            "vllm.version": "0.15.1",
            "vllm.secret": "x",
            "vllm.dtype": "",
        }
    )
    assert found == {"max_num_seqs": 8, "gpu": "H100", "vllm_version": "0.15.1"}
    assert resource_facts({f"vllm.{name}": "1" for name in IDENTITY}) == dict.fromkeys(IDENTITY, 1)


def test_a_fact_learned_later_renames_the_configuration_and_keeps_what_it_learned():
    run = run_engine(many_jobs(120))
    everything = pieces(run, facts=())
    late = pieces(run, facts=(("vllm.model", "better known"),))
    pipeline, half = new_pipeline(), len(everything) // 2
    for one in exports_of(everything[:half], 5):
        pipeline.process([one])
    before = pipeline.snapshot(0, 1).configs[0].config_id
    for one in exports_of(late[half:], 5):
        pipeline.process([one])
    pipeline.flush()
    (config,) = pipeline.snapshot(0, 1).configs
    assert config.config_id != before
    assert config.config["model"] == "better known"
    assert config.targets["step_time"].models["portable"].rows > 1000
    assert pipeline._bank.configs() == [config.config_id]
    assert next(v for k, v in coefficients(pipeline).items() if k[2] == "prefill_tokens") == pytest.approx(45, rel=1e-3)


def test_a_server_that_comes_back_with_other_flags_starts_anew_from_what_it_was():
    def said(seats):
        return (("vllm.model", "m"), ("vllm.max_num_seqs", seats))

    first, second = run_engine(many_jobs(120)), run_engine(many_jobs(8, seed=3), start_ns=MONO_NS + 3600 * 10**9)
    pipeline = new_pipeline()
    for one in exports_of(pieces(first, facts=said("64")), 5):
        pipeline.process([one])
    (old,) = pipeline.snapshot(0, 1).configs
    for one in exports_of(pieces(second, facts=said("128")), 5):
        pipeline.process([one])
    pipeline.flush()
    (new,) = pipeline.snapshot(0, 1).configs
    assert (old.config["max_num_seqs"], new.config["max_num_seqs"]) == (64, 128)
    assert pipeline._bank.configs() == [old.config_id, new.config_id]
    learned = {name: pipeline._bank.targets(name)["step_time"].models["portable"] for name in pipeline._bank.configs()}
    assert learned[old.config_id].rows > 1000 > learned[new.config_id].rows
    prefill = next(f for f in learned[new.config_id].features if f.name == "prefill_tokens")
    assert prefill.coefficient == pytest.approx(45, rel=0.02)
    assert pipeline._bank._priors[new.config_id]
    assert pipeline.take_counts()[table.JOIN_EVENTS, JoinEvent.ENGINE_RESTART] == 1


def test_a_fact_that_flaps_without_a_restart_keeps_one_state():
    run = run_engine(many_jobs(60))
    everything = [pieces(run, facts=(("vllm.model", "m"), ("vllm.max_num_seqs", seats))) for seats in ("64", "128")]
    pipeline = new_pipeline()
    for even, odd in zip(*(exports_of(half, 5) for half in everything), strict=True):
        pipeline.process([even])
        pipeline.process([odd])
    pipeline.flush()
    assert len(pipeline._bank.configs()) == 1


def test_an_adapter_asked_for_by_name_is_not_another_model():
    facts = EngineFacts()
    assert facts.learn({"model": "base"}, FactSource.TELEMETRY)
    assert not facts.learn({"model": "adapter-7"}, FactSource.TELEMETRY)
    assert facts.get("model") == "base"


@pytest.mark.parametrize(
    ("peer", "attributes", "instance"),
    [
        ("ipv4:10.0.0.9:4001", {"k8s.pod.uid": "7f3c"}, "7f3c"),
        ("ipv4:10.0.0.9:4001", {"k8s.pod.uid": "7f3c", "service.instance.id": "engine-0"}, "engine-0"),
        ("ipv4:127.0.0.1:4001", {"k8s.pod.uid": "7f3c"}, "7f3c ipv4:127.0.0.1:4001"),
        ("ipv4:127.0.0.1:4001", {"k8s.pod.uid": "8a4d"}, "8a4d ipv4:127.0.0.1:4001"),
        ("ipv4:10.0.0.9:4001", {}, "ipv4:10.0.0.9:4001"),
    ],
)
def test_behind_a_gateway_an_engine_is_its_pod_and_beside_us_its_own_connection(peer, attributes, instance):
    run = run_engine(many_jobs(2))
    sent = export_of([Piece("", STEP_SCOPE, step_span(run, 1, 3), tuple(attributes.items()))]).SerializeToString()
    (telemetry,) = decode(sent, peer, lambda *_: None, Counts())
    assert telemetry.instance == instance
    assert [part.instance for part in parts_by_emitter(sent, peer)] == [instance]


@pytest.mark.parametrize(
    ("service", "more", "role"),
    [
        ("llama-prefill", (), "prefill"),
        ("llama-decode", (), "decode"),
        ("llama-decode", (("vllm.role", "prefill"),), "prefill"),
        ("vllm", (), None),
    ],
)
def test_servers_that_prefill_and_servers_that_decode_are_two_configurations(service, more, role):
    run = run_engine(many_jobs(2))
    named = (("service.name", service), *more)
    (telemetry,) = decode(
        export_of([Piece("e", STEP_SCOPE, step_span(run, 1, 3), named)]).SerializeToString(),
        "",
        lambda *_: None,
        Counts(),
    )
    facts = EngineFacts()
    facts.learn(resource_facts(telemetry.facts), FactSource.RESOURCE)
    assert facts.identity("e", "").get("role") == role


def test_what_changes_the_time_of_a_step_makes_another_configuration():
    plain, *others = (
        {"model": "m"},
        {"pipeline_parallel_size": 2},
        {"speculative_decoding": True},
        {"enable_lora": True},
    )
    ids = set()
    for other in ({}, *others):
        facts = EngineFacts()
        facts.learn(plain | other, FactSource.RESOURCE)
        ids.add(config_id(facts.identity("i", "")))
    assert len(ids) == 4


def test_an_alias_says_which_model_is_behind_it_and_whether_adapters_are_served():
    cards = [{"id": "default", "root": "Qwen/Qwen3-30B-A3B", "max_model_len": 4096}, {"id": "sql", "parent": "default"}]
    told = read_models(json.dumps({"data": cards}).encode())
    assert told == {"model": "default", "model_root": "Qwen/Qwen3-30B-A3B", "enable_lora": True, "max_model_len": 4096}
    assert read_models(json.dumps({"data": [{"id": "m", "root": "m", "parent": None}]}).encode()) == {"model": "m"}
    knowledge, facts = Knowledge(), EngineFacts()
    knowledge.discovered("*", told)
    knowledge.apply(facts, {}, "e", "")
    assert facts.get("num_experts") == 128, "as the model's own name says"
