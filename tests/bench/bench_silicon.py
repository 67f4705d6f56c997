"""Real servers of other people, beside what tracefit would have said of them: ``make bench WHAT=silicon``.

``aiconfigurator-core`` ships some five thousand serving points that others measured: TTFT and TPOT of closed loops by
prompt, output and concurrency. They are read where the package lies, nothing is copied. Of vLLM's aggregated servers
without data parallelism those are taken that have eight points at least, on GPUs that the shipped sheets know. The
product's bank learns rows that its telemetry would have had there on the mean, and the client is asked for ITL.

    sheet     before the first row: model, GPU, tensor parallelism and quantization are all that is known
    left out  learned from the other pairs of prompt and output, asked for this one
    learned   learned from all points, asked for the same

A server that the client calls not usable there is counted, and its error too.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

import tracefit
from collector.identity.resolver import ConfigResolver, EngineFacts
from online.bank import Bank
from online.rows import STEP_FEATURES, RowBlock, Target
from online.snapshot import ConfigSnapshot, Snapshot
from tests.bench.figures import record
from tests.support.banks import PORTABLE
from tests.support.gpu_kernels import model_file, package_directory
from tests.support.models import configured

LEAST_POINTS = 8
ROWS_A_POINT = 40
NOISE = 0.01
GPUS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200", "b300_sxm": "B300"}
FILES = {  # whose config.json the package has under another name
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
}
QUANTIZATION = {"fp8": "fp8", "fp4": "modelopt_fp4"}
"""What an engine says of its weights, by the precision of the table; others are in config.json."""
ROADS = ("sheet", "left out", "learned")
HEADER = ("models", "servers", "points", *(f"{road}: median, mean" for road in ROADS), "inside the band", "usable")


class Server(NamedTuple):
    """One deployment that was measured."""

    model: str
    gpu: str
    version: str
    precision: str
    tensor_parallel: int
    experts: str


class Point(NamedTuple):
    """One closed loop; times in microseconds."""

    prompt: int
    output: int
    clients: int
    ttft_us: float
    tpot_us: float


def measured() -> dict[Server, list[Point]]:
    """Servers with their points; a loop that was measured several times counts once, with its median."""
    times: dict[Server, dict[tuple[int, int, int], list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    table = package_directory() / "systems" / "silicon_sample.csv"
    with table.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            clients = re.search(r"silicon_concurrency=(\d+)", line["silicon_data_source"])
            alone = line["mode"] == "agg" and line["attention_dp_size"] in {"", "1"}
            if line["backend"] != "vllm" or not alone or clients is None or line["system"] not in GPUS:
                continue
            degree = int(line["tp_size"]) * (int(line["moe_tp_size"] or 1) if line["attention_dp_size"] == "" else 1)
            experts = f"{line['moe_tp_size']}x{line['moe_ep_size']}"
            server = Server(
                line["model_path"], GPUS[line["system"]], line["backend_version"], line["precision"], degree, experts
            )
            loop = int(line["isl"]), int(line["osl"]), int(clients[1])
            times[server][loop].append((float(line["silicon_ttft_ms"]), float(line["silicon_tpot_ms"])))
    found = {server: [_point(*each) for each in loops.items()] for server, loops in times.items()}
    return {server: points for server, points in sorted(found.items()) if len(points) >= LEAST_POINTS}


def _point(loop: tuple[int, int, int], times: Sequence[tuple[float, float]]) -> Point:
    ttft_ms, tpot_ms = (statistics.median(each) for each in zip(*times, strict=True))
    return Point(*loop, 1e3 * ttft_ms, 1e3 * tpot_ms)


def facts_of(server: Server) -> dict[str, str | int | float | bool]:
    """What the sidecar would know of it."""
    path = model_file(FILES.get(server.model, server.model))
    facts = EngineFacts()
    attributes = {
        "vllm.model": server.model,
        "hw.gpu.name": server.gpu,
        "vllm.tensor_parallel_size": str(server.tensor_parallel),
        "vllm.max_num_seqs": "1024",
        "vllm.max_num_batched_tokens": "8192",
    }
    if server.precision in QUANTIZATION and "gpt-oss" not in server.model:
        attributes["vllm.quantization"] = QUANTIZATION[server.precision]
    ConfigResolver(configured({"rules": [{"facts": {"model_config": str(path)}}]})).apply(
        facts, attributes, "silicon", ""
    )
    return facts.as_dict()


def rows_of(points: Sequence[Point]) -> RowBlock:
    """Mean steps of each loop, with noise: so many requests decode, and each that ends is followed by a prompt."""
    rng, lines, times = np.random.default_rng(5), [], []
    for point in points:
        decode_us = point.output * point.tpot_us
        decodes = point.clients * decode_us / (decode_us + point.ttft_us)
        prompts = decodes / point.output
        line = dict.fromkeys(STEP_FEATURES, 0.0) | {
            "prefill_tokens": prompts * point.prompt,
            "prefill_requests": prompts,
            "decode_requests": decodes,
            "decode_tokens": decodes,
            "decode_context_tokens": decodes * (point.prompt + point.output / 2),
            "prefill_attention": prompts * point.prompt * point.prompt / 2,
            "requests": decodes + prompts,
        }
        lines += [list(line.values())] * ROWS_A_POINT
        times += [point.tpot_us] * ROWS_A_POINT
    order = rng.permutation(len(times))
    elapsed_us = np.array(times)[order] * np.exp(NOISE * rng.standard_normal(len(times)))
    end_ns = 1_700_000_000_000_000_000 + np.cumsum(elapsed_us * 1e3).astype(np.int64)
    return RowBlock.of_lines(np.array(lines)[order], elapsed_us, end_ns=end_ns)


def learned(facts: dict, points: Sequence[Point]) -> tracefit.Config | None:
    """What the client knows of a server after these points; None where nothing is published."""
    bank = Bank(PORTABLE)
    bank.describe("c0", facts)
    if points:
        bank.learn("c0", Target.STEP_TIME, rows_of(points))
    targets = bank.targets("c0")
    if "step_time" not in targets:
        return None
    told = ConfigSnapshot(config_id="c0", config=facts, engines=[], telemetry="requests", targets=targets)
    snapshot = Snapshot(generation=1, created_unix_nano=1, tracefit_version="0", configs=[told])
    return tracefit.load(snapshot.to_json()).config()


class Answer(NamedTuple):
    """One ITL beside the measured one: relative error, and whether it was called usable and held by its band."""

    error: float
    usable: bool
    inside: bool


def asked(config: tracefit.Config | None, points: Sequence[Point]) -> Iterator[Answer]:
    """What the client says of each loop."""
    if config is None:
        return
    for point in points:
        try:
            said = config.request(prompt_tokens=point.prompt, output_tokens=point.output, concurrency=point.clients)
        except tracefit.TracefitError:
            continue
        itl = said.itl
        yield Answer(abs(itl.us / point.tpot_us - 1.0), said.usable, itl.low <= point.tpot_us <= itl.high)


def judge(facts: dict, points: list[Point]) -> dict[str, list[Answer]]:
    """The answers of each road."""
    left_out: list[Answer] = []
    for pair in {(point.prompt, point.output) for point in points}:
        own = [point for point in points if (point.prompt, point.output) == pair]
        others = [point for point in points if (point.prompt, point.output) != pair]
        left_out += asked(learned(facts, others), own) if others else ()
    return {
        "sheet": list(asked(learned(facts, []), points)),
        "left out": left_out,
        "learned": list(asked(learned(facts, points), points)),
    }


def table_rows(recorded: Mapping[str, list[float]]) -> Iterator[list[str]]:
    """The table of docs/accuracy.md."""
    for kind in ("dense", "mixtures"):
        servers, points, *errors, inside, usable = recorded[kind]
        roads = (f"{median:.1f}, {mean:.1f}" for median, mean in zip(errors[::2], errors[1::2], strict=True))
        yield [kind, f"{servers:.0f}", f"{points:.0f}", *roads, f"{inside:.0f} %" if usable else "-", f"{usable:.0f} %"]


def summed_up(judged: Sequence[tuple[int, dict[str, list[Answer]]]]) -> list[float]:
    """Servers, points, median and mean error of each road over servers, and of what was left out: inside and usable."""
    row: list[float] = [len(judged), sum(points for points, _ in judged)]
    for road in ROADS:
        errors = [mean_error(answers[road]) for _, answers in judged if answers[road]]
        row += [statistics.median(errors), statistics.fmean(errors)]
    left_out = [answer for _, answers in judged for answer in answers["left out"]]
    inside = [answer.inside for answer in left_out if answer.usable]
    return [*row, 100 * statistics.fmean(inside or [0]), 100 * len(inside) / len(left_out)]


def mean_error(answers: Sequence[Answer]) -> float:
    """In per cent; NaN without an answer."""
    return 100 * statistics.fmean(answer.error for answer in answers) if answers else math.nan


def main() -> int:
    """Every server; the table of docs/accuracy.md."""
    by_kind = defaultdict(list)
    for server, points in measured().items():
        facts = facts_of(server)
        answers = judge(facts, points)
        by_kind["mixtures" if facts.get("num_experts") else "dense"].append((len(points), answers))
        name = f"{server.model.split('/')[-1]:<25} {server.gpu:<5} TP{server.tensor_parallel:<3}{server.precision:<4}"
        cells = (f"{road} {mean_error(answers[road]):6.1f}" for road in ROADS)
        print(f"{name} {server.version:<8.8} {len(points):3} points  {'  '.join(cells)}", flush=True)
    figures = {kind: summed_up(judged) for kind, judged in by_kind.items()}
    for row in (HEADER, *table_rows(figures)):
        print(" | ".join(row))
    record("silicon", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
