"""The wheel that is built from a checkout has everything that its commands need, without the checkout."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email import message_from_bytes

import pytest

from tests.support.paths import ROOT

BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, unpacked as pip would."""
    directory = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(directory)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    name = built.stdout.splitlines()[-1]
    assert name.endswith("-py3-none-any.whl"), "pure Python: one wheel for every architecture"
    with zipfile.ZipFile(directory / name) as wheel:
        wheel.extractall(directory / "site")
    return directory / "site"


def run_installed(installed, *arguments):
    """Run what was unpacked: of two packages of one name, the one in the working directory is imported."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=installed, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_demo_finds_its_recording_in_the_wheel(installed):
    found = run_installed(installed, "-c", "from collector.commands.demo import *; print(find_recording(None))")
    assert found.stdout.strip() == str(installed / "collector" / "commands" / "demo_recording" / "otlp.pb.gz")
    learned = run_installed(
        installed, "-c", "from collector.commands.demo import *; print(len(read_index(find_recording(None))))"
    )
    assert int(learned.stdout) > 100, "when each export arrived comes along"
    made = "from collector.commands.demo import *; print(len(gpu_tape(SystemClock())))"
    assert int(run_installed(installed, "-c", made).stdout) > 100, "and so does the table of the GPU"


def test_documents_name_the_wheel_that_is_built_and_its_size(installed):
    (wheel,) = installed.parent.glob("*.whl")
    documents = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    named = {name for text in documents.values() for name in re.findall(r"tracefit-[\d.]+-py3-none-any\.whl", text)}
    assert named == {wheel.name}
    (megabytes,) = re.findall(r"\(([\d.]+) MB, pure Python", documents[ROOT / "README.md"])
    assert wheel.stat().st_size / 1e6 == pytest.approx(float(megabytes), abs=0.1)


def test_every_file_that_code_reads_is_in_the_wheel(installed):
    for package in ("collector", "online", "exporters", "tracefit"):
        expected = {
            path.relative_to(ROOT)
            for path in (ROOT / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        missing = {path for path in expected if not (installed / path).is_file()}
        assert not missing


def test_the_wheel_says_what_it_is_and_may_not_be_uploaded_by_mistake(installed):
    (metadata,) = installed.glob("tracefit-*.dist-info/METADATA")
    said = message_from_bytes(metadata.read_bytes())
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.11"
    assert "Private :: Do Not Upload" in said.get_all("Classifier")
    assert {"evaluate", "fleet", "kv", "zstd"} <= set(said.get_all("Provides-Extra"))
    assert list(installed.glob("tracefit-*.dist-info/licenses/LICENSE"))
    assert not said.get_all("Project-URL"), "nobody's address is made up"
