# ruff: noqa: INP001, T201, S603 - a script of the build, which starts the tools that its caller names
"""What tracefit is made of, and what is known of its vulnerabilities.

    python audit.py sbom  CYCLONEDX_PY OUT     a bill of materials (CycloneDX, JSON) of what runs, not of what tests
    python audit.py known PIP_AUDIT [SECONDS]  ask the index for known vulnerabilities of the same packages

Exit code of ``known``: 0 none is known, or nobody could be asked, which is said loudly: a database that is away must
stop no build, nor hold it for longer than the given time; 1 one is known.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
RUNS = "tracefit[kv]"
WAIT_S = 60.0


def needed(root: str) -> set[str]:
    """Names of what is installed because ``root`` needs it, itself included."""
    seen: set[tuple[str, str]] = set()
    queue = [Requirement(root)]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {known for one, known in seen if one == name}:
            seen.add((name, extra))
            try:
                listed = distribution(name).requires or []
            except PackageNotFoundError:  # for another platform
                continue
            own = map(Requirement, listed)
            queue += [each for each in own if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def runtime_lock(lock: str) -> str:
    """The entries of a lock, hashes included, of what is needed to run, by installed metadata."""
    kept = needed(RUNS) - {"tracefit"}
    entries = re.finditer(r"^([A-Za-z0-9._-]+)(?:\[.*?\])?==.*(?:\n    .*)*", lock, re.MULTILINE)
    return "".join(f"{entry[0]}\n" for entry in entries if canonicalize_name(entry[1]) in kept)


def write_sbom(tool: str, out: Path) -> int:
    """Write the bill of materials; the same lock gives the same bytes."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write(runtime_lock((ROOT / "requirements.lock").read_text(encoding="utf-8")))
        listed.flush()
        command = [tool, "requirements", listed.name, "--pyproject", str(ROOT / "pyproject.toml")]
        command += ["--output-reproducible", "-o", str(out)]
        code = subprocess.run(command, check=False, env={**os.environ, "PYTHONWARNINGS": "ignore"}).returncode
    if not code:
        print(f"{len(json.loads(out.read_text())['components'])} packages: {out}")
    return code


def ask_known(tool: str, wait_s: float = WAIT_S) -> int:
    """Ask, but not for ever."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write(runtime_lock((ROOT / "requirements.lock").read_text(encoding="utf-8")))
        listed.flush()
        command = [tool, "--requirement", listed.name, "--require-hashes", "--disable-pip", "--progress-spinner=off"]
        try:
            asked = subprocess.run(
                [*command, "--format=json"],
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=wait_s,
            )
        except subprocess.TimeoutExpired:
            return _nobody_asked(f"no answer within {wait_s:g} s")
        except OSError as error:
            return _nobody_asked(str(error))
    try:
        packages = json.loads(asked.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return _nobody_asked((asked.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return _report(packages)


def _report(packages: list[dict[str, object]]) -> int:
    known = [(each, found) for each in packages for found in each.get("vulns") or ()]
    for each, found in known:
        fixed = ", ".join(found["fix_versions"]) or "no version yet"
        print(f"{each['name']} {each['version']}: {found['id']}, mended in {fixed}")
    skipped = [each for each in packages if "skip_reason" in each]
    if skipped:
        which = f"{len(skipped)} of {len(packages)} packages"
        print(f"WARNING: vulnerabilities of {which} are NOT checked: {skipped[0]['skip_reason']}", file=sys.stderr)
    print(f"{len(packages) - len(skipped)} packages asked about, {len(known)} known vulnerabilities")
    return 1 if known else 0


def _nobody_asked(reason: str) -> int:
    print(f"WARNING: vulnerabilities are NOT checked: {reason}", file=sys.stderr)
    return 0


def main(arguments: list[str]) -> int:
    """See the module."""
    match arguments:
        case ["sbom", tool, out]:
            return write_sbom(tool, Path(out))
        case ["known", tool]:
            return ask_known(tool)
        case ["known", tool, seconds]:
            return ask_known(tool, float(seconds))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
