"""What the fuzzers start from, and what they once found, is read without a crash; and a short run of each."""

from __future__ import annotations

import logging

import pytest

from tests.fuzz.fuzz_parsers import PARSERS, fuzz


@pytest.mark.parametrize("name", PARSERS)
def test_every_seed_and_every_crash_found_is_read(name, tmp_path):
    parser = PARSERS[name](tmp_path)
    corpus = parser.corpus()
    assert corpus
    for data in corpus:
        parser.parse(data)


@pytest.mark.parametrize("name", PARSERS)
def test_a_few_hundred_damaged_inputs_do_not_crash_it(name, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    assert fuzz(name, tmp_path, seed=99, seconds=60, executions=200) >= 200
