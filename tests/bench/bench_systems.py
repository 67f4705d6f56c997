"""Every number of the systems, beside its target: ``make bench WHAT=systems``.

gpus    each system on the simulated GPU servers of docs/accuracy.md, which has its figures
h100    request tables of measured servers, one workload and one model left out (``--tools``, ``--tables``)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from collector.config.schema import Config
from collector.evaluate.captures import load
from collector.evaluate.systems import NINE, Fit, ape, learn
from collector.identity import Fact
from collector.recordings import Recording
from collector.service.pipeline import make_pipeline
from online.bank import Bank
from online.features import SYSTEMS, build
from online.rls import RlsLearner
from online.rows import RowBlock, Target
from online.transfer import donor_of, pool
from tests.bench import bench_gpus, figures
from tests.bench.board import Board, module_at, run
from tests.support.banks import PORTABLE
from tests.support.gpu_kernels import model_file, step_times
from tests.support.models import configured
from tests.support.pipelines import step_rows
from tests.support.vllm_scheduler import Traffic

STEP = Target.STEP_TIME
TEN = (
    *("qwen1.7b/H200", "llama8b/L40S", "qwen32b/H100", "qwen32b-fp8/H200", "llama70b/B200"),
    *("qwen30b-a3b/H100", "qwen3.5-35b/H200", "qwen235b/L40S", "minimax-m2.5/H100", "deepseek-v3/B200"),
)
KINDS = ("dense", "mixtures")
HEADER = ("system", "dense: mean, worst", "mixtures: mean, worst")
SEEN = ((350, 180, 8), (500, 260, 40), (1000, 70, 3), (120, 450, 60), (350, 180, 24))
UNSEEN = ((2500, 60, 12), (120, 800, 30))
"""Mean prompt and output tokens, and clients, of each phase: the unseen have longer prompts, and longer outputs."""
PHASE_S = 30.0


@dataclass(frozen=True)
class Server:
    """Rows of one simulated GPU server, and what is known of it."""

    kind: str
    facts: Mapping[str, Fact]
    seen: RowBlock
    unseen: RowBlock


def gpus(board: Board) -> None:
    """Each system on steps of the ten servers."""
    with tempfile.TemporaryDirectory() as directory:
        servers = {name: server_of(name, Path(directory)) for name in TEN}
    figures.record("systems", unseen_workloads(board, servers))
    leave_one_server_out(board, servers)
    before_the_first_row(board, servers)


def server_of(name: str, directory: Path) -> Server:
    """Serve what is learned and what is scored, and join what the server sends."""
    (case,) = [case for case in bench_gpus.all_cases() if case.name == name]
    times = step_times(case.machine, case.gpu)
    rows = {}
    for part, mixes, seed in (("seen", SEEN, 905), ("unseen", UNSEEN, 906)):
        traffic = Traffic(seed)
        for number, (prompt, output, clients) in enumerate(mixes):
            start = number * int(PHASE_S * 1e9)
            traffic.closed(start, start + int(PHASE_S * 1e9), clients, prompt, output, 0.4, 0.5)
        engine = bench_gpus.served(case, times, traffic, PHASE_S * len(mixes), seed)
        path = bench_gpus.sent(case, engine, "steps", directory)
        config = configured({"rules": [{"facts": {"model_config": str(model_file(case.machine.model))}}]})
        (capture,) = load(path, list(Recording(path, print)), config, 1.0)
        rows[part] = capture.rows[STEP]
    return Server(case.kind, capture.facts, **rows)


def step_error(learner: RlsLearner | None, rows: RowBlock) -> float:
    """Mean error of the steps' times in per cent; NaN where it has not begun."""
    return math.nan if learner is None else 100 * float(ape(Fit.of(learner).predict(rows), rows.elapsed_us).mean())


