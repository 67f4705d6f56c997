"""Rows of one feature set as a learner takes them."""

from __future__ import annotations

import numpy as np

from online.blocks import Design, strata_of


def design_of(rows, features):
    """The evaluated rows of one set."""
    stratum, cell = strata_of(features.target, rows)
    return Design(
        features.evaluate(rows),
        rows.phase,
        rows.elapsed_us,
        rows.steps.astype(np.float64),
        rows.weight,
        stratum,
        cell,
        rows.end_ns,
    )
