"""The same streams into the OpenTelemetry Collector, a plain receiver and tracefit, in turn: ``make bench WHAT=peers``.

The Collector (``tests/bench/otel_collector.py``) drops what comes, or puts it into a queue on disk; the plain receiver
(``tests/bench/servers.py``) makes a dict of every event and drops it; tracefit learns from all of it. Figures are CPU
of the server as the kernel accounts it, the lesser of two runs. Without Go nothing is measured, loudly.
"""

from __future__ import annotations

import sys
import tempfile

from tests.bench import otel_collector
from tests.bench.bench_cost import (
    BULK,
    BULK_PROFILE,
    FLAT_OUT,
    ROUNDS,
    SMALL_CALLS,
    STEADY,
    WARMED_STEPS,
    Costs,
    learned_shares,
    loaded,
)
from tests.bench.bench_ingest import Board, foreign_us, measure_sections
from tests.bench.ingest_load import bare, send, sidecar

FOREIGN_LIMIT = 1.5


def beside(board, what, load, arguments, settings):
    """One load into all of them; costs per step, and tracefit's by the Collector's."""
    costs = Costs()
    for _ in range(ROUNDS):
        warm = {"warm_steps": WARMED_STEPS // load["workers"]}
        for kind in otel_collector.KINDS:
            with otel_collector.collector(otel_collector.build(), kind) as server:
                costs.add(kind, send(server, **load, **warm))
        with bare("reference") as server:
            costs.add("plain", send(server, **load, **warm))
        with loaded(*arguments, **settings) as (server, directory):
            report = send(server, **load, **warm)
            server.stop()
            costs.add("tracefit", report, learned_shares(directory, report["steps"] + report["warmed_steps"]))
    for name, us in costs.us.items():
        board.keep(f"{what}: {name}: us/step", us)
    board.keep(f"{what}: ÷ Collector", costs.us["tracefit"] / costs.us["nop"])
    told = ", ".join(f"{name} {us:.1f}" for name, us in costs.us.items())
    board.note(f"{what}: {told} us/step; tracefit ÷ Collector {costs.us['tracefit'] / costs.us['nop']:.2f}")
    costs.judge_rows(board, what, "tracefit")


def steady(board):
    """1,000 steps and 20 requests a second of five engines, the shipped default."""
    beside(board, "1,000 steps/s + requests, shipped default", STEADY, (), {})


def flat_out(board):
    """As fast as it is taken, the bulk profile."""
    beside(board, "flat out, 1,000 steps a call, bulk", FLAT_OUT, BULK_PROFILE, BULK)
    beside(board, "flat out, 64 steps a call, bulk", SMALL_CALLS, BULK_PROFILE, BULK)


def foreign(board):
    """10,000 spans a second that are none of ours: what the Collector's own load tests send."""
    costs_us = {"Collector": [], "tracefit": []}
    for _ in range(ROUNDS):
        with otel_collector.collector(otel_collector.build(), "nop") as server:
            costs_us["Collector"].append(foreign_us(server))
        with tempfile.TemporaryDirectory() as directory, sidecar(directory=directory) as server:
            costs_us["tracefit"].append(foreign_us(server))
    least_us = {name: min(each) for name, each in costs_us.items()}
    for name, us in least_us.items():
        board.keep(f"foreign spans: {name}: us/span", us)
    board.note(", ".join(f"{name} {us:.2f} us/span" for name, us in least_us.items()))
    ratio = least_us["tracefit"] / least_us["Collector"]
    board.at_most("foreign spans, 10,000/s: ÷ Collector", ratio, FOREIGN_LIMIT)


SECTIONS = {section.__name__: section for section in (steady, flat_out, foreign)}


def main():
    """Print every number beside its target."""
    if otel_collector.build() is None:
        sys.stdout.write("NOT MEASURED: there is no Go here to build the OpenTelemetry Collector with\n")
        return 0
    board: Board = measure_sections("peers", SECTIONS, __doc__)
    board.print_table()
    return 1 if board.missed else 0


if __name__ == "__main__":
    sys.exit(main())
