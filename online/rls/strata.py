"""Decayed sufficient statistics, one set per stratum, each on a sample clock of its own.

A row of a block, z = [x, phase, y, l] of shape (q,), weight w, covers l steps and takes y microseconds. Per stratum s

    G_s <- 2^(-sum e_i) G_s + sum_i 2^(-age_i) w_i z_i z_i'        G: (32, q, q)
    e_i = l_i / half-life * weight_i                     age_i = sum of e over the later rows of s

so a stratum forgets by what happens in it: what is not visited is not forgotten (Kulhavy's directional forgetting, with
accuracy equal to it and with merging still exact). The blocks of sum_s G_s are A (p, p), b (p,), y'Wy, the sums over l
(for excitation), and

    n1_s = sum 2^(-age) h v    n2_s = sum 2^(-2 age) h^2 v    h: Huber's share, v: the row's weight; n1^2 / n2 =
    effective rows: k rows of weight 1 / k that see the same are one

Where a stratum is visited more often than the others it forgets faster, so rare ones weigh more than their share.
So the line fits the remembered mix of loads, which differs from the real mix where no line fits.

Operating points (:class:`OperatingPoints`) are finer: octaves of the batch and of the context per request. A linear
form is right to a per cent or two at any one point, however many rows say so. Weighing a point by its rows would
trust its misfit; each point therefore counts as one observation (online/transfer/sheet.py).

Error bars (:class:`ScoreCovariance`) have Newey and West's covariance M of sums of 32 rows' scores, B of which are
remembered, with L = B / 6 lags, 1 to 64.

    score_i = w_i (y_i - x_i beta) x_i           predicted before learned; w: weight
    g_t     = sum of the scores of window t, g_ts those of stratum s; rows of weight 1/k fill a k-th of a row
    h_t     = g_t + 2 sum_k (1 - k / (L + 1)) g_{t-k}            k = 1..L
    M_s    <- kept_s^2 M_s + (g_ts h_t' + h_t g_ts') / 2         sum over s: Newey and West's long-run covariance
    M       = sum_s M_s B / (B - p) / (1 - (L + 1) / B) (1 + 1.21 / (B - p))^2

Noise of the clock or of a neighbour lasts for tens of steps; a mix of shapes, and with it what the form misses, for
hundreds: hence lags that grow with B. A share 1 - (L + 1) / B of the variance is what L lags leave in the mean; the
last factor makes 1.96 se Student's 95 %. Each stratum forgets by its own rows, as A does; kept is squared because V of
a weighted fit has squared weights.

Guarantees: adding statistics equals learning the rows together, to rounding, but for operating points, which learn by
their own clock and are decayed by their strata's. Nothing that is learned is divided by a feature or a time, so finite
rows leave it finite.
References: Kulhavy, Restricted exponential forgetting in real-time identification (Automatica 1987); Newey and West
(Econometrica 1987); for the bias, Kiefer and Vogelsang (Econometric Theory 2005).
"""

from __future__ import annotations

import math

import numpy as np

from online.blocks import STRATA, Design, Groups
from online.constants import HALF_LIFE_STEPS, NOISE_ROWS, TINY
from online.features import portable
from online.rows import Floats, Ints, Quality, Target
from online.state import Stateful

from .solve import RELATIVE_RIDGE

# Batches of 2^15 requests and contexts of 2^17 tokens share the last octave, contexts below 2^10 the first. Guess.
_BATCHES, _CONTEXTS, _SHORT = STRATA // 2, 9, 9
_COLUMNS = [column.name for column in portable(Target.STEP_TIME).columns]
_CONTEXT, _REQUESTS = _COLUMNS.index("decode_context_tokens"), _COLUMNS.index("requests")
# Chosen: of 32 and 64 lags, and of 6 and 10 windows per lag, for coverage, on other seeds than the bench's.
_LAGS_MAX, _WINDOWS_PER_LAG = 64, 6.0


