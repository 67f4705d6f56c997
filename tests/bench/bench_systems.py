"""Every number of the systems, beside its target: ``make bench WHAT=systems``.

Names of sections run only those: simulated recordings, and with arguments (tests/bench/outside.py) scorer (``--tools``)
and h100 (``--tools``, ``--tables``), which are skipped, loudly, without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from collector.config.schema import Config
from collector.evaluate.captures import load as load_capture
from collector.evaluate.protocol import evaluate
from collector.evaluate.systems import NINE, ape, design, identifiable, learn, leave_one_out, predict
from collector.identity.knowledge import Knowledge
from collector.recordings import Recording, TimedExport, merged
from collector.service.pipeline import Pipeline, make_pipeline
from online.bank import Bank
from online.features.registry import build
from online.features.systems import SYSTEMS
from online.rows import RowBlock, Target
from online.snapshot import Snapshot
from online.transfer import pooled as transfer
from tests.bench.outside import Outside, add_arguments, outside_of
from tests.support.models import configured, knowledge_of_captures
from tests.support.paths import DATA
from tests.support.recordings import otlp_file
from tests.support.roofline_steps import MACHINES, WARM_UP_STEPS, Segment, Stream, simulate
from tests.support.thinned import thinned_step_rows

STEP = Target.STEP_TIME
SEEN = (Segment(0.25, "chat", 0.5), Segment(0.25, "code", 0.8), Segment(0.2, "chat", 0.3), Segment(0.15, "chat", 1.1),
        Segment(0.15, "reasoning", 0.6))  # fmt: skip
UNSEEN = (Segment(0.5, "summaries", 0.6), Segment(0.5, "stories", 0.8))
CUT = 0.6

failures: list[str] = []


def verdict(name: str, value: float, limit: float) -> str:
    """The figure beside its target; a miss is remembered."""
    held = value <= limit
    if not held:
        failures.append(name)
    return f"{name:<52} {value:8.2f}   target <= {limit:g}   {'holds' if held else 'MISSED'}"


def quietly(*_: object) -> None:
    """Nobody listens."""


def rows_of(stream: Stream) -> tuple[RowBlock, np.ndarray]:
    """Steps of a stream without the first (warm-up), and which of them are outliers."""
    used = np.arange(len(stream.rows)) >= WARM_UP_STEPS
    return stream.rows.take(used), stream.outlier[used]


def unseen_workloads() -> None:
    """Learned from some workloads, scored on others that never occurred."""
    print("\nUnseen workloads (simulator), step MAPE %, identifiable/columns")
    found: dict[str, list[float]] = {name: [] for name in NINE}
    for name, machine in MACHINES.items():
        facts = machine.facts()
        seen, _ = rows_of(simulate(name, 12_000, 905, SEEN))
        test, outlier = rows_of(simulate(name, 6000, 906, UNSEEN))
        test = test.take(~outlier)
        cells = []
        for system in NINE:
            features = build(system, STEP, facts)
            error = 100 * float(ape(predict(learn(features, seen), features, test), test.elapsed_us).mean())
            found[system].append(error)
            cells.append(f"{system} {error:.1f} ({identifiable(features, seen)}/{len(features)})")
        print(f"  {name:<20} " + "  ".join(cells))
    print(verdict("physics, worst configuration, %", max(found["physics"]), 7.0))
    print(verdict("physics, median over configurations, %", float(np.median(found["physics"])), 3.0))


def leave_one_configuration_out() -> None:
    """Donors are the other configurations; the first rows after warm-up, scored on the last half."""
    print("\nLeave one simulated configuration out, physics, step MAPE %")
    physics = next(s for s in SYSTEMS if s.name == "physics")
    data = {}
    for name, machine in MACHINES.items():
        rows, outlier = rows_of(simulate(name, 12_000, 907, SEEN + UNSEEN))
        half = np.arange(len(rows)) > len(rows) // 2
        data[name] = (machine.facts(), rows, rows.take(half & ~outlier))
    donors = {n: transfer.donor_of(n, f, learn(physics.live(STEP, f), r)) for n, (f, r, _) in data.items()}
    worst = {20: 0.0, 100: 0.0}
    for name, (facts, rows, test) in data.items():
        features = physics.live(STEP, facts)
        prior = transfer.pool(physics, STEP, [d for n, d in donors.items() if n != name]).prior(facts)
        zero = 100 * float(ape(features.evaluate(test) @ prior.mean[: len(features)], test.elapsed_us).mean())
        cells = [f"zero-shot {zero:.1f}"]
        for count in (20, 50, 100, 500):
            for kind, start in (("", prior), ("cold ", None)):
                model = learn(features, rows.slice(0, count), prior=start)
                error = 100 * float(ape(predict(model, features, test), test.elapsed_us).mean())
                cells.append(f"{kind}@{count} {error:.1f}")
                if start is not None and count in worst:
                    worst[count] = max(worst[count], error)
        print(f"  {name:<20} " + "  ".join(cells))
    print(verdict("worst configuration after 20 rows, %", worst[20], 10.0))
    print(verdict("worst configuration after 100 rows, %", worst[100], 8.0))


def before_the_first_row() -> None:
    """Told by the data sheet alone, scored on all rows; no target: overheads of simulated machines are made up."""
    print("\nBefore the first row, by the sheet alone (simulator), step MAPE %")
    for name, machine in MACHINES.items():
        rows, outlier = rows_of(simulate(name, 12_000, 907, SEEN + UNSEEN))
        scored = rows.take(~outlier)
        bank = Bank(Config(learners=("rls",), feature_sets=("portable",)))
        bank.describe(name, machine.facts())
        model = bank.targets(name)["step_time"].models["portable"]
        beta = np.array([feature.coefficient for feature in model.features])
        found = build("portable", STEP, machine.facts()).evaluate(scored) @ beta
        print(f"  {name:<20} {100 * float(ape(found, scored.elapsed_us).mean()):.1f}")


def against_the_scorer(knowledge: Knowledge, outside: Outside) -> None:
    """The same snapshot, scored by the independent scorer and by evaluate."""
    print("\nThe same snapshot by the scorer and by evaluate, percentage points apart")
    scorer = outside.tools / "score"
    for name in ("c5_offload", "c6_saturated", "c7_async_sim"):
        with tempfile.TemporaryDirectory() as directory:
            part, snapshot = Path(directory) / "part", Path(directory) / "s.json"
            call([sys.executable, str(scorer / "split.py"), name.split("_")[0], str(part)], scorer)
            pipeline = learned([part / "otlp.pb.gz"], make_pipeline(Config()))
            snapshot.write_bytes(pipeline.snapshot(1, 1).to_json())
            command = [sys.executable, str(scorer / "score.py"), "--snapshot", str(snapshot), "--json"]
            judged = json.loads(call([*command, "--capture", name.split("_")[0]], scorer))
            path = Path(outside.score("capture").path_of(name)) / "otlp.pb.gz"  # with its truth, where it has one
            captures = load_capture([Recording(path, quietly)], knowledge, Config(), CUT)
            report = evaluate(
                captures,
                ("portable",),
                learn_until=CUT,
                left_out="workload",
                version="bench",
                tell=quietly,
                snapshot=Snapshot.from_json(snapshot.read_bytes()),
            )
        ours = next(s for s in report.captures[0].scores if s.system == "snapshot/portable")
        for label, own, theirs in (
            ("step MAPE", ours.step_mape, judged["step"]["mape"]),
            ("mean E2E", ours.e2e, judged["request"]["e2e_mean_err"]),
        ):
            print(f"  {name} {label}: evaluate {100 * own:.2f}, scorer {theirs:.2f}")
            print("  " + verdict(f"{name} {label}, apart", abs(100 * own - theirs), 0.5))


def call(command: list[str], cwd: Path) -> str:
    """Run a tool from outside."""
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def learned(paths: list[Path], pipeline: Pipeline) -> Pipeline:
    """A pipeline that was fed recordings, as ``replay`` does."""
    batch = []
    for timed in merged([Recording(path, quietly) for path in paths]):
        if isinstance(timed, TimedExport):
            batch.append(timed.export)
        if len(batch) == 64:
            pipeline.process(batch)
            batch = []
    pipeline.process(batch)
    pipeline.flush()
    return pipeline


ROWS_OF_A_NEW_ONE = (0, 100, 300, 1000)


def h100_request_tables(outside: Outside) -> None:
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
    judge_left_out(left_out, np.array(new))
    unseen_workloads_of_mixtures(tables, models)


def unseen_workloads_of_mixtures(tables: dict[str, tuple[dict, RowBlock]], models: dict[str, str]) -> None:
    """``physics`` learned from one workload, its step errors on the others of the same mixture."""
    for experiment, (facts, rows) in tables.items():
        if "mixtral" not in experiment:
            continue
        features = build("physics", STEP, facts)
        model = learn(features, rows)
        for other, (_, scored) in tables.items():
            if models[other] == models[experiment] and other != experiment:
                error = 100 * float(ape(predict(model, features, scored), scored.elapsed_us).mean())
                print(verdict(f"{other[16:]}, steps, never seen, %", error, 3.0))


def judge_left_out(left_out: dict[str, float], new: np.ndarray) -> None:
    """Errors of tables whose workload was left out, and (tables, rows) of those whose model was."""
    reasoning = [value for experiment, value in left_out.items() if "reasoning" in experiment]
    usual = [value for experiment, value in left_out.items() if "reasoning" not in experiment]
    print(verdict("workload left out, ordinary, mean %", float(np.mean(usual)), 2.0))
    print(verdict("workload left out, reasoning, mean %", float(np.mean(reasoning)), 8.0))
    print(verdict("model left out, zero rows, median %", float(np.median(new[:, 0])), 6.0))
    for column, (rows, limit) in enumerate(((100, 5.0), (300, 5.0), (1000, 3.0)), 1):
        print(verdict(f"model left out, {rows} rows, mean %", float(new[:, column].mean()), limit))
    print(verdict("100 or 300 rows worse than none, worst, points", float((new[:, 1:3] - new[:, :1]).max()), 5.0))


def replayed_form(
    intercept: float = 0.0, prefill_tokens: float = 0.0, decode_context_tokens: float = 0.0, requests: float = 0.0
) -> dict:
    """Coefficients of ``portable`` as the replay takes them: a decoding request adds itself and a token of context."""
    beta = {"intercept": intercept, "prefill_tokens": prefill_tokens, "n_prefill": requests}
    beta |= {"decode_tokens": requests + decode_context_tokens, "decode_ctx_tokens": decode_context_tokens}
    return {"kind": "linear", "alpha": {}, "beta": beta}


def request_table(path: Path, config: Config) -> tuple[dict, RowBlock]:
    """Facts and step rows of a request table in order of time, as the product makes them."""
    pipeline = make_pipeline(config)
    blocks: list[RowBlock] = []
    facts: dict = {}

    def take(_config_id: str, target: Target, rows: RowBlock, *_rest: object) -> Counter:
        blocks.extend([rows] if target is STEP else [])
        return Counter()

    pipeline._bank.learn = take
    pipeline._bank.describe = lambda _config_id, told: facts.update(told)
    learned([path], pipeline)
    rows = RowBlock.concatenate(blocks)
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


def simulated(_outside: Outside) -> None:
    """What streams of roofline machines can say."""
    unseen_workloads()
    leave_one_configuration_out()
    before_the_first_row()


def recordings(_outside: Outside) -> None:
    """What bundled recordings can say."""
    rows_at_less_telemetry()
    donors_beside_a_cold_start(knowledge_of_captures())


def rows_at_less_telemetry() -> None:
    """Rows that every system learns of those that ``portable`` learns, sampled at 10 % and from journeys alone."""
    print("\nStep rows at less telemetry")
    for name in ("c1_mixed", "c5_offload", "c6_saturated", "c10_long"):
        for percent in (10, 0):
            pipeline = Pipeline(Config(), "bench", knowledge_of_captures())
            facts, rows = thinned_step_rows(pipeline, otlp_file(name), percent)
            learned = {system: len(design(build(system, STEP, facts), rows)) for system in NINE}
            least = 100 * min(learned.values()) / learned["portable"]
            what = f"{name}, {percent} % of {learned['portable']} rows: lost by some system, %"
            print("  " + verdict(what, 100 - least, 5.0))


DONATING = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9", "c10", "f1")


def donors_beside_a_cold_start(knowledge: Knowledge) -> None:
    """Each recording after its first rows, with all others as donors and without."""
    print("\nDonors beside a cold start, step MAPE % after first rows (cold)")
    captures = []
    for path in sorted(path for path in DATA.iterdir() if path.name.split("_")[0] in DONATING):
        captures += load_capture([Recording(path / "otlp.pb.gz", quietly)], knowledge, Config(), CUT)
    worst = {}
    for name, transfers in leave_one_out(captures, "workload", quietly).items():
        for one in transfers:
            if one.system in ("portable", "physics"):
                cells = [f"@{rows} {100 * one.after[rows]:.1f} ({100 * one.cold[rows]:.1f})" for rows in one.after]
                print(f"  {name:<20} {one.system:<9} " + "  ".join(cells))
                worst[name, one.system] = 100 * (one.after["100"] - one.cold["100"])
    for pair in sorted(worst, key=worst.__getitem__)[-3:]:
        print(verdict(f"{' '.join(pair)}: worse than cold after 100 rows, points", worst[pair], 1.0))


def scorer(outside: Outside) -> None:
    """What an independent scorer says."""
    against_the_scorer(knowledge_of_captures(), outside)


SECTIONS = {"simulated": simulated, "recordings": recordings, "scorer": scorer, "h100": h100_request_tables}
NEEDS = {"scorer": ("tools",), "h100": ("tools", "tables")}


def main() -> int:
    """All sections; exit 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="default: all")
    add_arguments(parser)
    options = parser.parse_args()
    for name in options.sections or SECTIONS:
        lacking = [need for need in NEEDS.get(name, ()) if getattr(options, need) is None]
        if lacking:
            print(f"\nSKIPPED {name}: needs " + ", ".join(f"--{need}" for need in lacking))
        else:
            SECTIONS[name](outside_of(options))
    print("\n" + (f"MISSED: {', '.join(failures)}" if failures else "every target holds"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
