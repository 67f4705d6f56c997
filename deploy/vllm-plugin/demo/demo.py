"""``make demo-vllm``: a real, un-forked vLLM with the plugin, two sidecars, and an open-loop load, end to end.

One sidecar hears every forward pass from the plugin and asks vLLM who it is; the other one knows nothing but the port,
and asks for vLLM's own page.

    python demo.py [--seconds 90] [--rate 3.5] [--data-parallel-size 1] [--environment DIRECTORY] [--remove]

With ``--data-parallel-size 2`` vLLM has two ranks, which publish on ports of their own: two engines, of one
configuration. vLLM runs on the CPU with a tiny random-weight model made here. Nothing is left behind but vLLM's
environment, which the next run uses again (``--remove`` deletes it).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from environment import EnvironmentSetupError, prepare
from exporters.wording import estimate
from load import Load
from server import ServerError, free_port, get, process, vllm, wait_until_up

HOME: Final = Path(__file__).resolve().parents[3]
ENVIRONMENT: Final = Path(__file__).resolve().parents[1] / ".vllm"
EVERY_S: Final = 10.0
STEPS: Final = "steps"
PAGES: Final = "pages"


def print_line(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


@contextlib.contextmanager
def sidecar(directory: Path, settings: Mapping[str, str], scraped: str = "") -> Iterator[int]:
    """Run a sidecar that writes to ``directory``; yields the port of its pages."""
    directory.mkdir(exist_ok=True)
    pages = free_port(9464)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("TRACEFIT")},
        "TRACEFIT_LISTEN_HTTP": "",
        "TRACEFIT_PAGES": f"127.0.0.1:{pages}",
        "TRACEFIT_DIRECTORY": str(directory),
        "TRACEFIT_PUBLISH_INTERVAL_S": "1",
        **settings,
    }
    command = [sys.executable, "-m", "collector", "run", *(("--scrape", scraped) if scraped else ())]
    log = directory / "sidecar.log"
    with process(command, environment, log, HOME) as child:
        wait_until_up(child, pages, "/readyz", log, timeout_s=60)
        yield pages


def run(seconds: float, rate: float, ranks: int, environment: Path, work: Path) -> dict[str, Any]:
    """Run everything; return the last snapshots by what they were learned from."""
    binaries = prepare(environment, print_line)
    model = work / "model"
    from_vllm = [str(binaries / "python"), str(Path(__file__).with_name("model.py")), str(model)]
    with process(from_vllm, dict(os.environ), work / "model.log", work) as child:
        child.wait(120)
    port = free_port(20380)
    flags, variables = parallel(ranks) if ranks > 1 else ((), {})
    print_line("starting vLLM on the CPU; its first start takes about a minute")
    with vllm(binaries, model, f"tcp://127.0.0.1:{port}", work, *flags, **variables) as server:
        told = {
            "TRACEFIT_LISTEN": f"127.0.0.1:{free_port(4317)}",
            "TRACEFIT_FPM": ",".join(f"tcp://127.0.0.1:{port + rank}" for rank in range(ranks)),
            "TRACEFIT_DISCOVER": f"http://127.0.0.1:{server.port}",
        }
        with sidecar(work / STEPS, told) as steps, scraping(server.port, work) as pages:
            print_line(f"  vLLM      http://127.0.0.1:{server.port}/v1/completions")
            print_line(
                f"  sidecar   http://127.0.0.1:{steps}/ (status), /metrics, /snapshot: every pass, by the plugin"
            )
            print_line(f"  sidecar   http://127.0.0.1:{pages}/ the same of one that only asks for vLLM's /metrics")
            load = Load("127.0.0.1", server.port, "tiny", random.Random(1))
            sender = threading.Thread(target=load.run, args=(seconds, rate), daemon=True)
            sender.start()
            print_line("what one scheduler step costs, in us, as the evidence comes in")
            while sender.is_alive():
                sender.join(EVERY_S)
                show(get(steps, "/snapshot"), STEPS)
                show(get(pages, "/snapshot"), PAGES)
            print_line(f"requests: {dict(load.outcomes)}")
    # The sidecars have stopped in order: what still waited for its neighbours is learned, and on disk.
    files = {source: work / source / "snapshot.json" for source in (STEPS, PAGES)}
    return {source: json.loads(file.read_bytes()) for source, file in files.items() if file.exists()}


def parallel(ranks: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the flags and variables of a vLLM of ``ranks`` engine cores, one core of the machine for each in turn."""
    cores = sorted(os.sched_getaffinity(0))
    variables = {
        "OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=pod-1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
    }
    return ("--data-parallel-size", str(ranks)), variables


