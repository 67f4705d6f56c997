"""``make bench WHAT=learning``, merging: is what a merge says of replicas that differ, and of equal ones, true?"""

from __future__ import annotations

import itertools

import numpy as np

from collector.config.schema import Config
from online.bank import Bank, merge_states
from online.blocks import strata_of
from online.rows import Target
from tests.bench.captured import recorded_rows
from tests.support.linear_steps import BETA, steps

RLS = Config(learners=("rls",))
STEP = Target.STEP_TIME
SLOWER = 1.6


def lines(line):
    """``line(what, value, target, ok)`` makes one line."""
    worst_alone = worst_shaped = 0.0
    flagged = wrongly = pairs = 0
    worst_ratio = 0.0
    for seed in range(10):
        streams = [_replica(100 + seed, 1.0), _replica(200 + seed, SLOWER), _replica(300 + seed, 1.0)]
        states = [_state(rows, f"engine-{number}") for number, rows in enumerate(streams)]
        for one, other in itertools.combinations(range(3), 2):
            bank = _merged([states[one], states[other]])
            alone, shaped = _untruth(bank, [streams[one], streams[other]])
            worst_alone, worst_shaped = max(worst_alone, alone), max(worst_shaped, shaped)
            replicas = bank.targets("c")["step_time"].replicas
            if 1 in (one, other):
                pairs += 1
                flagged += all(replica.differs for replica in replicas)
                slow = next(replica.ratio for replica in replicas if replica.engine == "engine-1")
                worst_ratio = max(worst_ratio, abs(slow / SLOWER - 1.0))
            else:
                wrongly += any(replica.differs for replica in replicas)
    yield line("replicas, one 1.6 x slower: flagged", f"{flagged} of {pairs}", f"{pairs}", flagged == pairs)
    yield line("equal replicas flagged", f"{wrongly} of 10", "0", wrongly == 0)
    yield line("the ratio named, worst off by", f"{100 * worst_ratio:.1f} %", "<= 3 %", worst_ratio <= 0.03)
    for name, worst in (("coefficients", worst_alone), ("with factors", worst_shaped)):
        ok = worst <= 0.03
        yield line(f"merged error, {name}: published - true, worst", f"{100 * worst:.2f} pp", "<= 3 pp", ok)
    for capture in ("c10_long", "c5_offload", "c1_mixed"):
        yield from _captured(line, capture)


def _captured(line, capture):
    """A misfitting machine: the recording, and itself 1.6 times slower."""
    rows = recorded_rows(capture)
    slow = rows.take(np.arange(len(rows)))
    slow.elapsed_us[:] *= SLOWER
    bank = _merged([_state(rows, "fast"), _state(slow, "slow")])
    alone, shaped = _untruth(bank, [rows, slow])
    replicas = {replica.engine: replica for replica in bank.targets("c")["step_time"].replicas}
    flagged = all(replica.differs for replica in replicas.values())
    text = f"{100 * alone:.2f}, {100 * shaped:.2f} pp, x{replicas['slow'].ratio:.3f}"
    yield line(f"{capture} and itself slower: both errors, ratio", text, "<= 3 pp", flagged and alone <= 0.03)


def _replica(seed, gain):
    return steps(4000, seed, noise=0.04, autocorrelation=0.9, beta=gain * BETA, stalls=0.002).rows


def _state(rows, engine):
    bank = Bank(RLS)
    bank.learn("c", STEP, rows, engines={int(rows.engine[0]): engine})
    return bank.state()


def _merged(states):
    bank = Bank(RLS)
    bank.restore(merge_states(states, RLS))
    return bank


def _untruth(bank, streams):
    """|published - true| MAPE on all rows of the streams: of the coefficients, and with the shape factors."""
    learner = bank._configs["c"][STEP].models["portable"]
    model = bank.targets("c")["step_time"].models["portable"]
    alone, shaped = [], []
    for rows in streams:
        prediction = learner.features.evaluate(rows) @ learner.members.slow.beta[: len(learner.features)]
        factors = np.exp(learner.log_factors(strata_of(STEP, rows)[1]))
        alone.append(np.minimum(np.abs(prediction / rows.elapsed_us - 1.0), 10.0).mean())
        shaped.append(np.minimum(np.abs(prediction * factors / rows.elapsed_us - 1.0), 10.0).mean())
    return abs(model.error.mape - np.mean(alone)), abs(model.prediction_error.mape - np.mean(shaped))
