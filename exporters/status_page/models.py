"""Models side by side: those with coefficients compete, those that only predict stand apart."""

from __future__ import annotations

from collections.abc import Mapping

from exporters.wording import count, escape, percent
from online import ModelSnapshot, TargetSnapshot


def models_in_competition(target: TargetSnapshot) -> str:
    """Models with coefficients in competition; those that only predict apart: they see other rows."""
    listed = {name: model for name, model in target.models.items() if model.features}
    others = {name: model for name, model in target.models.items() if not model.features}
    competing = _model_table("Models in competition", listed, target.champion) if len(listed) > 1 else ""
    predicting = "Models that only predict, over the rows that they see: not in competition"
    return competing + (_model_table(predicting, others, target.champion) if others else "")


def _model_table(caption: str, models: Mapping[str, ModelSnapshot], champion: str) -> str:
    rows = ""
    for name, model in sorted(models.items()):
        best = ' <span class="champion">champion</span>' if name == champion else ""
        errors = (
            None if model.error is None else model.error.median_ape,
            None if model.error is None else model.error.p90_ape,
        )
        cells = "".join(f'<td class="num">{"–" if ratio is None else percent(ratio)}</td>' for ratio in errors)
        cells += f'<td class="num">{count(model.rows)}</td><td class="num">{len(model.features) or "–"}</td>'
        rows += f'<tr><th scope="row">{escape(name)}{best}</th>{cells}</tr>'
    heads = "".join(f'<th scope="col" class="num">{h}</th>' for h in ("median error", "p90", "rows", "features"))
    return (
        f'<table class="models"><caption>{caption}</caption>'
        f'<thead><tr><th scope="col">model</th>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    )
