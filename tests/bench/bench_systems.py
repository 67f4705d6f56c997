"""Every number of the systems, beside its target: ``make bench WHAT=systems``.

Names of sections run only those: gpus, and with arguments (tests/bench/outside.py) scorer (``--tools``) and
h100 (``--tools``, ``--tables``), which are skipped, loudly, without. ``gpus`` writes its figures to docs/figures.json.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from collector.config.schema import Config
from collector.evaluate.captures import load as load_capture
from collector.evaluate.protocol import evaluate
from collector.evaluate.systems import NINE, ape, identifiable, learn, predict
from collector.evaluate.transfer import ensemble, frozen, specialists
from collector.identity import Fact
from collector.identity.knowledge import Knowledge
from collector.recordings import Recording
from collector.service.pipeline import make_pipeline
from online.bank import Bank
from online.features import SYSTEMS, FeatureSet, build
from online.rls import RlsLearner
from online.rows import RowBlock, Target
from online.snapshot import Snapshot
from online.transfer import donor_of, pool
from tests.bench import bench_gpus, figures
from tests.bench.board import Board
from tests.bench.outside import Outside, run_sections
from tests.support.gpu_kernels import model_file, step_times
from tests.support.models import configured, knowledge_of_captures
from tests.support.pipelines import fed, step_rows
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
NOT_OFFERED = "-"
CUT = 0.6


def quietly(*_: object) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Server:
    """Rows of one simulated GPU server, and what is known of it."""

    kind: str
    facts: Mapping[str, Fact]
    seen: RowBlock
    unseen: RowBlock


def gpus(board: Board, _outside: Outside) -> None:
    """Each system on steps of the ten servers of docs/accuracy.md."""
    with tempfile.TemporaryDirectory() as directory:
        servers = {name: server_of(name, Path(directory)) for name in TEN}
    figures.record("systems", unseen_workloads(board, servers))
    leave_one_server_out(board, servers)
    before_the_first_row(servers)


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
        knowledge = Knowledge(configured({"rules": [{"facts": {"model_config": str(model_file(case.machine.model))}}]}))
        (capture,) = load_capture([Recording(path, quietly)], knowledge, Config(), 1.0)
        rows[part] = capture.full[STEP].rows
    return Server(case.kind, capture.facts, **rows)


def step_error(model: RlsLearner | None, features: FeatureSet, rows: RowBlock) -> float:
    """Mean error of the steps' times in per cent; NaN where it has not begun."""
    return math.nan if model is None else 100 * float(ape(predict(model, features, rows), rows.elapsed_us).mean())


def unseen_workloads(board: Board, servers: Mapping[str, Server]) -> dict[str, list[float]]:
    """Learned from some workloads, scored on others that never occurred: mean and worst error, and servers."""
    print(f"\nUnseen workloads, step MAPE %, identifiable/columns; {NOT_OFFERED}: not offered")
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, server in servers.items():
        cells = []
        for system in NINE:
            features = build(system, STEP, server.facts)
            if features is None:
                cells.append(f"{system} {NOT_OFFERED}")
                continue
            error = step_error(learn(features, server.seen), features, server.unseen)
            found[system, server.kind].append(error)
            cells.append(f"{system} {error:.1f} ({identifiable(features, server.seen)}/{len(features)})")
        print(f"  {name:<20} " + "  ".join(cells))
    told = {}
    for (system, kind), errors in found.items():
        told[f"{system}, {kind}"] = [float(np.mean(errors)), max(errors), len(errors)]
        print(f"  {system:<10} {kind:<9} mean {np.mean(errors):.1f}, worst {max(errors):.1f} of {len(errors)}")
    board.at_most("physics, worst server, %", max(told[f"physics, {kind}"][1] for kind in KINDS), 7.0)
    return told


def table_rows(recorded: Mapping[str, list[float]]) -> Iterator[list[str]]:
    """The table of docs/systems.md."""
    for system in NINE:
        told = (recorded[f"{system}, {kind}"] for kind in KINDS)
        yield [system, *(f"{mean:.1f}, {worst:.1f} ({servers:.0f})" for mean, worst, servers in told)]


ROWS_OF_A_NEW_SERVER = (20, 100, 500)


