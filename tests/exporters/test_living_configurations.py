"""vLLM died and came back with another flag: everybody who asks is answered for the engine that is alive."""

import json
import re
import time

import pytest

import tracefit
from collector.cli import main
from collector.identity.resolver import IDENTITY
from exporters.what_if import Advisory, meant_config
from tests.support.pages import answer_to
from tests.support.pipelines import new_pipeline
from tests.support.toy_engine import MONO_NS, UNIX_NS, many_jobs, run_engine
from tests.support.toy_spans import exports_of, pieces
from tracefit.selection import Identity, names_of

PLAN = "/plan?prompt=300&output=100&itl=60ms"
PREDICT = "/predict?requests=4&context=2000"
QUESTIONS = ("--prompt", "300", "--output", "100", "--itl", "60ms")


def said(budget, *more):
    facts = {"model": "tiny", "tensor_parallel_size": "1", "max_num_batched_tokens": budget}
    return (*((f"vllm.{name}", value) for name, value in facts.items()), ("hw.gpu.name", "cpu"), *more)


@pytest.fixture(scope="module")
def restarted():
    return one_after_the_other(("was", "512", 0, []), ("is", "256", 60, []), minutes=120.0)


def asked(snapshot, target):
    return answer_to(target, snapshot, unix_nano=snapshot.created_unix_nano)


def who_answers(snapshot):
    """The configurations that questions over HTTP, the client and an export for BLIS are about."""
    answers = [asked(snapshot, target) for target in (PLAN, PREDICT)]
    assert {response.status for response in answers} == {200}
    chosen = tracefit.load(snapshot.to_json()).config().config_id, meant_config(snapshot, "").config_id
    return {json.loads(response.body)["config_id"] for response in answers} | {*chosen}


def minute(config):
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(config.last_heard_unix_nano // 10**9))


def test_after_a_restart_with_another_flag_all_answers_are_of_the_engine_that_is_alive(restarted, tmp_path, capsys):
    snapshot, by_budget = restarted
    alive = by_budget[256].config_id
    assert who_answers(snapshot) == {alive}
    (tmp_path / "snapshot.json").write_bytes(snapshot.to_json())
    main(["plan", str(tmp_path / "snapshot.json"), *QUESTIONS])
    assert f"config {alive}  tiny on cpu, TP 1, 256 batched tokens\n" in capsys.readouterr().out


POD = ("host.name", "pod-1")
GATEWAY = "ipv4:10.0.0.7:50002"


def one_after_the_other(*processes, minutes=1.0, peer=GATEWAY):
    """What a sidecar knows of processes that began one after the other: (instance, budget, minute, resource)."""
    pipeline = new_pipeline()
    for instance, budget, minute_of_start, resource in processes:
        start_ns = MONO_NS + int(minute_of_start * 60 * 10**9)
        run = run_engine(many_jobs(60), budget=int(budget), start_ns=start_ns)
        for one in exports_of(pieces(run, instance=instance, api=f"api-{instance}", facts=said(budget, *resource)), 5):
            pipeline.process([one._replace(peer=peer)])
    pipeline.flush()
    snapshot = pipeline.snapshot(UNIX_NS + int(minutes * 60 * 10**9), 1)
    return snapshot, {each.config["max_num_batched_tokens"]: each for each in snapshot.configs}


def usable_series(snapshot):
    advisory = Advisory()
    page = answer_to("/metrics", snapshot, advisory=advisory, unix_nano=snapshot.created_unix_nano)
    text = page.body.decode()
    return set(re.findall(r'^tracefit_usable{config="(\w+)"}', text, re.MULTILINE))


def test_a_minute_after_a_restart_in_its_pod_the_new_configuration_answers():
    snapshot, by_budget = one_after_the_other(("was", "512", 0, [POD]), ("is", "256", 2, [POD]))
    alive, dead = by_budget[256].config_id, by_budget[512].config_id
    assert by_budget[512].replaced_by == alive
    assert who_answers(snapshot) == {alive}
    assert ", silent since 20" in tracefit.load(snapshot.to_json()).config(dead).name
    assert usable_series(snapshot) == {alive}


@pytest.mark.parametrize(
    ("what", "was", "then", "peer", "answering"),
    [
        ("other pods", [POD], [("host.name", "pod-2")], GATEWAY, 2),
        ("other models", [POD, ("vllm.model", "another")], [POD], GATEWAY, 2),
        ("a gateway's address, and no host", [], [], GATEWAY, 2),
        ("a server beside the sidecar needs no host", [], [], "ipv4:127.0.0.1:50002", 1),
    ],
)
def test_a_server_that_may_be_another_one_replaces_nobody(what, was, then, peer, answering):
    snapshot, _ = one_after_the_other(("was", "512", 0, was), ("is", "256", 2, then), peer=peer)
    assert [each.replaced_by for each in snapshot.configs].count("") == answering, what
    assert asked(snapshot, PREDICT).status == (200 if answering == 1 else 400)
    assert len(usable_series(snapshot)) == answering


def test_the_dead_one_is_named_with_its_date_and_answers_when_it_is_meant(restarted, tmp_path, capsys):
    snapshot, by_budget = restarted
    dead = by_budget[512]
    client = tracefit.load(snapshot.to_json())
    for which in ("512 batched tokens", dead.config_id[:8]):
        assert client.config(which).config_id == dead.config_id
    name = f"tiny on cpu, TP 1, 512 batched tokens, silent since {minute(dead)}"
    assert client.config("512").name == name
    with pytest.raises(tracefit.NotFoundError, match=re.escape(f"({name})")):
        client.config("qwen")
    (tmp_path / "snapshot.json").write_bytes(snapshot.to_json())
    main(["show", str(tmp_path / "snapshot.json")])
    assert name in capsys.readouterr().out
    main(["plan", str(tmp_path / "snapshot.json"), "--which", "512", *QUESTIONS])
    assert f"its engines are silent: last heard of {minute(dead)}" in capsys.readouterr().err
    answer = json.loads(asked(snapshot, f"{PLAN}&config={dead.config_id}").body)
    assert answer["silent_since_unix_nano"] == dead.last_heard_unix_nano
    html = answer_to("/", snapshot).body.decode()
    assert html.count(f"512 batched tokens · silent since {minute(dead)}") == 2, "in the overview, and at its chapter"
    assert "256 batched tokens</td>" in html


def test_of_two_that_are_alive_one_must_be_named_and_their_names_say_what_differs():
    snapshot, by_budget = one_after_the_other(("was", "512", 0, []), ("is", "256", 1, []), minutes=120.0)
    response = asked(snapshot, PLAN)
    assert response.status == 400
    for budget in (256, 512):
        assert f"{by_budget[budget].config_id} (tiny on cpu, TP 1, {budget} batched tokens)" in response.body.decode()


def test_what_makes_a_configuration_tells_names_apart():
    for fact in IDENTITY:
        one, other = names_of([Identity("", {fact: value}) for value in "ab"])
        assert one != other, fact
