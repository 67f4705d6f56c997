"""A snapshot's published coefficients on a capture: scored as they are, nothing learned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from online import ConfigSnapshot, Floats, RowBlock, Snapshot, Target
from online.features import FeatureSet, build

from .captures import Capture
from .fits import ape
from .paths import RequestPath
from .scores import Score, request_scores, score_of

STEP = Target.STEP_TIME
ALPHAS = (Target.API_QUEUEING, Target.POST_DECODE)


class _Coefficients:
    """Coefficients of a snapshot as something that predicts."""

    def __init__(self, features: FeatureSet, beta: Floats) -> None:
        self.features, self.beta = features, beta

    def predict(self, rows: RowBlock) -> Floats:
        """Microseconds per row, (n,); NaN where a column is not known."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.features.evaluate(rows) @ self.beta)


def published_scores(
    snapshot: Snapshot | None,
    capture: Capture,
    scored: RowBlock,
    rows: RowBlock,
    paths: Sequence[RequestPath],
    *,
    requests_only: bool,
) -> list[Score]:
    """The published models of a snapshot, scored as they are."""
    config = _config_in(snapshot, capture)
    target = None if config is None else config.targets.get(STEP.value)
    out: list[Score] = []
    for name, model in {} if target is None else sorted(target.models.items()):
        features = build(name, STEP, capture.facts) if "/" not in name and model.features else None
        if features is None:
            continue
        values = {f.name: f.coefficient for f in model.features}
        published = _Coefficients(features, np.array([values.get(column, 0.0) for column in features.names]))
        alphas = _published_alphas(config, paths)
        prediction = published.predict(scored)
        errors = ape(prediction, scored.elapsed_us)
        if len(errors) == 0:
            continue
        by_score: dict[str, float | None] = {}
        if not requests_only:
            by_score |= request_scores(paths, published.predict(rows), alphas)
        by_score |= {
            "step_mape": float(errors.mean()),
            "step_median": float(np.median(errors)),
            "step_p90": float(np.quantile(errors, 0.9)),
        }
        out.append(
            score_of(
                by_score,
                system=f"snapshot/{name}",
                columns=len(features),
                identifiable=sum(f.status == "identified" for f in model.features),
                learned_rows=model.rows,
                scored_rows=len(errors),
                requests=len(paths),
            )
        )
    return out


def _config_in(snapshot: Snapshot | None, capture: Capture) -> ConfigSnapshot | None:
    if snapshot is None or not snapshot.configs:
        return None
    same = [config for config in snapshot.configs if config.config_id == capture.config_id]
    return same[0] if same else snapshot.configs[0] if len(snapshot.configs) == 1 else None


def _published_alphas(config: ConfigSnapshot | None, paths: Sequence[RequestPath]) -> dict[str, Floats]:
    out: dict[str, Floats] = {}
    columns = {
        "intercept": np.ones(len(paths)),
        "prompt_tokens": np.array([p.request.prompt_tokens for p in paths], float),
        "output_tokens": np.array([p.request.output_tokens for p in paths], float),
    }
    for target in ALPHAS:
        published = None if config is None else config.targets.get(target.value)
        model = None if published is None else published.models.get("portable")
        if model is not None:
            terms = [f.coefficient * columns[f.name] for f in model.features if f.name in columns]
            out[target.value] = np.asarray(sum(terms, np.zeros(len(paths))))
    return out
