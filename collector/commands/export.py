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
from collector.recordings import Timed, check_targets, merged_with_progress, open_recordings
from collector.runtime import EXIT_FAILED, EXIT_OK, StartError, print_stderr, print_stdout
from collector.telemetry import Counts
from exporters.blis import (
    TRACE_HEADER,
    TRACE_TABLE,
    BlisError,
    TracedRequest,
    export,
    render_trace,
)
from exporters.questions import as_json
from exporters.snapshot_file import write_atomically
from exporters.what_if import meant_config
from online import Snapshot
from tracefit import NotFoundError

from .ask import load_snapshot, refusal

ENDS = frozenset({Finish.STOPPED, Finish.LENGTH, Finish.ABORTED})


def export_traffic(path: Path, out: Path, *, in_json: bool = False) -> int:
    """Write the requests of a recording, or a directory of them, as a trace into a directory, made if need be."""
    requests = requests_in(merged_with_progress(open_recordings([path], print_stderr)))
    if not requests:
        print_stderr("error: no finished request in the recording; step telemetry alone has no requests")
        return EXIT_FAILED
    out.mkdir(parents=True, exist_ok=True)
    for name, data in render_trace(requests).items():
        write_atomically(out / name, data)
    written = {"trace_header": str(out / TRACE_HEADER), "trace_data": str(out / TRACE_TABLE)}
    flags = " ".join(f"--{name.replace('_', '-')} {path}" for name, path in written.items())
    print_stdout(as_json(written | {"requests": len(requests)}) if in_json else flags)
    return EXIT_OK


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
    source: str,
    out: Path | None,
    *,
    token_file: Path | None,
    which: str,
    model_config: Path | None,
    in_json: bool = False,
    **options: Any,
) -> int:
    """Print a snapshot's coefficients in the form of another program, or write them to a file.

    As JSON, that form is a text beside its warnings. ``options`` are those of :func:`exporters.blis.export`.
    """
    loaded = load_snapshot(source, token_file)
    try:
        snapshot = Snapshot.from_json(loaded.data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StartError(f"{source} is no snapshot of this version: {error}") from None
    file = None if out is None or str(out) == "-" else out
    check_targets(file, read=[Path(source)])
    facts = _read_model_config(model_config) if model_config is not None else None
    try:
        content, coefficients = export(snapshot, meant_config(snapshot, which), model_config=facts, **options)
    except (BlisError, NotFoundError) as error:
        print_stderr(refusal(error))
        return EXIT_FAILED
    if in_json:
        content = as_json({"content": content.decode(), "warnings": list(coefficients.warnings)}).encode()
    for warning in coefficients.warnings:
        print_stderr(f"warning: {warning}")
    if file is None:
        print_stdout(content.decode().removesuffix("\n"))
    else:
        write_atomically(file, content)
        print_stdout(f"written: {file}")
    return EXIT_OK


def _read_model_config(path: Path) -> Mapping[str, Any]:
    try:
        tree = read_json(path)
    except ValueError as error:
        raise StartError(f"--model-config: {error}") from None
    if not isinstance(tree, dict):
        raise StartError(f"--model-config: {path}: expected an object, got {type(tree).__name__}")
    return tree