def unseen_workloads(board: Board, servers: Mapping[str, Server]) -> dict[str, list[float]]:
    """Learned from some workloads, scored on others that never occurred: mean and worst error, and servers."""
    told: dict[str, list[float]] = {}
    for system, kind in product(NINE, KINDS):
        of_kind = [server for server in servers.values() if server.kind == kind]
        sets = [(server, features) for server in of_kind if (features := build(system, STEP, server.facts))]
        errors = [step_error(learn(features, server.seen), server.unseen) for server, features in sets]
        told[f"{system}, {kind}"] = [float(np.mean(errors)), max(errors), len(errors)]
        each = ", ".join(f"{error:.1f}" for error in errors)
        board.line(f"unseen workloads, {system}, {kind}: mean error %", f"{np.mean(errors):.1f}", note=each)
    board.at_most("physics, worst server, %", max(told[f"physics, {kind}"][1] for kind in KINDS), 7.0)
    return told


def table_rows(recorded: Mapping[str, list[float]]) -> Iterator[list[str]]:
    """The table of docs/systems.md."""
    for system in NINE:
        told = (recorded[f"{system}, {kind}"] for kind in KINDS)
        yield [system, *(f"{mean:.1f}, {worst:.1f} ({servers:.0f})" for mean, worst, servers in told)]


ROWS_OF_A_NEW_SERVER = (20, 100, 500)


def leave_one_server_out(board: Board, servers: Mapping[str, Server]) -> None:
    """Physics starts from the other servers: its first rows, scored on workloads that never occurred."""
    system, donors, errors = SYSTEMS["physics"], {}, defaultdict(list)
    for each, server in servers.items():
        if (features := build(system.name, STEP, server.facts)) is not None:
            donors[each] = donor_of(each, server.facts, learn(features, server.seen))
    for each, own in donors.items():
        server, others = servers[each], [donor for donor in donors.values() if donor is not own]
        for kind, start in (("prior", pool(system, STEP, others).prior(server.facts)), ("cold", None)):
            models = (learn(own.features, server.seen.slice(0, rows), start) for rows in ROWS_OF_A_NEW_SERVER)
            errors[kind].append([step_error(model, server.unseen) for model in models])
    for kind, found in errors.items():
        told = " ".join(f"{error:.1f}" for error in np.nanmean(found, axis=0))
        board.line(f"left out, physics, {kind}: mean error % after {ROWS_OF_A_NEW_SERVER} rows", told)
    worst = np.max(errors["prior"], axis=0)
    board.at_most("worst server after 20 rows, %", worst[0], 10.0)
    board.at_most("worst server after 100 rows, %", worst[1], 8.0)


def before_the_first_row(board: Board, servers: Mapping[str, Server]) -> None:
    """Told by the data sheet alone."""
    for name, server in servers.items():
        bank = Bank(PORTABLE)
        bank.describe(name, server.facts)
        target, error = bank.targets(name).get("step_time"), math.nan
        if target is not None:
            beta = np.array([feature.coefficient for feature in target.models["portable"].features])
            made = Fit("portable", build("portable", STEP, server.facts), beta)
            error = 100 * float(ape(made.predict(server.unseen), server.unseen.elapsed_us).mean())
        board.line(f"{name}, by the sheet alone: mean error %", f"{error:.1f}")


ROWS_OF_A_NEW_ONE = (0, 100, 300, 1000)
LEFT_OUT = ("workload, donors", "workload, sheet only", *(f"model, {rows} rows" for rows in ROWS_OF_A_NEW_ONE))
LIMITS = {
    ("workload, donors", "ordinary"): 2.0,
    ("workload, donors", "reasoning"): 8.0,
    ("model, 0 rows", "median"): 6.0,
    ("model, 100 rows", "all"): 5.0,
    ("model, 300 rows", "all"): 5.0,
    ("model, 1000 rows", "all"): 3.0,
}


