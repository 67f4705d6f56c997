"""Parts of a sidecar's state file of version 1 (``tracefit.sidecar/1``), as online.state.version_2 hands them over."""

from __future__ import annotations

import re
from typing import Any

from online.state import Graph

_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")
_KINDS = {"Emitter": "emitter_ids", "Process": "engine_process", "Sequence": "step_sequence"}
_ATTRIBUTES = {
    ("joiner", "processes"): "api_processes",
    ("joiner", "engine_count"): "emitter_count",
    ("api_spans", "apis"): "spans",
    ("step_sequence", "fresh"): "fresh_steps",
    ("frontier", "frontier"): "emitted_to",
}
_MEMBERS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "joiner": {"api_spans": ("api_spans", ("apis", "waiting", "waiting_count"))},
    "step_sequence": {
        "frontier": ("frontier", ("frontier", "learned_to")),
        "context": (
            "process_context",
            (
                *("habits", "votes", "scheduling_fact", "budget_fact_tokens", "event_unix_ns", "first_unix_ns"),
                *("has_summaries", "has_journeys", "has_exact_context", "has_done_stamps"),
                *("longest_run_ns", "scheduled_tokens_max", "first_finish_unix_ns"),
            ),
        ),
    },
}
"""What became a member with a class of its own: by kind and attribute, the member's kind and its attributes."""


def progress_graph(values: dict[str, Any]) -> Graph:
    """Two values stood beside the graphs; what was described to the learners is described again."""
    names = ["seq", "generation"]
    return {"kinds": {"progress": names}, "objects": [["progress", [values[name] for name in names]]], "root": 0}


def join_graph(graph: Graph) -> Graph:
    """Classes and attributes went by their names in Python, and fewer had members."""
    kinds: dict[str, list[str]] = {}
    objects: list[Any] = []
    members: list[Any] = []

    def converted(kind: str, values: dict[str, Any]) -> list[Any]:
        for attribute, (member_kind, names) in _MEMBERS.get(kind, {}).items():
            member = converted(member_kind, {name: values.pop(name) for name in names})
            values[attribute] = len(graph["objects"]) + len(members)
            members.append(member)
        kinds[kind] = [_ATTRIBUTES.get((kind, name), name) for name in values]
        return [kind, [*values.values()]]

    for name, values in graph["objects"]:
        names = [attribute.lstrip("_") for attribute in graph["kinds"][name]]
        kind = _KINDS.get(name) or _WORD.sub("_", name).lower()
        objects.append(converted(kind, dict(zip(names, values, strict=True))))
    return {"kinds": kinds, "objects": objects + members, "root": graph["root"]}
