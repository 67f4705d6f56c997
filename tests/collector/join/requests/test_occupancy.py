"""Request spans alone: the decode batch at any time, and the rows it gives."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from collector.cli import main
from collector.config.schema import Config
from collector.join.emitter import Liveness
from collector.join.inferred.occupancy import ApiProcess
from collector.telemetry import table
from collector.telemetry.reasons import RowDrop
from online.rows import STEP_FEATURES, Quality, RowBlock, Target
from tests.support.pipelines import by_label, replayed, step_coefficients
from tests.support.toy_engine import UNIX_NS, many_jobs, run_engine
from tests.support.toy_spans import STOCK_SCOPE, Piece, exports_of, pieces, stock_of, stock_span

USUAL = {"prompt": 100, "outputs": 11, "ttft_s": 0.5, "decode_s": 1.0}
COLUMN = {name: index for index, name in enumerate(STEP_FEATURES)}


def told(*spans) -> ApiProcess:
    process = ApiProcess("api", "", 0, Config())
    for span in spans:
        process.add(span)
    return process


def at_end(process: ApiProcess) -> dict[Target, RowBlock]:
    process.liveness = Liveness.OVER
    return dict(process.advance())


def rows_of(*spans) -> dict[Target, RowBlock]:
    return at_end(told(*spans))


def column(block: RowBlock, name: str) -> np.ndarray:
    return block.raw[:, COLUMN[name]]


def closing() -> object:
    """A long request long after: with it, everything before is known to be over."""
    return stock_of("closing", 1000.0, prompt=1, outputs=2, ttft_s=0.1, decode_s=900.0)


def test_overlapping_requests_share_their_steps_and_their_weight():
    pair = [stock_of(n, 10.0, **USUAL | {"prompt": p}) for n, p in (("a", 100), ("b", 300))]
    block = rows_of(*pair, closing())[Target.STEP_TIME].slice(0, 2)
    assert column(block, "decode_requests").tolist() == [2.0] * 20
    np.testing.assert_allclose(column(block, "decode_context_tokens")[:10], 400 + 2 * np.arange(1, 11))
    np.testing.assert_allclose(block.weight, 0.5)


def test_a_prompt_is_the_prefill_of_the_step_in_which_its_first_token_falls():
    base = stock_of("a", 10.0, **USUAL)
    comer = stock_of("b", 10.3, prompt=77, outputs=3, ttft_s=0.45, decode_s=5.0)
    block = rows_of(base, comer, closing())[Target.STEP_TIME].slice(0, 1)
    assert (block.steps.tolist(), block.end_ns[0]) == ([10], UNIX_NS + int(11.5e9))
    assert block.elapsed_us[0] == pytest.approx(1e6)
    assert column(block, "prefill_tokens").tolist() == [0, 0, 77, 0, 0, 0, 0, 0, 0, 0]
    assert column(block, "prefill_requests").sum() == 1
    assert column(block, "decode_requests").tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    assert np.isnan(column(block, "prefill_attention")).all()


def test_at_the_end_requests_that_a_running_one_could_overlap_give_no_row():
    process = told(*(stock_of(f"r{n}", n, prompt=9, outputs=5, ttft_s=0.5, decode_s=2.0) for n in range(10)))
    assert len(at_end(process)[Target.STEP_TIME]) == 8
    assert process.counts[table.DROPPED_ROWS, RowDrop.INCOMPLETE] == 2


def test_a_span_without_an_answer_is_incomplete():
    process = told(msgspec.structs.replace(stock_of("a", 10.0, **USUAL), output_tokens=0))
    assert process.waiting.requests == 0
    assert by_label(process.counts, table.DROPPED_ROWS) == {RowDrop.INCOMPLETE: 1}


def test_queue_wait_comes_from_the_span_and_api_queueing_from_idle_arrivals_only():
    parts = {"queue_s": 0.04, "prefill_s": 0.3}
    idle = stock_of("a", 10.0, **USUAL, **parts)
    meets = stock_of("b", 10.2, **USUAL, **parts)
    silent = stock_of("c", 20.0, **USUAL)
    found = rows_of(idle, meets, silent)
    np.testing.assert_allclose(found[Target.QUEUE_WAIT].elapsed_us, [40_000, 40_000])
    np.testing.assert_allclose(found[Target.API_QUEUEING].elapsed_us, [160_000])
    assert set(found[Target.QUEUE_WAIT].quality.tolist()) == {int(Quality.REQUESTS)}


@pytest.fixture(scope="module")
def stock_pieces():
    run = run_engine(many_jobs(400, spacing=9))
    out = []
    for job in run.jobs:
        first, last = job.ns_of("FIRST_TOKEN"), job.ns_of("FINISHED")
        arrival_s = (job.marks[0][2] - 10**12) / 1e9
        times = {"ttft_s": (first - job.marks[0][2]) / 1e9, "decode_s": (last - first) / 1e9}
        span = stock_span(job.name, arrival_s, prompt=job.prompt, outputs=job.outputs, **times)
        out.append(Piece("api-0", STOCK_SCOPE, span))
    return sorted(out, key=lambda piece: piece.span.end_time_unix_nano)


@pytest.mark.parametrize(("aborted", "within"), [(False, 0.1), (True, 0.3)])
def test_an_un_forked_engine_is_learned_from_its_request_spans_although_aborted_requests_send_none(
    stock_pieces, aborted, within
):
    """What was not seen is missing from the features, not from the times: prefill is weak, the step's cost holds."""
    pipeline = replayed(exports_of([piece for n, piece in enumerate(stock_pieces) if not aborted or n % 10]))
    found = step_coefficients(pipeline)
    assert found["prefill_tokens"] == pytest.approx(45, rel=within)
    # context and requests move together here; what they cost together is what matters
    at_8 = found["intercept"] + 8 * found["requests"] + 8 * 250 * found["decode_context_tokens"]
    assert at_8 == pytest.approx(7000 + 8 * 160 + 8 * 250 * 0.12, rel=0.1)
    assert pipeline.snapshot(0, 1).configs[0].telemetry == "requests"


