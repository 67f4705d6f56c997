"""What the fuzzers start from, and what they once found, is read without a crash; and a short run of each."""

import logging

import pytest

from collector.decode import Export, wire
from tests.fuzz.fuzz_parsers import PARSERS, fuzz
from tests.fuzz.parsers import CORPUS
from tests.support import otlp_bytes as otlp
from tests.support.pipelines import replayed, restarted
from tests.support.step_exports import make_export, put


@pytest.mark.parametrize("name", PARSERS)
def test_every_seed_and_every_crash_found_is_read(name, tmp_path):
    parser = PARSERS[name](tmp_path)
    for data in parser.corpus():
        parser.parse(data)


def test_every_kept_crash_belongs_to_a_parser():
    assert {path.name for path in CORPUS.iterdir()} <= PARSERS.keys()


@pytest.mark.parametrize("name", PARSERS)
def test_a_few_hundred_damaged_inputs_do_not_crash_it(name, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    tried, taken, _ = fuzz(name, tmp_path, seed=99, seconds=60, executions=200)
    assert tried == 200
    assert 0 < taken < 200


def test_a_large_export_with_a_field_without_a_number_is_no_otlp():
    """Fuzzing found this one: from 1 MiB on the fields inside of spans are counted, and this one was looked up."""
    span = otlp.step_span([], tail=b"\x02\x01\x00" + otlp.field(30, b" " * wire.LARGE_BYTES))
    assert wire.read_span_ends(otlp.export(("vllm.scheduler.step", [span]))) is wire.Outcome.UNDECODABLE


def test_a_fact_beyond_64_bits_in_an_export_does_not_stop_the_saving_of_the_state():
    export = make_export(40, steps_per_span=12)
    put(export.resource_spans[0].resource, {"vllm.max_num_seqs": "9" * 30, "vllm.block_size": "-" + "9" * 19})
    pipeline = replayed([Export(export.SerializeToString(), "peer", 40)])
    assert restarted(pipeline).learned_rows == pipeline.learned_rows > 0