def scraping(port: int, work: Path) -> AbstractContextManager[int]:
    """Run a sidecar that knows of vLLM nothing but its port."""
    closed = {"TRACEFIT_LISTEN": f"127.0.0.1:{free_port()}"}
    return sidecar(work / PAGES, closed, f"http://127.0.0.1:{port}/metrics")


def cost(feature: Mapping[str, Any]) -> str:
    """A coefficient as ``tracefit show`` prints it."""
    return estimate(feature["coefficient"], feature.get("stderr"), feature["unit"])


def error_of(model: Mapping[str, Any]) -> dict[str, float] | None:
    """The error that ``tracefit show`` prints, if any is known."""
    return model.get("shaped_error") or model.get("prediction_error") or model.get("error")


def show(body: bytes | None, source: str) -> None:
    """Print one line on the step time."""
    for config in json.loads(body)["configs"] if body else ():
        target = config["targets"].get("step_time", {})
        for name, model in sorted(target.get("models", {}).items()):
            if model["features"] and name == target["champion"]:
                cells = "  ".join(f"{f['name']} {cost(f)}" for f in model["features"])
                error = error_of(model)
                said = f"{error['median_ape']:.1%}" if error else "?"
                print_line(f"{source:>5} {model['rows']:>6} rows  {name}: {cells}  median error {said}")


def conclude(snapshot: dict[str, Any]) -> None:
    """Print the final table."""
    for config in snapshot["configs"]:
        facts = config["config"]
        print_line(
            f"\n{facts.get('model', '?')} on vLLM {facts.get('vllm_version', '?')}, telemetry {config['telemetry']}"
        )
        for engine in config["engines"]:
            print_line(f"  engine {engine['instance']}: steps up to {engine.get('last_step', '?')}")
        for name, target in sorted(config["targets"].items()):
            for model_name, model in sorted(target["models"].items()):
                error = error_of(model)
                tail = f"mean error {error['mape']:.1%}, median {error['median_ape']:.1%}" if error else "no error yet"
                mark = "*" if model_name == target["champion"] else " "
                print_line(f"{mark} {target['vector']:>5} {name} / {model_name}: {model['rows']} rows, {tail}")
                for f in model["features"]:
                    print_line(f"          {f['name']:<24} {cost(f):<24} {f['status']}")


def main(arguments: list[str]) -> int:
    """Run the demo; 0 if coefficients were learned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="length of the load")
    parser.add_argument("--rate", type=float, default=3.5, help="mean requests per second")
    parser.add_argument("--data-parallel-size", type=int, default=1, metavar="N", help="engine cores of vLLM")
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT, help="where vLLM is installed")
    parser.add_argument("--remove", action="store_true", help="delete vLLM's environment and do nothing else")
    parser.add_argument("--keep", type=Path, help="keep logs and the snapshot in this directory")
    args = parser.parse_args(arguments)
    if args.remove:
        shutil.rmtree(args.environment, ignore_errors=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="tracefit-demo-") as scratch:
        work = args.keep or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        try:
            snapshots = run(args.seconds, args.rate, args.data_parallel_size, args.environment, work)
        except (EnvironmentSetupError, ServerError) as error:
            print_line(f"error: {error}")
            return 1
        except KeyboardInterrupt:
            print_line("stopped")
            return 1
    for snapshot in snapshots.values():
        conclude(snapshot)
    if not any(snapshot["configs"] for snapshot in snapshots.values()):
        print_line("nothing was learned")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