@pytest.mark.parametrize(("engines", "reason"), [(1, RowDrop.KNOWN_FROM_STEPS), (2, RowDrop.AMBIGUOUS)])
def test_beside_engines_that_send_steps_what_request_spans_say_of_steps_is_counted_and_left_out(
    stock_pieces, engines, reason
):
    everything = list(stock_pieces)
    for engine in range(engines):
        everything += pieces(run_engine(many_jobs(40, seed=engine)), instance=f"engine-{engine}", apis=False)
    pipeline = replayed(exports_of(everything))
    assert pipeline.take_counts()[table.DROPPED_ROWS, reason] > 100
    configs = pipeline.snapshot(0, 1).configs
    assert all(config.telemetry != "requests" for config in configs)
    if engines == 1:  # what they say of the API is the engine's; the toy has none
        told = configs[0].targets["api_queueing"].models["portable"]
        assert told.rows >= 20
        assert told.features[0].coefficient < 4000


@pytest.mark.parametrize(("gpu", "telemetry"), [("GPU 2", "requests"), ("GPU 1", "steps")])
def test_a_server_that_sends_request_spans_alone_is_no_part_of_engines_with_other_facts(stock_pieces, gpu, telemetry):
    everything = [piece._replace(facts=(("hw.gpu.name", gpu),)) for piece in stock_pieces]
    for engine in range(2):
        told, run = (("hw.gpu.name", f"GPU {engine}"),), run_engine(many_jobs(40, seed=engine))
        everything += pieces(run, instance=f"engine-{engine}", apis=False, facts=told)
    configs = replayed(exports_of(everything)).snapshot(0, 1).configs
    (learned,) = (config for config in configs if "api_queueing" in config.targets)
    assert (learned.config["gpu"], learned.telemetry) == (gpu, telemetry)
    assert len(configs) == (3 if telemetry == "requests" else 2)


def test_a_price_learned_from_request_spans_is_said_to_be_of_prompt_tokens(stock_pieces, tmp_path, capsys):
    def published(*facts):
        told = [piece._replace(facts=facts) for piece in stock_pieces]
        (tmp_path / "snapshot.json").write_bytes(replayed(exports_of(told)).snapshot(0, 1).to_json())
        main(["show", str(tmp_path / "snapshot.json")])
        return capsys.readouterr().out

    assert "hides prefix-cache hits" in published()
    assert "hides prefix-cache hits" not in published(("vllm.enable_prefix_caching", "false"))
