r"""State files of versions 1 and 2: nested maps of attributes; a sidecar's file had the learners' file inside.

    b"tracefit.state/1\n"    |  BLAKE2b-256  |  {"version": 1 or 2, "state": {...}}, arrays as extension 1
    b"tracefit.sidecar/1\n"  |  SHA-256      |  {"version": 1, "bank": bytes of the above, "joiner": graph, ...}

Nothing here is written any more; it is kept as long as such files may be found.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .arrays import pack_array
from .declared import StateError
from .graph import Graph

VERSION = 2
SIDECAR_MAGIC = b"tracefit.sidecar/1\n"
_DIGEST_BYTES = 32
_ARRAY = 1
_KINDS = {"f8", "i8", "b1"}
_ARRAY_BYTES_MAX = 1 << 26
_RESIDUAL_CLASSES = 10


# ------------------------------------------------------------------- files


def sidecar_parts(data: bytes) -> dict[str, Any]:
    """Parts of a sidecar's file under the names of today; ``bank``: the file of the learners."""
    body = memoryview(data)[len(SIDECAR_MAGIC) + _DIGEST_BYTES :]
    if hashlib.sha256(body).digest() != data[len(SIDECAR_MAGIC) : len(SIDECAR_MAGIC) + _DIGEST_BYTES]:
        raise StateError(f"corrupt state file: the checksum of {len(body)} bytes does not match")
    image = msgspec.msgpack.decode(body)
    if image["version"] != 1:
        raise StateError(f"sidecar state version {image['version']} cannot be read, expected 1")
    if not isinstance(image["bank"], bytes):
        raise StateError("corrupt state file: what was learned is not in it")
    progress = {name: image[name] for name in ("seq", "generation", "described")}
    return {"bank": image["bank"], "join": image["joiner"], "spans": image["spans"], "progress": progress}


def learners_payload(state: msgspec.Raw) -> Any:
    """What was learned, of version 1 or 2."""
    return msgspec.msgpack.decode(state, ext_hook=_unpack_array)


def _unpack_array(code: int, data: memoryview) -> NDArray[Any]:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    kind, shape, used, raw = msgspec.msgpack.decode(data, type=tuple[str, list[int], bytes | None, bytes])
    if kind not in _KINDS or any(n < 0 for n in shape) or math.prod(shape) * 8 > _ARRAY_BYTES_MAX:
        raise ValueError(f"array of kind {kind!r} and shape {shape}")
    rows = np.frombuffer(raw, np.dtype("<" + kind))
    if used is None:
        return rows.reshape(shape)
    array = np.zeros(shape, np.dtype("<" + kind))
    flat = array.reshape(shape[0] if shape else 1, -1)
    flat[np.frombuffer(used, "<u2")] = rows.reshape(-1, flat.shape[1]) if rows.size else 0
    return array


# -------------------------------------------------------------- migrations


def count_residuals(state: Any) -> Any:
    """1 to 2: version 1 did not count residuals."""
    for config in state["configs"]:
        for target in config["targets"].values():
            target["residuals"] = None
    return state


def learners(state: Any) -> Graph:
    """2 to 3: the learners' maps as a graph."""
    graph = _GraphWriter()
    targets = [
        [config["id"], [[name, _target(graph, target)] for name, target in config["targets"].items()]]
        for config in state["configs"]
    ]
    priors = [
        [config["id"], [[key, _prior(graph, prior)] for *key, prior in config["priors"]]]
        for config in state["configs"]
        if config["priors"]
    ]
    facts = [[config["id"], config["facts"]] for config in state["configs"]]
    root = graph.add(
        "bank", {"learned_rows": state["learned_rows"], "targets": targets, "facts": facts, "priors": priors}
    )
    return {"kinds": graph.kinds, "objects": graph.objects, "root": root}