def h100(board: Board) -> None:
    """Leave one workload out, then one model: learned by the product from request spans, replayed with alpha 0."""
    configs = board.experiments()
    os.environ["GROUND_TRUTH"] = str(board.tables)
    replay = module_at(board.tools / "replay.py")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tree = {"learners": ["rls"], "feature_sets": ["portable"]}
        config = configured({**tree, "rules": model_rules(configs, directory)})
        tables = {
            experiment: request_table(board.as_otlp(experiment, directory / f"{experiment}.pb.gz"), config)
            for experiment in configs
        }
    models = {experiment: shape["model_short"] for experiment, shape in configs.items()}

    def learned_from(chosen: list[str], donors: list[bytes] = (), count: int | None = None) -> Bank:
        bank = Bank(config)
        for state in donors:
            bank.add_donors(state)
        for experiment in chosen:
            facts, rows = tables[experiment]
            bank.describe(models[experiment], facts)
            bank.learn(models[experiment], STEP, rows if count is None else rows.slice(0, count))
        return bank

    def error(experiment: str, bank: Bank) -> float:
        published = bank.targets(models[experiment])["step_time"].models["portable"].features
        told = defaultdict(float, {feature.name: feature.coefficient for feature in published})
        request, context = told["requests"], told["decode_context_tokens"]
        # the batches of these runs touch every one of a mixture's eight experts
        beta = {"intercept": told["intercept"] + told["active_experts"], "prefill_tokens": told["prefill_tokens"]}
        beta |= {"n_prefill": request, "decode_tokens": request + context, "decode_ctx_tokens": context}
        form = {"kind": "linear", "alpha": {}, "beta": beta}
        with contextlib.redirect_stdout(None):
            found = replay.evaluate({"configs": {experiment: form}}, only=experiment)
        return abs(100 * found[experiment]["e2e"])

    states = {m: learned_from([e for e, own in models.items() if own == m]).state() for m in set(models.values())}
    found = []
    for experiment, model in models.items():
        donors = [states[other] for other in sorted(states) if other != model]
        others = [e for e, own in models.items() if own == model and e != experiment]
        cells = [error(experiment, learned_from(others, lent)) for lent in (donors, ())]
        cells += [error(experiment, learned_from([experiment], donors, count)) for count in ROWS_OF_A_NEW_ONE]
        board.line(
            f"{experiment[16:]}: E2E error %, left out: {'; '.join(LEFT_OUT)}", " ".join(f"{c:.1f}" for c in cells)
        )
        found.append(cells)
    is_reasoning = np.array(["reasoning" in experiment for experiment in models])
    for what, errors in zip(LEFT_OUT, np.array(found).T, strict=True):
        means = {"ordinary": errors[~is_reasoning], "reasoning": errors[is_reasoning], "all": errors}
        values = {which: each.mean() for which, each in means.items()} | {"median": np.median(errors)}
        for which, value in values.items():
            limit = LIMITS.get((what, which), math.inf)
            board.at_most(f"left out: {what}: {which}, %", float(value), limit)


def request_table(path: Path, config: Config) -> tuple[dict, RowBlock]:
    """Facts and step rows of a request table in order of time, as the product makes them."""
    facts, rows = step_rows(make_pipeline(config), [path])
    return facts, rows.take(np.argsort(rows.end_ns, kind="stable"))


def model_rules(configs: dict, directory: Path) -> list[dict]:
    """A config.json per model, and the rule that names it."""
    rules = {}
    for config in configs.values():
        shape = config["model_config"]
        path = directory / f"{config['model_short']}.json"
        path.write_text(
            json.dumps(
                {
                    "model_type": "mixtral" if shape["num_local_experts"] else "llama",
                    "hidden_size": shape["hidden_dim"],
                    "intermediate_size": shape["intermediate_dim"],
                    "num_hidden_layers": shape["num_layers"],
                    "num_attention_heads": shape["num_heads"],
                    "num_key_value_heads": shape["num_kv_heads"],
                    "vocab_size": shape["vocab_size"],
                    "num_local_experts": shape["num_local_experts"],
                    "num_experts_per_tok": shape["num_experts_per_tok"] or 1,
                }
            )
        )
        rules[config["model_id"]] = {"match": {"model": config["model_id"]}, "facts": {"model_config": str(path)}}
    return list(rules.values())


SECTIONS = {"gpus": gpus, "h100": h100}
NEEDS = {"h100": ("tools", "tables")}

if __name__ == "__main__":
    sys.exit(run(__doc__, SECTIONS, NEEDS))