def leave_one_server_out(board: Board, servers: Mapping[str, Server]) -> None:
    """Donors are the other servers; the first rows, scored on workloads that never occurred."""
    print(f"\nLeave one server out, step MAPE % after {ROWS_OF_A_NEW_SERVER} rows (cold), mean of the servers")
    for name in ("physics", "hfd_tl", "rece", "bsr_ard"):
        system, sets = SYSTEMS[name], {each: build(name, STEP, server.facts) for each, server in servers.items()}
        donors = {
            each: donor_of(each, servers[each].facts, learn(features, servers[each].seen))
            for each, features in sets.items()
            if features is not None
        }
        errors = defaultdict(list)
        for each, server in servers.items():
            if each not in donors:
                continue
            others = [donor for other, donor in donors.items() if other != each]
            pooled = pool(system, STEP, others).prior(server.facts)
            starts = {"prior": pooled, "cold": None}
            if name == "hfd_tl":
                starts["frozen"] = frozen(pooled, sets[each])
            if name == "rece":
                starts["specialists"] = ensemble(server.facts, specialists(system, STEP, others))
            for kind, start in starts.items():
                models = (learn(sets[each], server.seen.slice(0, rows), start) for rows in ROWS_OF_A_NEW_SERVER)
                errors[kind].append([step_error(model, sets[each], server.unseen) for model in models])
        for kind, found in errors.items():
            print(f"  {name:<9} {kind:<12} " + "  ".join(f"{error:6.1f}" for error in np.nanmean(found, axis=0)))
        if name == "physics":
            worst = np.max(errors["prior"], axis=0)
            board.at_most("worst server after 20 rows, %", worst[0], 10.0)
            board.at_most("worst server after 100 rows, %", worst[1], 8.0)


def before_the_first_row(servers: Mapping[str, Server]) -> None:
    """Told by the data sheet alone."""
    print("\nBefore the first row, by the sheet alone, step MAPE %")
    for name, server in servers.items():
        bank = Bank(Config(learners=("rls",), feature_sets=("portable",)))
        bank.describe(name, server.facts)
        target = bank.targets(name).get("step_time")
        if target is None:
            print(f"  {name:<20} nothing is told")
            continue
        features = build("portable", STEP, server.facts)
        beta = np.array([feature.coefficient for feature in target.models["portable"].features])
        found = features.evaluate(server.unseen) @ beta
        print(f"  {name:<20} {100 * float(ape(found, server.unseen.elapsed_us).mean()):.1f}")


def scorer(board: Board, outside: Outside) -> None:
    """The same snapshot, scored by the independent scorer and by evaluate."""
    print("\nThe same snapshot by the scorer and by evaluate, percentage points apart")
    judge = outside.tools / "score"
    for name in ("c5_offload", "c6_saturated", "c7_async_sim"):
        with tempfile.TemporaryDirectory() as directory:
            part, snapshot = Path(directory) / "part", Path(directory) / "s.json"
            call([sys.executable, str(judge / "split.py"), name.split("_")[0], str(part)], judge)
            pipeline = fed(make_pipeline(Config()), [part / "otlp.pb.gz"])
            snapshot.write_bytes(pipeline.snapshot(1, 1).to_json())
            command = [sys.executable, str(judge / "score.py"), "--snapshot", str(snapshot), "--json"]
            judged = json.loads(call([*command, "--capture", name.split("_")[0]], judge))
            path = Path(outside.score("capture").path_of(name)) / "otlp.pb.gz"  # with its truth, where it has one
            captures = load_capture([Recording(path, quietly)], knowledge_of_captures(), Config(), CUT)
            report = evaluate(
                captures,
                ("portable",),
                learn_until=CUT,
                left_out="workload",
                version="bench",
                tell=quietly,
                snapshot=Snapshot.from_json(snapshot.read_bytes()),
            )
        ours = next(s for s in report.captures[0].scores if s["system"] == "snapshot/portable")
        for label, own, theirs in (
            ("step MAPE", ours["step_mape"], judged["step"]["mape"]),
            ("mean E2E", ours["e2e"], judged["request"]["e2e_mean_err"]),
        ):
            note = f"evaluate {100 * own:.2f}, scorer {theirs:.2f}"
            board.at_most(f"{name} {label}, apart", abs(100 * own - theirs), 0.5, note=note)


def call(command: list[str], cwd: Path) -> str:
    """Run a tool from outside."""
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


ROWS_OF_A_NEW_ONE = (0, 100, 300, 1000)


