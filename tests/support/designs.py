"""Rows of one feature set in blocks, as a learner takes them."""

from online.blocks import Design


def learn(learner, rows):
    """A learner's own set, in blocks of 32 rows."""
    for start in range(0, len(rows), 32):
        learner.learn(Design.of(learner.features, rows.slice(start, min(start + 32, len(rows)))))
    return learner
