"""Banks that have learned rows of one configuration, ``c``, and what they publish of it."""

import numpy as np

from collector.config import Config
from online import Bank, Target

RLS = Config(learners=("rls",))
PORTABLE = Config(learners=("rls",), feature_sets=("portable",))


def of_columns(*names):
    """Settings that learn the time of a step by these columns."""
    return Config(learners=("rls",), feature_sets=("custom",), custom={"step_time": names})


STEP = Target.STEP_TIME


def learned(*parts, settings=RLS, target=STEP, engine=""):
    """A bank after these rows, of an engine that may have a name."""
    bank = Bank(settings)
    for rows in parts:
        bank.learn("c", target, rows, engines={0: engine} if engine else None)
    return bank


def told(bank, target=STEP, config_id="c"):
    """What is published of a target."""
    return bank.targets(config_id)[target.value]


def features_of(bank, target=STEP, name="portable", config_id="c"):
    """Features of a model by name."""
    return {feature.name: feature for feature in told(bank, target, config_id).models[name].features}


def coefficients(bank, **which):
    """Published coefficients in their order, (p,)."""
    return np.array([feature.coefficient for feature in features_of(bank, **which).values()])


def restarted(bank, settings=None):
    """What goes on from its state file."""
    again = Bank(settings or bank.settings)
    again.restore(bank.state())
    return again


def merge_states(parts, settings):
    """One state of several that share no rows, in the order of event time, as a pull adds them."""
    read, whole = [Bank(settings) for _ in parts], Bank(settings)
    for bank, data in zip(read, parts, strict=True):
        bank.restore(data)
    for bank in sorted(read, key=Bank.event_span_ns):
        whole.merge(bank)
    return whole.state()


def merged(*banks):
    """What goes on from a merge of their state files."""
    settings = banks[0].settings
    both = Bank(settings)
    both.restore(merge_states([bank.state() for bank in banks], settings))
    return both
