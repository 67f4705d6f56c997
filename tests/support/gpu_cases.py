"""Servers of the bench of GPUs: the forty, and others drawn at random from all that the kernel times know.

The forty are ten models on four GPUs, with one traffic and one exam. Others have any model that the package says runs
on vLLM there, as its ``config.json`` quantizes it, with limits, traffic and exam of their own. All of that follows
from a seed; half of them are mixtures of experts.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.gpu_kernels import DENSE, GPUS, MIXTURES, Machine, model_facts, package_directory
from tests.support.vllm_scheduler import Limits

FORTY = ("H100", "H200", "L40S", "B200")
LOOPS = (
    (1, 256, 128),
    (3, 1200, 150),
    (6, 2500, 80),
    (12, 200, 300),
    (24, 600, 250),
    (48, 500, 200),
    (96, 900, 120),
)
"""Clients, mean prompt and output tokens of the exam."""
MIXES = ((350, 180), (2000, 100), (120, 450), (1000, 70), (500, 260))
"""Mean prompt and output tokens of the traffic."""
_CLIENTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96)


class Case(NamedTuple):
    """One server; ``seed`` is added to those of traffic and exam."""

    kind: str
    model: str
    gpu: str
    machine: Machine
    limits: Limits
    mixes: tuple[tuple[int, int], ...] = MIXES
    loops: tuple[tuple[int, int, int], ...] = LOOPS
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.model}/{self.gpu}"


def all_cases() -> list[Case]:
    """The forty. Every other one is synchronous, so that each model and each GPU has both."""
    return [
        Case(kind, model, gpu, machine, Limits(asynchronous=bool((row + column) % 2)))
        for kind, machines in (("dense", DENSE), ("mixtures", MIXTURES))
        for row, (model, machine) in enumerate(machines.items())
        for column, gpu in enumerate(FORTY)
    ]


def others(seed: int) -> Iterator[Case]:
    """Servers without end, dense ones and mixtures in turn; the package may have no times of some of them."""
    rng = random.Random(seed)
    kinds: dict[str, list[tuple[str, str, int, int]]] = {"dense": [], "mixtures": []}
    for model, gpu in _pairs():
        facts = model_facts(model)
        experts, per_token = (int(facts.get(name, 0)) for name in ("num_experts", "num_experts_per_tok"))
        kinds["mixtures" if experts else "dense"].append((model, gpu, experts, per_token))

    def tokens(least: int, most: int) -> int:
        return round(math.exp(rng.uniform(math.log(least), math.log(most))))

    while True:
        for kind, known in kinds.items():
            model, gpu, experts, per_token = rng.choice(known)
            machine = Machine(model, rng.choice((1, 2, 4, 8)), None, experts, per_token)
            slots, budget = rng.choice((64, 128, 256, 512)), rng.choice((1024, 2048, 4096, 8192))
            limits = Limits(slots, budget, asynchronous=rng.random() < 0.5)
            mixes = tuple((tokens(120, 2800), tokens(40, 500)) for _ in MIXES)
            clients = sorted(rng.sample(_CLIENTS, len(LOOPS)))
            loops = tuple((count, tokens(150, 3000), tokens(40, 400)) for count in clients)
            yield Case(kind, model.split("/")[1], gpu, machine, limits, mixes, loops, rng.randrange(1, 10**6))


def _pairs() -> list[tuple[str, str]]:
    """Models and GPUs that the package says it has kernel times of, without the forty; in order."""
    mine = {(machine.model, gpu) for machine in (*DENSE.values(), *MIXTURES.values()) for gpu in FORTY}
    directory = package_directory() / "systems" / "support_matrix"
    pairs = {
        (row["HuggingFaceID"], gpu)
        for gpu, system in GPUS.items()
        for row in csv.DictReader((directory / f"{system}.csv").read_text().split("\n"))
        if (row["Backend"], row["Mode"], row["Status"]) == ("vllm", "agg", "PASS")
    }
    return sorted(pairs - mine)