class _GraphWriter:
    def __init__(self) -> None:
        self.kinds: dict[str, list[str]] = {}
        self.objects: list[Any] = []

    def add(self, kind: str, values: dict[str, Any]) -> int:
        """The number of an object of these values."""
        self.kinds.setdefault(kind, list(values))
        plain = {name: pack_array(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}
        self.objects.append([kind, [plain[name] for name in self.kinds[kind]]])
        return len(self.objects) - 1


def _target(graph: _GraphWriter, state: dict[str, Any]) -> int:
    residuals = state["residuals"] or {"rows": np.zeros(_RESIDUAL_CLASSES, np.int64), "ratio_sum": 0.0}
    values = {
        **state,
        "pending": _design(graph, state["pending"]),
        "quick": _design(graph, state["quick"]),
        "models": [[name, _model(graph, model)] for name, model in state["models"].items() if _goes_on(model)],
        "residuals": graph.add("residuals", residuals),
        "shaped": [],
    }
    return graph.add("target", values)


def _goes_on(model: dict[str, Any]) -> bool:
    """Of River's, only linear models were saved; what corrected a live prediction has no place any more."""
    return model.get("model", model) is not None and "base_error" not in model["plain"]


def _model(graph: _GraphWriter, state: dict[str, Any]) -> int:
    error = graph.add("prequential_error", state["error"])
    if "model" in state:
        inner = graph.add("river_model", {"linear": state["model"]})
        return graph.add("river", {"inner": inner, **state["plain"], "error": error})
    if "rls" in state:
        recursion = graph.add("recursion", state["rls"])
        return graph.add("rls_covariance", {"rls": recursion, **state["plain"], "error": error})
    numbers = state["plain"]
    slow = {name: numbers[name] for name in ("beta", "passive", "live", "evidence", "per_row")} | {
        "evidence_rows": numbers["slow_rows"],
        "strata": graph.add("strata", state["slow"]),
        "meat": graph.add("meat", _meat(state["meat"])),
        "trial": None if state["trial"] is None else graph.add("strata", state["trial"]),
        "prior": None if state["prior"] is None else _prior(graph, state["prior"]),
    }
    if "alpha" in numbers:
        slow_member = graph.add("relevant_member", {**slow, "alpha": numbers["alpha"], "weight": numbers["_weight"]})
    else:
        slow_member = graph.add("slow_member", slow)
    weighing = {name: numbers[name] for name in ("scale", "median_us", "start_median_us")}
    champion = {
        "member": numbers["champion"],
        "recent": numbers["recent"],
        "quick": numbers["quick"],
        "error": error,
        "live_error": graph.add("prequential_error", state["live_error"]),
        "intervals": graph.add("intervals", state["intervals"]),
    }
    members = {
        "weighing": graph.add("weighing", weighing),
        "slow": slow_member,
        "fast": graph.add("fast_member", state["fast"]),
        "champion": graph.add("champion", champion),
        "drift": _drift(graph, state["drift"]),
        "means": graph.add("means", {"sums": numbers["sums"]}),
    }
    startup = {
        "held": _design(graph, state["start"]),
        "holding": numbers["holding"],
        "started": numbers["started"],
    }
    learner = {
        "has_phases": state["phases"],
        "rows": numbers["rows"],
        "startup": graph.add("startup", startup),
        "members": graph.add("members", members),
    }
    return graph.add("rls", learner)


def _meat(state: dict[str, Any]) -> dict[str, Any]:
    """Windows of one length, of 128 rows, among those of three."""
    lengths = np.array([0.0, 1.0, 0.0])
    matrices = {name: np.kron(lengths[:, None], np.atleast_2d(state[name])) for name in ("m", "window", "last")}
    return matrices | {"windows": np.kron(lengths, state["windows"]), "rows": lengths * float(state["rows"])}


def _drift(graph: _GraphWriter, state: dict[str, Any]) -> int:
    """What was suspected then is forgotten; the detectors that were added since start as fresh ones."""
    kept = ("waiting", "recent", "row", "opened", "gain", "alarms", "confirmed", "refuted", "last")
    sums = {name: state["detector"][name] for name in ("up", "down") if state["detector"]}
    values = {
        "cells": graph.add("cells", state["cells"]),
        "detector": graph.add("cusum" if sums else "stateless_detector", sums),
    }
    return graph.add("drift_monitor", {**values, **{name: state[name] for name in kept}})


def _design(graph: _GraphWriter, state: dict[str, Any] | None) -> int | None:
    return None if state is None else graph.add("design", state)


def _prior(graph: _GraphWriter, state: dict[str, Any]) -> int:
    with np.errstate(divide="ignore"):
        sd = 1.0 / state["inverse"]
    return graph.add("prior", {"mean": state["mean"], "sd": sd, "misfit": state.get("misfit", 0.0)})
