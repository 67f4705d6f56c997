"""Every coefficient of a snapshot as comma-separated values, one a line: for spreadsheets, pandas, aiconfigurator."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from exporters.labels import printable
from online import ConfigSnapshot, Snapshot

from .translation import COMMENT_CHARS, comments, warnings_of

COLUMNS = (
    "config_id", "model", "gpu", "tensor_parallel_size", "vllm_version", "target", "vector", "feature_set", "champion",
    "feature", "unit", "coefficient", "stderr", "status", "feature_mean", "rows", "median_ape", "reason",
)  # fmt: skip
_FORMULA = ("=", "+", "-", "@")


def render_csv(snapshot: Snapshot, configs: Sequence[ConfigSnapshot]) -> bytes:
    """Microseconds, full precision; what is not known is empty."""
    out = io.StringIO()
    out.write(
        comments(
            f"tracefit {snapshot.tracefit_version}, snapshot generation {snapshot.generation}",
            f"created_unix_nano {snapshot.created_unix_nano}; times in microseconds; an empty field is not known",
            "lost: shape factors, intervals, what was seen, drift, limits of the engine, what api_queueing grows by",
            "with the requests in flight; they are in the snapshot",
            *(f"{config.config_id!r}: {warning}" for config in configs for warning in warnings_of(config)),
        )
    )
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for config in configs:
        writer.writerows(_lines(config))
    return out.getvalue().encode(errors="replace")


def _lines(config: ConfigSnapshot) -> Iterator[list[object]]:
    facts = [_text(config.config.get(key, "")) for key in ("model", "gpu", "tensor_parallel_size", "vllm_version")]
    for name, target in sorted(config.targets.items()):
        for feature_set, model in sorted(target.models.items()):
            error = "" if model.error is None else repr(model.error.median_ape)
            for each in model.features:
                yield [
                    _text(config.config_id),
                    *facts,
                    name,
                    target.vector,
                    _text(feature_set),
                    int(feature_set == target.champion),
                    _text(each.name),
                    each.unit,
                    repr(each.coefficient),
                    "" if each.stderr is None else repr(each.stderr),
                    each.status,
                    "" if each.mean is None else repr(each.mean),
                    model.rows,
                    error,
                    _text(each.reason),
                ]


def _text(value: object) -> str:
    """On one line, and never a formula to a spreadsheet."""
    text = printable(str(value), COMMENT_CHARS)
    return f"'{text}" if text.startswith(_FORMULA) else text
