"""Engines of a merged state side by side: who is slower than the others."""

from __future__ import annotations

from collections.abc import Sequence

from exporters.wording import count, escape
from online import ReplicaSnapshot, TargetSnapshot

MAX_REPLICAS = 16


def replicas_table(target: TargetSnapshot, told_apart_by: Sequence[str] = ()) -> str:
    """The engines furthest from their siblings, and how many differ; empty where nothing was merged.

    ``told_apart_by``: facts that would make clusters of them configurations of their own.
    """
    replicas = target.replicas
    if not replicas:
        return ""
    differing = sum(replica.differs for replica in replicas)
    verdict = f"{differing} differ by more than their errors" if differing else "none differs from the others"
    rows = "".join(map(_row, replicas[:MAX_REPLICAS]))
    return (
        f"{_clusters(target, told_apart_by)}"
        f'<table class="models"><caption>Merged from {len(replicas)} engines: {verdict}</caption>'
        '<thead><tr><th scope="col">engine</th><th scope="col" class="num">time ÷ the others’</th>'
        f'<th scope="col" class="num">rows</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _clusters(target: TargetSnapshot, told_apart_by: Sequence[str]) -> str:
    if not target.replica_clusters:
        return ""
    kinds = ", ".join(
        f"{count(each.engines)} engines" + (f" (×{each.ratio:.3f})" if each.ratio is not None else "")
        for each in target.replica_clusters
    )
    facts = " ".join(f"<code>{escape(fact)}</code>" for fact in told_apart_by)
    remedy = f"would be told apart by {facts}" if facts else "no fact that is known tells them apart"
    return (
        f'<p class="remedy">{len(target.replica_clusters)} kinds of machine under one identity: {kinds}; {remedy}. '
        "Each engine is held against those of its kind.</p>"
    )


def _row(replica: ReplicaSnapshot) -> str:
    mark = ' <span class="champion">differs</span>' if replica.differs else ""
    ratio = "–" if replica.ratio is None else f"×{replica.ratio:.3f}"
    if replica.ratio is not None and replica.stderr is not None:
        ratio += f" ± {replica.stderr:.3f}"
    if replica.low is not None and replica.high is not None:
        ratio += f" ({replica.low:.3f} to {replica.high:.3f})"
    name = escape(replica.engine or "unknown")
    kind = "" if replica.cluster is None else f" <span>kind {replica.cluster + 1}</span>"
    return (
        f'<tr><th scope="row">{name}{mark}{kind}</th><td class="num">{ratio}</td>'
        f'<td class="num">{count(replica.rows)}</td></tr>'
    )
