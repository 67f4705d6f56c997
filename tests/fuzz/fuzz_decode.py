"""Fuzz the columnar decoder against the plain one.

    python -m tests.fuzz.fuzz_decode --guided --seconds 60       guided by coverage, needs atheris; --corpus DIR
    python -m tests.fuzz.fuzz_decode --executions 10000000       mutations only, needs nothing

One execution is one damaged event or one damaged export compared. The first difference or exception ends the run with
the input in hexadecimal.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans

from tests.fuzz.mutations import damage, step_event
from tests.support import otlp_bytes as otlp

BATCH = 400
EXPORTS_PER_BATCH = 8


def mutate(seed, executions, seconds):
    """Damage good events and exports until a budget is used up; the number of executions and of events taken."""
    from tests.fuzz.targets import check_events, check_export

    rng = random.Random(seed)
    done = taken = 0
    deadline_s = time.monotonic() + seconds
    while done < executions and time.monotonic() < deadline_s:
        events = [step_event(rng) for _ in range(BATCH // 4)]
        damaged = [damage(rng, rng.choice(events)) for _ in range(BATCH - len(events))]
        batch = events + damaged
        rng.shuffle(batch)
        taken += check_events(batch)
        for _ in range(EXPORTS_PER_BATCH):
            some = [*rng.sample(batch, rng.randrange(4)), otlp.snapshot(3), *rng.sample(events, 2)]
            whole = otlp.steps_export(some)
            check_export(damage(rng, whole) if rng.random() < 0.7 else whole)
        done += BATCH + EXPORTS_PER_BATCH
    return done, taken


def guide(options):
    """Let atheris look for bytes that reach new code; the first byte says what the others are."""
    import atheris

    with atheris.instrument_imports(include=list(DECODERS)):
        from tests.fuzz.targets import GUIDES, check_events, check_export, check_export_alone
        from tests.support.recordings import payloads as exports

    sound = [step_event(random.Random(number)) for number in range(2000)]
    layouts = {
        kind: [event for event in sound if (b"plugin.hook_ns" in event) == (kind == b"b")] for kind in (b"a", b"b")
    }
    guides = {b"a": GUIDES[:1], b"b": GUIDES[1:]}
    recorded = _recorded_spans(islice(exports("c5_offload"), 60))
    done = taken = 0

    def one(data):
        nonlocal done, taken
        done += 1
        match data[:1]:
            case b"x":
                taken += check_export_alone(data[1:])
            case b"y":
                check_export(data[1:])
            case b"z":
                taken += check_export_alone(otlp.steps_export(_unpack(data)))
            case _:
                taken += check_events(_unpack(data), guides.get(data[:1], GUIDES))
        if done % 1000 == 0:  # libFuzzer's end of the process runs nothing of Python's
            sys.stderr.write(f"taken: {taken}\n")

    def mutator(data, size_max, seed):
        rng = random.Random(seed)
        if len(data) < 2 or rng.random() < FRESH:
            data = _fresh(rng, layouts, recorded)
        if rng.random() < 0.2:
            return atheris.Mutate(bytes(data), size_max)
        return _damaged(rng, bytes(data))[:size_max]

    gc.freeze()  # what is there now stays, and need not be looked through again and again
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=mutator)
    atheris.Fuzz()


DECODERS = tuple(
    f"collector.decode.{name}" for name in ("columnar", "known_templates", "template", "plain", "envelope", "weight")
)
"""What is instrumented, which is what is compared."""
FRESH = 0.4
"""Share of inputs that begin with sound events: what is kept for its coverage is mostly damaged, and stays so."""
VALUE = 0.4
"""Share of edits that change a value and nothing of the layout."""


def _recorded_spans(payloads):
    """Small exports of one span each, of every scope that vLLM writes."""
    out = []
    for whole in map(ExportTraceServiceRequest.FromString, payloads):
        for one in whole.resource_spans:
            for scope in one.scope_spans:
                small = [span for span in scope.spans if span.ByteSize() < EXPORT_BYTES_MAX][:2]
                alone = [ScopeSpans(scope=scope.scope, spans=[span]) for span in small]
                out += [ResourceSpans(resource=one.resource, scope_spans=[spans]) for spans in alone]
    made = [ExportTraceServiceRequest(resource_spans=[one]).SerializeToString() for one in out]
    return sorted(set(made), key=len)[:60]


def _fresh(rng, layouts, recorded):
    """Sound events, most often of the layout that they are compared with first."""
    if rng.random() < 0.1:
        return b"x" + rng.choice(recorded)
    kind = b"y" if rng.random() < 0.02 else rng.choice((b"a", b"a", b"b", b"x", b"x", b"z", b"z"))
    layout = kind if kind in layouts and rng.random() < 0.8 else rng.choice((b"a", b"a", b"a", b"b"))
    events = rng.sample(layouts[layout], rng.choice((1, 1, 2)))
    return _pack(kind, events) if kind in b"abz" else kind + otlp.steps_export(events)


def _damaged(rng, data):
    """One event damaged among its sound neighbours, or the bytes of an export anywhere."""
    if data[:1] in (b"x", b"y"):
        return data[:1] + damage(rng, data[1:])
    events = _unpack(data)
    place = rng.randrange(len(events))
    event = events[place]
    at = event.find(b"\x18", rng.randrange(len(event) + 1)) + 1  # behind the tag of an integer, most often
    if 0 < at < len(event) and rng.random() < VALUE:
        events[place] = event[:at] + bytes([event[at] & 0x80 | rng.randrange(128)]) + event[at + 1 :]
    else:
        events[place] = damage(rng, event)
    return _pack(data[:1], events)


def _pack(kind, events):
    return kind + b"".join(len(event).to_bytes(2, "little") + event for event in events)


def _unpack(data):
    """Events with their lengths in front; at least one."""
    events, at = [], 1
    while at + 2 <= len(data) and len(events) < BATCH:
        size = int.from_bytes(data[at : at + 2], "little") % 2048
        events.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return events or [b""]


def guide_in_turns(directory, seed, executions, seconds, timeout_s):
    """One process of atheris after another on one corpus, because its memory grows; the executions of them all."""
    done = taken = turn = 0
    deadline_s = time.monotonic() + seconds
    while done < executions and time.monotonic() < deadline_s:
        runs = min(RUNS_PER_PROCESS, executions - done)
        options = [
            str(directory),
            f"-runs={runs}",
            f"-seed={seed + turn}",
            f"-timeout={timeout_s}",
            f"-artifact_prefix={directory}-",
        ]
        if seconds < float("inf"):
            options.append(f"-max_total_time={int(deadline_s - time.monotonic()) + 1}")
        begun_s = time.monotonic()
        command = [sys.executable, "-m", "tests.fuzz.fuzz_decode", "--one", *options, *LIMITS]
        run = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        found = re.findall(r"stat::(\w+):\s+(\d+)", run.stderr)
        if run.returncode or not found:
            raise SystemExit(f"{run.stderr[-20_000:]}\nafter {done} executions, turn {turn}")
        stats = dict(found)
        taken += int((re.findall(r"taken: (\d+)", run.stderr) or ["0"])[-1])
        done += int(stats["number_of_executed_units"])
        cover = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", run.stderr)[-1]
        sys.stdout.write(
            f"turn {turn}: {done} executions, {time.monotonic() - begun_s:.0f} s, cov/ft/corpus {'/'.join(cover)}, "
            f"slowest {stats['slowest_unit_time_sec']} s, peak {stats['peak_rss_mb']} MB\n"
        )
        sys.stdout.flush()
        turn += 1
    return done, taken


RUNS_PER_PROCESS = 500_000
EXPORT_BYTES_MAX = 1500
LIMITS = ("-max_len=2048", "-len_control=0", "-print_final_stats=1", "-rss_limit_mb=3072")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guided", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--executions", type=int, default=(1 << 31) - 1)
    parser.add_argument("--corpus", type=Path, help="directory of --guided; else a temporary one")
    parser.add_argument("--timeout-s", type=int, default=10, help="one input; of the wall clock, for --guided")
    parser.add_argument("--one", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        guide(args.one)
        return
    if args.guided and find_spec("atheris"):
        with tempfile.TemporaryDirectory() as temporary:
            directory = args.corpus or Path(temporary) / "corpus"
            directory.mkdir(exist_ok=True)
            done, taken = guide_in_turns(directory, args.seed, args.executions, args.seconds, args.timeout_s)
        cpu_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        counts = f"{done} guided executions, seed {args.seed}, {taken} read as columns"
        sys.stdout.write(f"{counts}, all alike, {cpu_s:.0f} s CPU\n")
        return
    if args.guided:
        sys.stdout.write("atheris is not installed: mutations only\n")
    start_s = time.process_time()
    done, taken = mutate(args.seed, args.executions, args.seconds)
    cpu_s = time.process_time() - start_s
    sys.stdout.write(f"{done} executions, seed {args.seed}, {taken} read as columns, all alike, {cpu_s:.0f} s CPU\n")


if __name__ == "__main__":
    main()
