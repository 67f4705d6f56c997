"""The wheel that is built from a checkout has everything that its commands need, without the checkout."""

import re
import sys
import zipfile
from email import message_from_bytes

import pytest

from tests.support.paths import ROOT
from tests.support.processes import output_of

BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, unpacked as pip would."""
    directory = tmp_path_factory.mktemp("wheel")
    name = output_of(sys.executable, "-c", BUILD, directory, cwd=ROOT).splitlines()[-1]
    assert name.endswith("-py3-none-any.whl"), "pure Python: one wheel for every architecture"
    with zipfile.ZipFile(directory / name) as wheel:
        wheel.extractall(directory / "site")
    return directory / "site"


DEMO = """
from collector.commands.demo import *
found = [find_recording(gpu=gpu) for gpu in (False, True)]
print(*found, *(len(read_tape(each)) for each in found), sep="\\n")
"""


def test_the_demo_finds_its_recordings_in_the_wheel(installed):
    """Of two packages of one name, the one in the working directory is imported: that of the wheel."""
    *found, arrivals, seconds = output_of(sys.executable, "-c", DEMO, cwd=installed).splitlines()
    packed = installed / "collector" / "commands" / "recordings"
    assert found == [str(packed / name / "otlp.pb.gz") for name in ("c10_long", "simulated/h100")]
    assert min(int(arrivals), int(seconds)) > 100, "and reads them"


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
    assert {"fleet", "kv"} <= set(said.get_all("Provides-Extra"))
    assert list(installed.glob("tracefit-*.dist-info/licenses/LICENSE"))
    assert not said.get_all("Project-URL"), "nobody's address is made up"
