"""What the fuzzers start from, and what they once found, is read without a crash; and a short run of each."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest

from collector.config.errors import ConfigError
from collector.config.load import load
from collector.config.schema import Config
from collector.durable import read_image
from collector.identity.facts import EngineFacts, FactSource
from collector.receive import count as envelope
from collector.receive.export_request import Export
from collector.worker.build import make_pipeline
from online.blocks import Design
from online.rows import PHASES
from online.state import StateError, decode, encode, sealed
from tests.fuzz import targets
from tests.fuzz.fuzz_parsers import PARSERS, Seen, fuzz
from tests.fuzz.mutations import edited_tree, step_event
from tests.fuzz.parsers import CORPUS
from tests.support import otlp_bytes as otlp
from tests.support.decode_oracle import decode_in_columns
from tests.support.step_exports import attribute, make_export


@pytest.mark.parametrize("name", PARSERS)
def test_every_seed_and_every_crash_found_is_read(name, tmp_path):
    parser = PARSERS[name](tmp_path)
    corpus = parser.corpus()
    assert corpus
    for data in corpus:
        parser.parse(data)


def test_every_kept_crash_belongs_to_a_parser():
    assert {path.name for path in CORPUS.iterdir()} <= {parser.__name__.lower() for parser in PARSERS.values()}


@pytest.mark.parametrize("name", PARSERS)
def test_a_few_hundred_damaged_inputs_do_not_crash_it(name, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    tried = fuzz(name, tmp_path, seed=99, seconds=60, executions=200)
    assert tried.executions == 200
    assert 0 < tried.taken < 200


def test_an_input_is_counted_once():
    seen = Seen()
    assert [seen.add(data) for data in (b"a", b"b", b"a", b"")] == [True, True, False, True]


def test_a_run_is_repeated_by_its_seed(tmp_path):
    runs = [fuzz("kv", tmp_path, seed=seed, executions=300) for seed in (5, 5, 6)]
    counts = [(run.taken, run.repeated) for run in runs]
    assert counts[0] == counts[1] != counts[2]


def test_an_edited_tree_stays_plain_data_and_differs_mostly():
    rng = random.Random(1)
    trees = [repr(edited_tree(rng, {"a": [1, b"xy", {"c": None}], "d": 0.5})) for _ in range(200)]
    assert len(set(trees)) > 50


def test_a_large_export_with_a_field_without_a_number_is_no_otlp():
    """Fuzzing found this one: from 1 MiB on the fields inside of spans are counted, and this one was looked up."""
    span = otlp.step_span([], tail=b"\x02\x01\x00" + otlp.field(30, b" " * envelope.LARGE_BYTES))
    assert envelope.count_spans(otlp.export(("vllm.scheduler.step", [span]))) is envelope.Outcome.UNDECODABLE


@pytest.mark.parametrize("name", sorted(path.name for path in (CORPUS / "config").iterdir()))
def test_a_file_whose_tag_or_fact_lies_is_a_config_error(name):
    with pytest.raises(ConfigError):
        load(CORPUS / "config" / name, {})


def test_a_variable_whose_tag_lies_is_a_config_error():
    with pytest.raises(ConfigError, match="TRACEFIT_QUEUE__WAIT_S"):
        load(None, {"TRACEFIT_QUEUE__WAIT_S": "!!bool 2"})


@pytest.mark.parametrize(("value", "refused"), [(np.nan, False), (np.inf, True), (-np.inf, True)])
def test_a_waiting_row_may_not_know_a_feature_but_not_hold_an_infinite_one(value, refused):
    one, index = np.ones(1), np.zeros(1, np.int64)
    x, phase = np.array([[1.0, value]]), np.ones((1, len(PHASES)))
    file = encode({"rows": Design(x, phase, one, one, one, index, index, index)})
    if refused:
        with pytest.raises(StateError, match="x: not finite"):
            decode(file).load("rows", Design)
    else:
        assert len(decode(file).load("rows", Design)) == 1


def test_the_guided_comparison_takes_what_columns_take():
    events = [otlp.summary(1), otlp.summary(2)]
    assert targets.check_events(events, targets.GUIDES[:1]) == 2
    assert targets.check_export_alone(otlp.steps_export(events)) == 2
    assert targets.check_export_alone(otlp.steps_export(events)[:-1]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_guided_comparison_is_content_with_odd_events(seed):
    rng = random.Random(seed)
    targets.check_export_alone(otlp.steps_export([step_event(rng) for _ in range(3)]))


def test_the_guided_comparison_notices_one_wrong_number(monkeypatch):
    def decode(payloads, decoder):
        (read,), counts, spans = decode_in_columns(payloads, decoder)
        read[0].steps["waiting"][0] += 1
        return [read], counts, spans

    monkeypatch.setattr(targets, "decode_in_columns", decode)
    with pytest.raises(AssertionError):
        targets.check_export_alone(otlp.steps_export([otlp.summary(1)]))


@pytest.mark.parametrize("payload", [b"\xc0", b"\x80", b"\x81\xa7configs\x91\x80", b"\x81\xa7configs\x01"])
def test_a_state_of_an_earlier_version_that_is_none_is_refused(payload):
    body = b"\x82\xa7version\x01\xa5state" + payload
    with pytest.raises(StateError):
        decode(sealed(body)).graph("learners")


@pytest.mark.parametrize("text", ["9" * 30, "-" + "9" * 19, "1" * 128])
def test_a_fact_beyond_64_bits_in_an_export_does_not_stop_the_saving_of_the_state(text):
    export = make_export(40, steps_per_span=12)
    export.resource_spans[0].resource.attributes.append(attribute("vllm.max_num_seqs", text))
    pipeline = make_pipeline(Config(learners=("rls",)))
    pipeline.process([Export(export.SerializeToString(), "peer", "grpc", 40)])
    pipeline.flush()
    assert pipeline.learned_rows > 0
    again = make_pipeline(Config(learners=("rls",)))
    again.restore(read_image(sealed(pipeline.whole_state(1).body())))
    assert again.learned_rows == pipeline.learned_rows


@pytest.mark.parametrize("value", [1 << 63, -(1 << 70), float("nan"), float("inf"), 1e300])
def test_a_number_that_no_state_can_hold_is_no_fact(value):
    facts = EngineFacts()
    assert not facts.learn({"max_model_len": value}, FactSource.DISCOVERY)
    assert facts.get("max_model_len") is None
