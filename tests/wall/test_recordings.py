"""What a user sees of each recording stays what it was, within a fraction of the standard errors that are stated.

``UPDATE_GOLDEN=1`` writes ``golden.json`` anew; the change that makes it different says why each number may move.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import tracefit
from tests.support.gpu_server import request_exports, serve, step_exports
from tests.support.paths import DATA
from tests.support.vllm_senders import write

from .published import differences, essence, replay

GOLDEN = Path(__file__).parent / "golden.json"
RECORDINGS = sorted(path.name for path in DATA.iterdir() if (path / "otlp.pb.gz").exists() or path.name == "m1_pages")
SECONDS = 60.0


def files_of(name: str) -> list[Path]:
    """What ``tracefit replay`` takes of a recording: all that was recorded."""
    return [
        path
        for path in sorted((DATA / name).iterdir())
        if path.name.partition(".")[0] in ("otlp", "kv", "pages") and not path.name.startswith("otlp.idx")
    ]


def slower(second: float, us: float) -> float:
    """Everything takes 1.3 times as long from the middle on."""
    return us * (1.3 if second > SECONDS / 2 else 1.0)


def steps(machine: str, seconds: float, seed: int, **options) -> Iterator[bytes]:
    return step_exports(machine, serve(machine, seconds, seed, **options))


def requests(machine: str, seconds: float, seed: int) -> Iterator[bytes]:
    return request_exports(machine, serve(machine, seconds, seed))


STREAMS = {
    "steps of a dense model": lambda: steps("llama8b-h100", SECONDS, 1),
    "steps of a machine that becomes slower": lambda: steps("qwen32b-h200", SECONDS, 2, slower=slower),
    "steps of a mixture of experts": lambda: steps("qwen30a3-h200", SECONDS, 3),
    "spans of requests to a dense model": lambda: requests("llama8b-h100", SECONDS, 4),
    "spans of requests, with a data sheet": lambda: requests("llama8b-h100", SECONDS, 4),
    "first steps, with a data sheet": lambda: steps("llama8b-h100", 4.0, 5),
}
MODEL = DATA / "models" / "llama8b.config.json"


@pytest.fixture(params=[*RECORDINGS, *STREAMS])
def name(request) -> str:
    return request.param


@pytest.fixture
def written(name, tmp_path) -> Path:
    """The snapshot of a recording, or of a simulated GPU server."""
    files = [write(tmp_path / "otlp.pb.gz", STREAMS[name]())] if name in STREAMS else files_of(name)
    config = tmp_path / "config.yaml"
    config.write_text(f"model_config: {MODEL}\n" if "data sheet" in name else "")
    replay(tmp_path / "snapshot.json", *files, options=("--config", str(config)))
    return tmp_path / "snapshot.json"


def test_what_is_published_of_a_recording_stays_within_its_tolerances(name, written):
    now = essence(json.loads(written.read_bytes())) | {"answers": answers(written)}
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        golden[name] = now
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    published, expected = dict(now), dict(golden[name])
    asked, known = published.pop("answers"), expected.pop("answers")
    assert differences(published, expected) == []
    assert asked == {config: pytest.approx(values, rel=0.02) for config, values in known.items()}


def answers(snapshot: Path) -> dict[str, list[float]]:
    """What the client says of some steps and requests of each configuration that has step times."""
    found = {}
    for number, config in enumerate(tracefit.load(snapshot).configs):
        if "step_time" in config.targets:
            steps = [
                config.step_time(prefill_tokens=prefill, requests=requests, decode_context_tokens=context)
                for prefill, requests, context in ((0, 1, 300), (256, 4, 900), (0, 8, 4000))
            ]
            request = config.request(prompt_tokens=300, output_tokens=100, concurrency=4)
            plan = config.plan(prompt_tokens=300, output_tokens=100, itl_ms=2.0 * request.itl.ms)
            found[f"{number}"] = [
                *(step.us for step in steps),
                request.itl.us,
                request.ttft.us,
                float(plan.concurrency),
                float(config.usable),
            ]
    return found