def h100_request_tables(board: Board, outside: Outside) -> None:
    """Leave one workload out, then one model: learned by the product from request spans, then replayed."""
    configs, replay = outside.experiments(), outside.replay()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tree = {"learners": ["rls"], "feature_sets": ["portable"]}
        config = configured({**tree, "rules": model_rules(configs, directory)})
        tables = {
            experiment: request_table(outside.as_otlp(experiment, directory / f"{experiment}.pb.gz"), config)
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
        beta = {feature.name: feature.coefficient for feature in published}
        form = replayed_form(**beta)
        with contextlib.redirect_stdout(None):
            found = replay.evaluate({"configs": {experiment: form}}, only=experiment)
        return 100 * found[experiment]["e2e"]

    states = {m: learned_from([e for e, own in models.items() if own == m]).state() for m in set(models.values())}
    print("\nH100 request tables, replayed with alpha 0, E2E error %: workload left out, with donors and without;")
    print(f"model left out, after {ROWS_OF_A_NEW_ONE} rows of its own")
    left_out, new = {}, []
    for experiment, model in models.items():
        donors = [states[other] for other in sorted(states) if other != model]
        others = [e for e, own in models.items() if own == model and e != experiment]
        cells = [error(experiment, learned_from(others, lent)) for lent in (donors, ())]
        cells += [error(experiment, learned_from([experiment], donors, count)) for count in ROWS_OF_A_NEW_ONE]
        print(f"  {experiment[16:]:<34}" + " ".join(f"{cell:7.1f}" for cell in cells), flush=True)
        left_out[experiment] = abs(cells[0])
        new.append(np.abs(cells[2:]))
    judge_left_out(board, left_out, np.array(new))
    unseen_workloads_of_mixtures(board, tables, models)


def unseen_workloads_of_mixtures(
    board: Board, tables: dict[str, tuple[dict, RowBlock]], models: dict[str, str]
) -> None:
    """``physics`` learned from one workload, its step errors on the others of the same mixture."""
    for experiment, (facts, rows) in tables.items():
        if "mixtral" not in experiment:
            continue
        features = build("physics", STEP, facts)
        model = learn(features, rows)
        for other, (_, scored) in tables.items():
            if models[other] == models[experiment] and other != experiment:
                error = 100 * float(ape(predict(model, features, scored), scored.elapsed_us).mean())
                board.at_most(f"{other[16:]}, steps, never seen, %", error, 3.0)


def judge_left_out(board: Board, left_out: dict[str, float], new: np.ndarray) -> None:
    """Errors of tables whose workload was left out, and (tables, rows) of those whose model was."""
    reasoning = [value for experiment, value in left_out.items() if "reasoning" in experiment]
    usual = [value for experiment, value in left_out.items() if "reasoning" not in experiment]
    board.at_most("workload left out, ordinary, mean %", float(np.mean(usual)), 2.0)
    board.at_most("workload left out, reasoning, mean %", float(np.mean(reasoning)), 8.0)
    board.at_most("model left out, zero rows, median %", float(np.median(new[:, 0])), 6.0)
    for column, (rows, limit) in enumerate(((100, 5.0), (300, 5.0), (1000, 3.0)), 1):
        board.at_most(f"model left out, {rows} rows, mean %", float(new[:, column].mean()), limit)
    board.at_most("100 or 300 rows worse than none, worst, points", float((new[:, 1:3] - new[:, :1]).max()), 5.0)


def replayed_form(
    intercept: float = 0.0,
    prefill_tokens: float = 0.0,
    decode_context_tokens: float = 0.0,
    requests: float = 0.0,
    active_experts: float = 0.0,
) -> dict:
    """Coefficients of ``portable`` as the replay takes them: a decoding request adds itself and a token of context.

    The batches of these runs touch every one of a mixture's eight experts.
    """
    beta = {"intercept": intercept + active_experts, "prefill_tokens": prefill_tokens, "n_prefill": requests}
    beta |= {"decode_tokens": requests + decode_context_tokens, "decode_ctx_tokens": decode_context_tokens}
    return {"kind": "linear", "alpha": {}, "beta": beta}


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


SECTIONS = {"gpus": gpus, "scorer": scorer, "h100": h100_request_tables}
NEEDS = {"scorer": ("tools",), "h100": ("tools", "tables")}

if __name__ == "__main__":
    sys.exit(run_sections(__doc__, SECTIONS, NEEDS))
