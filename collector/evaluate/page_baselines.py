"""What users of a ``/metrics`` page have otherwise: two models of the mean inter-token latency of a window.

    line      ITL = A k + B, k: mean KV usage; ordinary least squares over at least ten points with 0.15 <= k <= 0.85
    kalman    state (alpha, beta, gamma):  ITL = alpha + beta B,  TTFT = alpha + gamma P     B: batch, P: prompt tokens
              random walk with 1 % process noise per cycle, 10 % observation noise

Both average over the cycle; neither knows a step. ``points_min`` 10 is the line's own rule; a shorter recording has
none by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from online import Floats

LINE_POINTS_MIN = 10
LINE_RANGE = (0.15, 0.85)
_PROCESS, _OBSERVATION = 0.01, 0.10


def fit_line(kv_usage: Floats, itl_s: Floats, *, points_min: int = LINE_POINTS_MIN) -> tuple[float, float] | None:
    """(A, B), or None where the points are too few; points outside the range do not count if enough are inside."""
    inside = (kv_usage >= LINE_RANGE[0]) & (kv_usage <= LINE_RANGE[1])
    if int(np.count_nonzero(inside)) < points_min:
        inside = np.isfinite(kv_usage)
    if int(np.count_nonzero(inside)) < points_min:
        return None
    columns = np.stack((kv_usage[inside], np.ones(int(np.count_nonzero(inside)))), axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, itl_s[inside], rcond=None)
    return float(a), float(b)


@dataclass(slots=True)
class KalmanCycle:
    """One update per cycle of means."""

    state: Floats = field(default_factory=lambda: np.zeros(3))
    covariance: Floats = field(default_factory=lambda: np.eye(3) * 1e6)

    def learn(self, batch: float, prompt_tokens: float, itl_s: float, ttft_s: float) -> None:
        """Take the means of one cycle."""
        observe = np.array([[1.0, batch, 0.0], [1.0, 0.0, prompt_tokens]])
        seen = np.array([itl_s, ttft_s])
        known = np.isfinite(observe).all(axis=1) & np.isfinite(seen)
        observe, seen = observe[known], seen[known]
        if not len(seen):
            return
        self.covariance = self.covariance + np.diag((_PROCESS * np.maximum(np.abs(self.state), 1e-9)) ** 2)
        noise = np.diag((_OBSERVATION * np.maximum(seen, 1e-9)) ** 2)
        gain = self.covariance @ observe.T @ np.linalg.inv(observe @ self.covariance @ observe.T + noise)
        self.state = self.state + gain @ (seen - observe @ self.state)
        self.covariance = (np.eye(3) - gain @ observe) @ self.covariance

    def predict(self, batch: float) -> float:
        """Mean inter-token latency at a batch, in seconds."""
        return float(max(self.state[0] + self.state[1] * batch, 0.0))
