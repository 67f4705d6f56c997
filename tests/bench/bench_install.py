"""From ``pip install`` of the wheel to a printed coefficient, and what ``--help`` costs: ``make bench WHAT=install``.

The environment is fresh and of this Python, or of ``ARGS=/path/to/python``; what the index takes is part of it.
"""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET_S, HELP_TARGET_S = 60.0, 0.15
FIRST_LINE = re.compile(r"\s*\d+ s\s+\d+ ")
RUNS = 5


def spent_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def first_coefficient(command: list[str], directory: str) -> str:
    """The demo's first line with coefficients; the demo is interrupted then."""
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        line = next(line for line in demo.stdout if FIRST_LINE.match(line))
        demo.send_signal(signal.SIGINT)
        demo.stdout.read()
    return line.strip()


def main() -> int:
    """Install, ask, print."""
    python = sys.argv[1] if len(sys.argv) > 1 else sys.executable
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as directory:
        build = [sys.executable, *pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", directory, "."]
        subprocess.run(build, check=True)
        (wheel,) = Path(directory).glob("*.whl")
        subprocess.run([python, "-m", "venv", f"{directory}/venv"], check=True)
        begun_s = time.monotonic()
        subprocess.run([f"{directory}/venv/bin/python", *pip, "install", str(wheel)], check=True)
        installed_s = time.monotonic() - begun_s
        tracefit = f"{directory}/venv/bin/tracefit"
        said = first_coefficient([tracefit, "demo"], directory)
        both_s = time.monotonic() - begun_s
        helps = []
        for _ in range(RUNS):
            before_s = spent_s()
            subprocess.run([tracefit, "--help"], stdout=subprocess.DEVNULL, check=True)
            helps.append(spent_s() - before_s)
    sys.stdout.write(
        f"{said}\n"
        f"install {installed_s:.1f} s, first coefficient after {both_s:.1f} s (target {TARGET_S:g} s)\n"
        f"--help  {min(helps):.2f} s of CPU (target {HELP_TARGET_S:g} s)\n"
    )
    return int(both_s > TARGET_S or min(helps) > HELP_TARGET_S)


if __name__ == "__main__":
    sys.exit(main())