class Strata(Stateful):
    """Statistics of q augmented columns in 32 strata: p features and phases, the target, the steps.

    Attributes:
        g: G by stratum, (32, q, q).
        n1, n2: n1 and n2, (32,).
        clock: half-lives that each stratum has seen, (32,).
        scores: what the rows' scores tell of error bars.
        points: the same statistics by operating point, where asked for (``by_point``).
    """

    SAVED = ("g", "n1", "n2", "clock", "scores", "points")

    def __init__(self, q: int, *, by_point: bool = False) -> None:
        self.q = q
        self.g = np.zeros((STRATA, q, q))
        self.n1, self.n2, self.clock = np.zeros(STRATA), np.zeros(STRATA), np.zeros(STRATA)
        self.scores = ScoreCovariance(q - 2)
        self.points = OperatingPoints(q) if by_point else None

    def learn(self, block: Design, z: Floats, weight: Floats, share: Floats, prediction: Floats) -> None:
        """Add rows: z (n, q), weight (n,), share of Huber (n,), and what was predicted of each, (n,)."""
        groups, e = block.groups, block.steps * block.weight / HALF_LIFE_STEPS
        ids, decay, kept, spent = groups.ids, *_decays(groups, e)
        self.g[ids] = self.g[ids] * kept[:, None, None] + _products(groups, z, weight, decay)
        h = share.take(groups.order) * decay
        counted = h * block.weight.take(groups.order)
        self.n1[ids] = self.n1[ids] * kept + np.add.reduceat(counted, groups.starts)
        self.n2[ids] = self.n2[ids] * (kept * kept) + np.add.reduceat(counted * h, groups.starts)
        self.clock[ids] += spent
        left = np.empty_like(decay)
        left[groups.order] = decay
        self.scores.learn(block, kept, z[:, :-2] * (left * weight * (block.elapsed_us - prediction))[:, None])
        if self.points is not None:
            self.points.learn(z, block.end_ns, weight, share * block.weight, e)

    # ---------------------------------------------------------------- reading

    def total(self) -> Floats:
        """Sum over the strata, (q, q)."""
        total: Floats = self.g.sum(axis=0)
        return total

    def effective_rows(self) -> float:
        """n1^2 / n2 over all strata."""
        squares = float(self.n2.sum())
        return float(self.n1.sum()) ** 2 / squares if squares > 0.0 else 0.0

    def spread(self) -> Floats:
        """Coefficient of variation of each feature per step, (p,), over the strata in which it is not 0.

        So steps without prefill do not count for prefill columns: beside them a chunk shows only its whole cost. Only
        chunks of several sizes show what a token costs.
        """
        p = self.q - 2
        squares = self.g.diagonal(axis1=1, axis2=2)[:, :p]
        steps = ((squares > 0.0) * self.g[:, -1:, -1]).sum(axis=0)
        crossed = self.g[:, :p, -1].sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(crossed > 0.0, squares.sum(axis=0) * steps / crossed**2, np.inf)
        return np.sqrt(np.maximum(ratio - 1.0, 0.0))

    def slope_inside(self, column: int, scale: float) -> float | None:
        """What a unit of a column costs among steps of about one size without prefill; None unless sure to a tenth.

        No line follows padded batches and rooflines, so a coefficient of one line through all steps stands in for them
        as far as they come with its column. An intercept and slopes of each stratum's own take that up (Frisch and
        Waugh 1933):

            d_s = A_jj - A_jo A_oo^-1 A_oj      n_s = b_j - A_jo A_oo^-1 b_o          o: the other features
            slope = sum_s n_s / sum_s d_s       sd = scale / sqrt(sum_s d_s)          scale: of the residuals
        """
        target = self.q - 2
        others = np.array([each for each in range(target) if each != column], np.int64)
        strata = self.g[: STRATA // 2]
        strata = strata[strata[:, column, column] > TINY]
        diagonal = strata[:, others, others]
        present = diagonal > TINY
        # A column that has nothing to say in a stratum is its own row of the identity there.
        norm = present / np.sqrt(np.where(present, diagonal, 1.0))
        system = strata[:, others[:, None], others] * norm[:, :, None] * norm[:, None]
        system[:, range(len(others)), range(len(others))] = 1.0 + RELATIVE_RIDGE
        crossed = strata[:, others[:, None], [column, target]] * norm[:, :, None]
        explained = (crossed[:, :, :1] * np.linalg.solve(system, crossed)).sum(axis=1)
        left = strata[:, column, [column, target]] - explained
        varies = left[:, 0] > 100.0 * RELATIVE_RIDGE * strata[:, column, column]
        total, wanted = left[varies].sum(axis=0).tolist()
        slope = wanted / total if total > 0.0 else 0.0
        return slope if slope > 0.0 and slope * math.sqrt(total) > 10.0 * scale else None

    # ---------------------------------------------------------------- changing what is known

    def discount(self, keep: float, time_ratio: float, *, prefill: bool = False) -> None:
        """Keep a share of the rows, or of those with ``prefill``, as if their work had taken so many times as long.

        With g the ratio, y becomes g y and w = l / yhat^2 becomes w / g^2, as if the rows had come after the change;
        n1 and n2 are both linear in the weight v of a row. Operating points mix rows with prefill and without: where
        not all strata changed, they are to forget as much, but keep the speed of most of their rows.
        """
        scale = np.full(self.q, 1.0 / time_ratio)
        scale[-2] = 1.0
        strata = slice(STRATA // 2 if prefill else 0, None)
        new_speed = keep * np.outer(scale, scale)
        self.g[strata] *= new_speed
        self.n1[strata] *= keep
        self.n2[strata] *= keep
        self.scores.discount(keep, time_ratio, strata)
        if self.points is not None:
            self.points.g *= keep if prefill else new_speed
            self.points.rows *= keep

    def decay(self, half_lives: Floats) -> None:
        """Forget as if rows worth ``half_lives`` (32,) half-lives had been learned in each stratum."""
        kept = np.exp2(-half_lives)
        self.g *= kept[:, None, None]
        self.n1 *= kept
        self.n2 *= kept * kept
        self.scores.decay(half_lives)
        if self.points is not None:
            at = np.repeat(np.exp2(-half_lives.reshape(-1, _BATCHES).max(axis=0)), _CONTEXTS)
            self.points.g *= at[:, None, None]
            self.points.rows *= at

    def add(self, other: Strata) -> None:
        """Add another's statistics; the caller has decayed both to the same age."""
        self.g += other.g
        self.n1 += other.n1
        self.n2 += other.n2
        self.clock += other.clock
        self.scores.add(other.scores)
        if self.points is not None and other.points is not None:
            self.points.add(other.points)


class OperatingPoints(Stateful):
    """G and rows by operating point, (144, q, q) and (144,), without Huber's share squared and without a clock.

    The last column is l t, t in seconds since ``origin_ns``, the first row, and tells when a point was visited; l
    itself is the first column, the intercept.
    """

    SAVED = ("g", "rows", "origin_ns")

    def __init__(self, q: int) -> None:
        self.g, self.rows = np.zeros((_BATCHES * _CONTEXTS, q, q)), np.zeros(_BATCHES * _CONTEXTS)
        self.origin_ns = 0

    def learn(self, z: Floats, end_ns: Ints, weight: Floats, counted: Floats, half_lives: Floats) -> None:
        """Add rows z (n, q) of weight (n,), counted as rows (n,), each worth so many half-lives (n,)."""
        self.origin_ns = self.origin_ns or int(end_ns[0])
        groups = Groups.of(points_of(z))
        at, decay, kept, _ = groups.ids, *_decays(groups, half_lives)
        timed = z.copy()
        timed[:, -1] *= (end_ns - self.origin_ns) * 1e-9
        self.g[at] = self.g[at] * kept[:, None, None] + _products(groups, timed, weight, decay)
        self.rows[at] = self.rows[at] * kept + np.add.reduceat(counted.take(groups.order) * decay, groups.starts)

    def add(self, other: OperatingPoints) -> None:
        """Statistics of both."""
        self.origin_ns = self.origin_ns or other.origin_ns
        moved = np.eye(self.g.shape[1])  # t counts from another moment there: l t becomes l (t + shift)
        moved[-1, 0] = (other.origin_ns - self.origin_ns) * 1e-9 if other.origin_ns else 0.0
        self.g += moved @ other.g @ moved.T
        self.rows += other.rows


class ScoreCovariance(Stateful):
    """The long-run covariance of p columns' scores.

    Attributes:
        m: M by stratum, (32, p, p).
        windows: how many are remembered, by stratum, (32,).
        last: g of the last 64 windows, (64, p).
        window, rows: g_s of the window that is not full yet, (32, p), and how many rows are in it.
    """

    SAVED = ("m", "windows", "window", "last", "rows")

    def __init__(self, p: int) -> None:
        self.m, self.windows = np.zeros((STRATA, p, p)), np.zeros(STRATA)
        self.last = np.zeros((_LAGS_MAX, p))
        self.window, self.rows = np.zeros((STRATA, p)), 0.0

    def learn(self, block: Design, decay: Floats, scores: Floats) -> None:
        """Add scores (n, p) of a block, decayed by its later rows; ``decay`` (g,): of what its strata had before."""
        ids = block.groups.ids
        self.window[ids] *= decay[:, None]
        self.m[ids] *= (decay * decay)[:, None, None]
        self.windows[ids] *= decay * decay
        filled = self.rows + np.cumsum(block.weight * np.where(block.quality == Quality.METRICS, NOISE_ROWS, 1.0))
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
        remembered: Floats = float(self.windows.sum()) + np.arange(count, dtype=np.float64)
        bandwidth = _lags(remembered) + 1.0
        bartlett = 2.0 * np.maximum(1.0 - np.arange(_LAGS_MAX, -1.0, -1.0) / bandwidth[:, None], 0.0)
        bartlett[:, -1] = 1.0
        # Windows number t - 64 to t of each window t, and what each of them counts.
        h = np.array([counts @ run[t : t + _LAGS_MAX + 1] for t, counts in enumerate(bartlett)])
        products = (sums.reshape(count, -1).T @ h).reshape(self.m.shape)
        self.m += 0.5 * (products + products.transpose(0, 2, 1))
        # A window is shared out as the rows are: by nothing better than which strata took part.
        part = sums.any(axis=2)
        self.windows += (part / np.maximum(part.sum(axis=1), 1)[:, None]).sum(axis=0)

    def of_scores(self, columns: int) -> Floats | None:
        """M for a fit of so many columns, with the corrections for few windows, (p, p); None while they are too few."""
        count = float(self.windows.sum())
        free = count - columns
        if free <= 1.0:
            return None
        matrix: Floats = self.m.sum(axis=0)
        spare = (count / free) / (1.0 - float(_lags(count) + 1.0) / count)
        # 1.96 (1 + 1.21 / f) is Student's 97.5 % quantile at f degrees of freedom, within 4 % from f = 6 on.
        return matrix * (spare * (1.0 + 1.21 / free) ** 2)

    def discount(self, keep: float, time_ratio: float, strata: slice) -> None:
        """See Strata.discount; scores scale as w y. Open windows have the old speed and are dropped."""
        self.m[strata] *= keep / time_ratio**2
        self.windows[strata] *= keep
        self.window[strata], self.last, self.rows = 0.0, np.zeros_like(self.last), 0.0

    def decay(self, half_lives: Floats) -> None:
        """Forget as the strata do; see Strata.decay."""
        squared = np.exp2(-2.0 * half_lives)
        self.m *= squared[:, None, None]
        self.windows *= squared

    def add(self, other: ScoreCovariance) -> None:
        """Statistics of both; open windows are not joined."""
        self.m += other.m
        self.windows += other.windows


def points_of(z: Floats) -> Ints:
    """Operating point of each row, (n,): (floor(log2 requests), floor(log2 context per request))."""
    requests = np.maximum(z[:, _REQUESTS], 1e-9)
    batch = np.minimum(np.maximum(np.frexp(requests / z[:, -1])[1] - 1, 0), _BATCHES - 1)
    context = np.minimum(np.maximum(np.frexp(z[:, _CONTEXT] / requests)[1] - 1 - _SHORT, 0), _CONTEXTS - 1)
    points: Ints = (batch * _CONTEXTS + context).astype(np.int64)
    return points


def _decays(groups: Groups, e: Floats) -> tuple[Floats, Floats, Floats]:
    """What later rows leave of each row, (n,) in the order of the groups; what a group keeps, and what it spends, (g,).

    ``e``: half-lives that each row is worth, (n,).
    """
    running = np.cumsum(e.take(groups.order))
    ends = running.take(groups.starts + groups.sizes - 1)
    spent = np.diff(ends, prepend=0.0)
    return np.exp2(running - np.repeat(ends, groups.sizes)), np.exp2(-spent), spent


def _products(groups: Groups, z: Floats, weight: Floats, decay: Floats) -> Floats:
    """Sum of w z z' over each group, (g, q, q): a matrix product each, which is faster than sums of columns."""
    right, q = z.take(groups.order, axis=0), z.shape[1]
    left = right * (weight.take(groups.order) * decay)[:, None]
    products = np.empty((len(groups.starts), q, q))
    for out, start, size in zip(products, groups.starts.tolist(), groups.sizes.tolist(), strict=True):
        np.dot(left[start : start + size].T, right[start : start + size], out=out)
    return products


def _lags(windows: Floats | float) -> Floats:
    """L of so many windows that are remembered."""
    return np.minimum(np.maximum(np.asarray(windows) / _WINDOWS_PER_LAG, 1.0), _LAGS_MAX)
