"""How far a coefficient may be off: under the load that it was learned from, and how far it moves with the load.

Sampling error, for rows of single steps (:class:`Meat`): Newey and West on sums of 32 rows' scores, B of which are
remembered, with L = B / 6 lags, 1 to 32.

    score_i = w_i r_i x_i                                        w: weight, r = y - x beta, predicted before learned
    g_t     = sum of the scores of window t, g_ts those of stratum s; rows of weight 1/k fill a k-th of a row
    h_t     = g_t + 2 sum_k (1 - k / (L + 1)) g_{t-k}            k = 1..L
    M_s    <- kept_s^2 M_s + (g_ts h_t' + h_t g_ts') / 2         sum over s: Newey and West's long-run covariance
    V       = C M C B / (B - p) / (1 - (L + 1) / B) (1 + 1.21 / (B - p))^2               C = (A + H)^-1

Noise of the clock or of a neighbour lasts for tens of steps; a mix of shapes, and with it what the form misses, for
hundreds: hence lags that grow with B. A share 1 - (L + 1) / B of the variance is what L lags leave in the mean. Each
stratum forgets by its own rows, as A does; kept is squared because V of a weighted fit has squared weights.

Form error (:class:`Shapes`): no line follows a machine on which batch 3 costs more than 4, and which line comes nearest
depends on the mix of shapes. Clustered by batch shape c, of mean work X_c (p,), n_c rows and usual log ratio U_c of
observed to X_c beta, of which log F_c is believed:

    z_c   = X_c / X_c beta                  n_c: scaled to the effective rows of A
    d_c   = C z_c n_c m_c                   what beta owes to shape c
    m_c^2 = max(e_c^2 / (1 - h_c), t^2)     its misfit                          h_c = n_c z_c' C z_c <= 0.9
    e_c^2 = log F_c^2 - s_c^2 u_c           u_c = min(1, k / min(n_c, 256)): what noise of spread s_c does not explain
    t^2   = sum_c a_c r_c^2 (U_c^2 - s^2 u_c) / sum_c a_c r_c^2 (1 - h_c) (1 + 1.21 / f)^2 >= 0
    W     = D (sum_c d_c d_c') D            D_jj = 1 + 1.21 / f_j   f_j = max((sum d_cj^2)^2 / sum d_cj^4, 4)

with k the sampling variance per variance of independent noise, s^2 the mean of s_c^2 over rows, a_c = r_c = n_c /
(n_c + 8), f = sum_c a_c (1 - h_c). A shape with most of the rows pulls the line through itself: its misfit cannot be
seen in what is left of it, and is taken to be no less than that of the others, t. Without h and t the bars of 720 rows,
four of five of one request, held 15 to 65 % of the line of all shapes; with them 85 %. W does not shrink with the rows:
it says how far a coefficient moves when the mix of shapes changes, and it covers no load that was not seen.

Rows between two scrapes of a page (:func:`jackknife`): G = 16 groups of neighbours, theta_g = fit without group g,

    V = (G - 1) / G sum_g (theta_g - mean)(theta_g - mean)' + diag(floor_j beta_j)^2     floor: 2 % intercept, else 10 %

Sums over a window carry an error that more rows do not average out: where in it the prompts came. Sandwiches of any
kind miss it (their 90 % intervals hold half of the prefill coefficients); the floor was measured, on recordings with
complete telemetry beside the pages.

References: Newey and West (Econometrica 1987); for the bias, Kiefer and Vogelsang (Econometric Theory 2005). CR2: Bell
and McCaffrey, Bias reduction in standard errors for linear regression with multi-stage samples (Survey Methodology
2002). t: DerSimonian and Laird, Meta-analysis in clinical trials (Controlled Clinical Trials 1986). Kunsch, The
jackknife and the bootstrap for general stationary observations (Annals of Statistics 1989).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from online.blocks import STRATA, Design, Groups, median_of
from online.constants import NOISE_ROWS, TINY, TINY_US
from online.rows import Floats, Ints, Mask
from online.shapes import MEMORY_ROWS, believed
from online.state import Stateful

from .solve import solve
from .weights import huber, relative

# Chosen: of 6 and 10 windows per lag, for coverage, on other seeds than the bench's. Guess: 32 lags.
_LAGS_MAX, _WINDOWS_PER_LAG = 32, 6.0
# Guess: windows beyond the number of columns from which on they say something of the noise.
_FREE_MIN = 1.5
# Derived: 1.96 (1 + 1.21 / f) is Student's 97.5 % quantile at f degrees of freedom, within 4 % from f = 2 on.
_STUDENT = 1.21
# Guard: a few shapes and one wild shape do not decide all.
_LEVERAGE_MAX, _FREEDOM_MIN, _LOG_MAX = 0.9, 4.0, 0.5
# Guard: memory and cost. Guess: groups that are long beside the noise, and rows enough for a variance.
JACKKNIFE_ROWS, _GROUPS, _ROWS_MIN = 512, 16, 12
# Measured: on recordings with complete telemetry beside the pages; see the module's head.
_INTERCEPT_FLOOR, _OTHERS_FLOOR = 0.02, 0.10


class Meat(Stateful):
    """M of p columns by stratum, (32, p, p), the sums of the last 32 windows, (32, p), and the open one, (32, p)."""

    SAVED = ("m", "windows", "window", "last", "rows")

    def __init__(self, p: int) -> None:
        self.m, self.windows, self.window = np.zeros((STRATA, p, p)), np.zeros(STRATA), np.zeros((STRATA, p))
        self.last, self.rows = np.zeros((_LAGS_MAX, p)), 0.0

    def learn(self, block: Design, kept: Floats, scores: Floats) -> None:
        """Scores (n, p) of a block, forgotten as its later rows make them; kept (g,): by its strata of their past."""
        ids = block.grouped().ids
        self.window[ids] *= kept[:, None]
        self.m[ids] *= (kept * kept)[:, None, None]
        self.windows[ids] *= kept * kept
        filled = self.rows + np.cumsum(block.weight)
        closed = int(filled[-1] // NOISE_ROWS)
        number = np.minimum(np.maximum(np.ceil(filled / NOISE_ROWS) - 1.0, 0.0), closed).astype(np.int64)
        groups = Groups.of(number * STRATA + block.stratum)
        sums = np.zeros(((closed + 1) * STRATA, scores.shape[1]))
        sums[groups.ids] = np.add.reduceat(scores.take(groups.order, axis=0), groups.starts, axis=0)
        sums[:STRATA] += self.window
        self.window = sums[-STRATA:]
        self.rows = float(filled[-1]) - closed * NOISE_ROWS
        if closed:
            self._close(sums[:-STRATA].reshape(closed, STRATA, -1))

    def _close(self, sums: Floats) -> None:
        """Windows that are full, (windows, 32, p)."""
        count = len(sums)
        run = np.concatenate([self.last, sums.sum(axis=1)])
        self.last = run[-_LAGS_MAX:]
        # Windows number t - 32 to t of each window t, (windows, p, 33), and what each of them counts.
        before = np.lib.stride_tricks.sliding_window_view(run, _LAGS_MAX + 1, axis=0)
        remembered: Floats = float(self.windows.sum()) + np.arange(count, dtype=np.float64)
        bandwidth = _lags(remembered) + 1.0
        bartlett = 2.0 * np.maximum(1.0 - np.arange(_LAGS_MAX, -1.0, -1.0) / bandwidth[:, None], 0.0)
        bartlett[:, -1] = 1.0
        h = (before @ bartlett[:, :, None])[:, :, 0]
        products = (sums.reshape(count, -1).T @ h).reshape(self.m.shape)
        self.m += 0.5 * (products + products.transpose(0, 2, 1))
        # A window is shared out as the rows are: by nothing better than which strata took part.
        part = sums.any(axis=2)
        self.windows += (part / np.maximum(part.sum(axis=1), 1)[:, None]).sum(axis=0)

    def of_scores(self, columns: int) -> Floats | None:
        """M for a fit of so many columns, with the corrections for few windows, (p, p); None while they are too few."""
        count = float(self.windows.sum())
        free = count - columns
        if free < _FREE_MIN:
            return None
        matrix: Floats = self.m.sum(axis=0)
        spare = (count / free) / (1.0 - float(_lags(count) + 1.0) / count)
        return matrix * (spare * (1.0 + _STUDENT / free) ** 2)

    def carries(self, columns: int) -> bool:
        """Whether there are windows enough for a fit of so many columns to be called known: 2 p + 2."""
        return float(self.windows.sum()) >= 2 * columns + _FREE_MIN

    def discount(self, keep: float) -> None:
        """Keep this share of the evidence, whose weights are squared here."""
        self.m *= keep * keep
        self.windows *= keep * keep
        self.window *= keep
        self.last *= keep

    def decay(self, spent: Floats) -> None:
        """Forget as the strata do; see Strata.decay."""
        squared = np.exp2(-2.0 * np.minimum(spent, 500.0))
        self.m *= squared[:, None, None]
        self.windows *= squared

    def add(self, other: Meat) -> None:
        """Evidence of both; open windows are not joined."""
        self.m += other.m
        self.windows += other.windows

    def widen(self, more: int) -> None:
        """``more`` columns, never seen, at the end."""
        self.m = np.pad(self.m, ((0, 0), (0, more), (0, more)))
        self.window, self.last = (np.pad(each, ((0, 0), (0, more))) for each in (self.window, self.last))


def _lags(windows: Floats | float) -> Floats:
    """L of so many windows that are remembered."""
    lags: Floats = np.minimum(np.maximum(np.asarray(windows) / _WINDOWS_PER_LAG, 1.0), _LAGS_MAX)
    return lags


def not_below(covariance: Floats, least: Floats) -> Floats:
    """The covariance (q, q), raised to ``least`` (q, q) in every direction in which it is below it.

    In the coordinates in which ``least`` is the identity, eigenvalues below 1 become 1: a sum of coefficients, too, has
    no smaller error than independent noise of the rows gives it.
    """
    values, vectors = np.linalg.eigh(least)
    root = vectors * np.sqrt(np.maximum(values, values[-1:] * 1e-14 + TINY))
    whiten = np.linalg.inv(root)
    values, vectors = np.linalg.eigh(whiten @ covariance @ whiten.T)
    sides = (root @ vectors) * np.sqrt(np.maximum(values, 1.0))
    raised: Floats = sides @ sides.T
    return raised


@dataclass(frozen=True, slots=True)
class Shapes:
    """G batch shapes: x (G, p), log F (G,), spread (G,), rows seen and rows behind A (G,)."""

    x: Floats
    log_factor: Floats
    spread: Floats
    seen_rows: Floats
    rows: Floats

    def covariance(self, beta: Floats, c: Floats, on: Ints, inflation: float) -> Floats:
        """W of the columns ``on``, (q, q); c (q, q): their part of (A + H)^-1, ``inflation``: k above."""
        z = self.x[:, on] / np.maximum(self.x @ beta, TINY_US)[:, None]
        explained = np.minimum(inflation / np.minimum(self.seen_rows, MEMORY_ROWS), 1.0)
        squared = np.minimum(self.log_factor**2, _LOG_MAX**2)
        moved = z @ c
        leverage = np.minimum(self.rows * np.einsum("ij,ij->i", moved, z), _LEVERAGE_MAX)
        own = (squared - self.spread**2 * explained) / (1.0 - leverage)
        weight = self.rows**2 * np.maximum(own, self._typical(squared, explained, leverage))
        parts = weight[:, None] * moved**2
        total = parts.sum(axis=0)
        freedom = np.maximum(total**2 / np.maximum((parts**2).sum(axis=0), TINY), _FREEDOM_MIN)
        student = 1.0 + _STUDENT / freedom
        covariance: Floats = ((moved * weight[:, None]).T @ moved) * student * student[:, None]
        return covariance

    def _typical(self, squared: Floats, explained: Floats, leverage: Floats) -> float:
        """t^2 of the module's equations, by log F^2 (G,), the share u of noise that is in it (G,) and h (G,).

        The noise of shapes with few rows counts as far as they are believed, as their misfit does: whole, it would hide
        what all of them show together.
        """
        spread = float(self.rows @ self.spread**2) / max(float(self.rows.sum()), TINY)
        share = believed(self.seen_rows)
        freedom = max(float(share @ (1.0 - leverage)), 1.0)
        told = share**3
        beyond = max(float(share @ squared - spread * (told @ explained)), 0.0)
        per_shape = beyond / max(float(told @ (1.0 - leverage)), TINY_US)
        return min(per_shape * (1.0 + _STUDENT / freedom) ** 2, _LOG_MAX**2)


def jackknife(rows: Design, beta: Floats, scale: float, intercept: Mask) -> Floats | None:
    """V of the columns of ``rows``, (p, p), which beta (p,) fits with residuals of this scale; None of too few rows."""
    p, n, x, y = len(beta), len(rows), rows.x, rows.elapsed_us
    if n < _ROWS_MIN:
        return None
    u, per_unit = relative(y, rows.steps, rows.weight, x @ beta, median_of(y / rows.steps))
    xw = x * (huber(u, scale) * per_unit * per_unit)[:, None]
    groups = min(_GROUPS, n // 2)
    starts = np.arange(groups) * n // groups
    a = np.add.reduceat(xw[:, :, None] * x[:, None, :], starts, axis=0)
    b = np.add.reduceat(xw * y[:, None], starts, axis=0)
    a_all, b_all, free = a.sum(axis=0), b.sum(axis=0), np.zeros(p, np.bool_)
    without = np.array([solve(a_all - a[g], b_all - b[g], free, beta > 0.0).beta for g in range(groups)])
    apart = without - without.mean(axis=0)
    floors = np.where(intercept, _INTERCEPT_FLOOR, _OTHERS_FLOOR) * beta
    covariance: Floats = (groups - 1) / groups * (apart.T @ apart) + np.diag(floors**2)
    return covariance
