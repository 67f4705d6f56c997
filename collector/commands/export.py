"""``tracefit export``: files for other programs, made of a snapshot; ``--format blis-trace``: of recordings.

A trace holds the requests of recordings, as a simulator replays them. Of a request that both the engine and the API
process send, the engine's journey is used: it has aborts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from collector.config import Config
from collector.decode import MISSING, ApiSpan, CoreSpan, Export, Finish, RequestSpan, SpanEventKind, decode_exports
from collector.identity import read_json
from collector.join import SpanWindow
from collector.recordings import Timed, merged_with_progress, open_recordings
from collector.runtime import EXIT_FAILED, EXIT_OK, StartError, print_stderr
from collector.telemetry import Counts
from exporters.blis import (
    TRACE_HEADER,
    TRACE_TABLE,
    BlisError,
    TracedRequest,
    export,
    render_trace,
)
from exporters.snapshot_file import write_atomically
from exporters.what_if import meant_config
from online import Snapshot
from tracefit import NotFoundError

from . import Report
from .ask import load_snapshot, refusal

ENDS = frozenset({Finish.STOPPED, Finish.LENGTH, Finish.ABORTED})


def export_traffic(path: Path, out: Path) -> Report:
    """Write the requests of a recording, or a directory of them, as a trace into a directory, made if need be."""
    requests = requests_in(merged_with_progress(open_recordings([path], print_stderr)))
    if not requests:
        why = "error: no finished request in the recording; step telemetry alone has no requests"
        return Report(EXIT_FAILED, notes=[why])
    out.mkdir(parents=True, exist_ok=True)
    for name, data in render_trace(requests).items():
        write_atomically(out / name, data)
    written = {"trace_header": str(out / TRACE_HEADER), "trace_data": str(out / TRACE_TABLE)}
    flags = " ".join(f"--{name.replace('_', '-')} {path}" for name, path in written.items())
    return Report(lines=[flags], document=written | {"requests": len(requests)})


def requests_in(telemetry: Iterable[Timed]) -> list[TracedRequest]:
    """Every finished request of recordings, once."""
    journeys: list[CoreSpan] = []
    arrivals: dict[bytes, ApiSpan] = {}
    answered: list[RequestSpan] = []
    spans, counts = SpanWindow(Config().engines_max), Counts()
    exports = ([timed.item] for timed in telemetry if isinstance(timed.item, Export))
    for decoded in (each for said in exports for each in decode_exports(said, spans.accept, counts)):
        journeys += decoded.core
        arrivals |= {span.span_id: span for span in decoded.api}
        answered += decoded.requests
    traced = [_of_journey(span, arrivals.get(span.parent_span_id)) for span in journeys] or map(_of_answer, answered)
    return [request for request in traced if request is not None]


def _of_journey(span: CoreSpan, api: ApiSpan | None) -> TracedRequest | None:
    if span.finish not in ENDS or not span.events:
        return None
    first_ns = next((mark.ts_ns for mark in span.events if mark.kind is SpanEventKind.FIRST_TOKEN), None)
    arrival_ns = span.events[0].ts_ns if api is None or api.arrived_ns == MISSING else api.arrived_ns
    return TracedRequest(
        arrival_unix_ns=arrival_ns + span.unix_minus_mono_ns,
        prompt_tokens=span.prompt_tokens,
        output_tokens=span.events[-1].output_tokens,
        first_token_unix_ns=None if first_ns is None else first_ns + span.unix_minus_mono_ns,
        end_unix_ns=span.end_unix_ns,
        is_aborted=span.finish is Finish.ABORTED,
    )


def _of_answer(span: RequestSpan) -> TracedRequest | None:
    if span.output_tokens < 1:
        return None
    return TracedRequest(
        arrival_unix_ns=span.arrival_unix_ns,
        prompt_tokens=span.prompt_tokens,
        output_tokens=span.output_tokens,
        first_token_unix_ns=span.arrival_unix_ns + int(span.first_token_s * 1e9),
        end_unix_ns=span.end_unix_ns,
        is_aborted=False,
    )


def export_snapshot(
    source: str, *, token_file: Path | None, which: str, model_config: Path | None, **options: Any
) -> Report:
    """A snapshot's coefficients in the form of another program; as a document, that text beside its warnings.

    ``options`` are those of :func:`exporters.blis.export`.
    """
    loaded = load_snapshot(source, token_file)
    try:
        snapshot = Snapshot.from_json(loaded.data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StartError(f"{source} is no snapshot of this version: {error}") from None
    facts = _read_model_config(model_config) if model_config is not None else None
    try:
        content, coefficients = export(snapshot, meant_config(snapshot, which), model_config=facts, **options)
    except (BlisError, NotFoundError) as error:
        return Report(EXIT_FAILED, notes=[refusal(error)])
    text, warnings = content.decode(), coefficients.warnings
    document = {"content": text, "warnings": warnings}
    return Report(EXIT_OK, [text.removesuffix("\n")], document, [f"warning: {each}" for each in warnings])


def _read_model_config(path: Path) -> Mapping[str, Any]:
    try:
        tree = read_json(path)
    except ValueError as error:
        raise StartError(f"--model-config: {error}") from None
    if not isinstance(tree, dict):
        raise StartError(f"--model-config: {path}: expected an object, got {type(tree).__name__}")
    return tree
