# ruff: noqa: INP001, T201, S603 - a script that runs once, inside the image build
"""Remove from this environment what a distribution does not need to run.

The lock pins one environment for work and tests; the image needs a third of it. What is kept is the closure of the
distribution's own requirements, by installed metadata.

    python prune.py tracefit[kv]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, distributions


def canonical(name: str) -> str:
    """Name as packaging compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def split(requirement: str) -> tuple[str, tuple[str, ...], str]:
    """(name, extras, marker) of a requirement."""
    spec, _, marker = requirement.partition(";")
    match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", spec)
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    extras = tuple(part.strip() for part in (match[2] or "").split(",") if part.strip())
    return canonical(match[1]), extras, marker.strip()


def wanted(marker: str, extras: Iterable[str]) -> bool:
    """Whether a requirement applies: without an extra always, else if the extra is asked for.

    Other markers (platform, Python version) are not evaluated: what they exclude is not installed anyway.
    """
    named = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    return named is None or canonical(named[1]) in {canonical(extra) for extra in extras}


def closure(root: str) -> set[str]:
    """Names of everything installed that ``root`` needs, itself included."""
    kept: set[tuple[str, tuple[str, ...]]] = set()
    queue = [split(root)[:2]]
    while queue:
        name, extras = queue.pop()
        if (name, extras) in kept:
            continue
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        kept.add((name, extras))
        queue += [split(text)[:2] for text in requirements if wanted(split(text)[2], extras)]
    return {name for name, _ in kept}


def main(root: str) -> int:
    """Uninstall the rest, pip last."""
    keep = closure(root)
    if split(root)[0] not in keep:
        print(f"prune: {root} is not installed", file=sys.stderr)
        return 1
    installed = {canonical(d.metadata["Name"]) for d in distributions()}
    rest = sorted(installed - keep - {"pip"})
    print("kept:", *sorted(keep))
    command = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *rest, "pip"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
