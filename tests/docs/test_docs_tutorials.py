"""Pages with examples: every command and every line of Python in them runs, and says what stands below it."""

import csv
import doctest
import json
import re
import shlex
import shutil
import subprocess

import pytest
import yaml

from collector.commands.ask import shown_lines
from collector.commands.demo import Slowdown, find_recording, read_tape, restamped, schedule
from collector.decode import Export
from collector.recordings import Recording
from tests.bench.figures import recorded
from tests.support.clocks import FakeClock
from tests.support.command_lines import parsed
from tests.support.paths import DATA, DOCS, ROOT
from tests.support.pipelines import replayed
from tests.support.tutorials import LEFT, assert_said, page_of, said, served, steps_of
from tests.tracefit.example_snapshot import encoded
from tests.tracefit.test_load import serving
from tracefit import load


def assert_python_says(text, least, flags=0):
    """The lines of Python in a document, more than so many, say what stands below them."""
    example, out = doctest.DocTestParser().get_doctest(text, {}, "document", "docs", 0), []
    assert len(example.examples) > least
    found = doctest.DocTestRunner(verbose=False, optionflags=flags).run(example, out=out.append)
    assert not found.failed, "".join(out)


# --- quickstart.md

QUICKSTART = (DOCS / "quickstart.md").read_text(encoding="utf-8")
QUICKSTART_STEPS = [
    pytest.param(step, id=f"{number}-{step.command.split()[1]}") for number, step in enumerate(steps_of(QUICKSTART))
]


@pytest.fixture(scope="module")
def sidecar():
    """The pages of a sidecar to which the demo has sent its whole recording."""
    with served(each.item for each in Recording(find_recording(), print)) as address:
        yield address


def play(tape, _speed, directory, slowdown, **_):
    """A demo to its end, without the waiting."""
    sendings = schedule(tape, 1.0, FakeClock(), slowdown, directory.name)
    pipeline = replayed((Export(each.payload, "", 1) for each in sendings), 16, feature_sets=("portable",))
    directory.mkdir(parents=True)
    (directory / "state.bin").write_bytes(pipeline.state())
    for line in shown_lines(load(pipeline.snapshot(1, 1).to_json()).config(), 0, "step_time"):
        print(line)
    return 0


@pytest.mark.parametrize("step", QUICKSTART_STEPS)
def test_every_command_says_what_stands_below_it(step, sidecar, tmp_path, monkeypatch):
    if step.command.startswith("tracefit demo"):  # the fixture: what it sends, without the waiting
        if not parsed(shlex.split(step.command)[1:]).gpu:
            return
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("collector.commands.demo.demo", play)
    assert_said(step, sidecar)


def test_the_recorded_end_of_the_demo_is_what_is_learned_today(sidecar):
    shown = shown_lines(load(sidecar).config(), 0, "step_time")
    learned = [line for line in shown if line.startswith("    ")]
    said = recorded()["demo"]["said"]
    verdict, plan = [n for n, line in enumerate(said) if not line][:2]
    assert [line for line in said[verdict:plan] if line.startswith("    ")] == learned, (
        "make bench WHAT=demo ARGS=--record"
    )


def test_the_examples_of_the_readme_are_of_the_demo(sidecar):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (name, labels, shown) = re.search(r"^(tracefit_coefficient)\{(.*)\} ([\d.]+)\.\.\.$", readme, re.MULTILINE).groups()
    wanted = set(labels.split(","))
    values = [
        line.rpartition(" ")[2]
        for line in page_of(f"{sidecar}/metrics").splitlines()
        if line.startswith(f"{name}{{") and wanted == set(line.partition("{")[2].rpartition("}")[0].split(","))
    ]
    assert [value.startswith(shown) for value in values] == [True]
    (shown,) = re.findall(r'^ +(\{"name": "intercept".*?\}), \.\.\.$', readme, re.MULTILINE)
    configs = json.loads(page_of(f"{sidecar}/snapshot"))["configs"]
    learned = configs[0]["targets"]["step_time"]["models"]["portable"]["features"][0]
    for key, value in json.loads(shown).items():
        assert learned[key] == (pytest.approx(value, rel=5e-3) if isinstance(value, float | int) else value), key


def test_every_line_of_python_says_what_stands_below_it(sidecar):
    assert_python_says(QUICKSTART.replace(LEFT, sidecar), 4, doctest.ELLIPSIS)


def test_the_status_page_has_what_the_tutorial_says_of_it(sidecar):
    page = page_of(sidecar)
    for title in re.findall(r"^\* \*(.+?)\*:", QUICKSTART, re.MULTILINE):
        assert title in page


# --- slower.md

SLOWER, _, SIBLING = (DOCS / "slower.md").read_text(encoding="utf-8").partition("## See a slower sibling")
FACTOR = 1.4


def test_a_throttled_machine_is_seen_where_the_tutorial_says(sidecar, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "healthy").mkdir()
    monkeypatch.setenv("TRACEFIT_LEARNERS", "[rls]")
    live, *steps = steps_of(SLOWER)
    assert live.command == f"tracefit demo --throttle {FACTOR}"
    recording = find_recording()
    said("curl http://localhost:9464/snapshot > healthy/snapshot.json", sidecar)
    slow = Slowdown(FACTOR).stamps(read_tape(recording))
    with served(
        (each._replace(payload=restamped(each.payload, slow)) for _, _, each in Recording(recording, print)),
        slow.slow_unix_ns,
    ) as slower:
        for step in steps:
            assert_said(step, slower)
        page, snapshot = page_of(slower), load(slower)
        document = said("curl http://localhost:9464/snapshot", slower)
    for title in re.findall(r"^\* \*(.+?)\*", SLOWER, re.MULTILINE):
        assert title in page
    assert "<dt>last change of speed</dt><dd>×1.38, " in page
    assert snapshot.config().usable
    (config,) = json.loads(document)["configs"]
    changed_unix_nano = config["targets"]["step_time"]["drift"]["last_unix_nano"]
    assert abs(changed_unix_nano - slow.slow_unix_ns) < 1e9, "the moment that is told is the true one"


def test_a_throttled_sibling_is_named_as_the_tutorial_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACEFIT_FEATURE_SETS", "[portable]")
    *demos, pull, show = steps_of(SIBLING)
    monkeypatch.setattr("collector.commands.demo.demo", play)
    for demo in demos:
        said(demo.command)
    assert_said(pull)
    assert_said(show)


# --- blis.md

BLIS_MD = (DOCS / "blis.md").read_text(encoding="utf-8")
BLIS_STEPS = steps_of(BLIS_MD)
FOLDER, BLIS = re.findall(r"```sh\n(.*?)```", BLIS_MD, re.DOTALL)[:2]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(DATA / "c10_long" / "otlp.pb.gz", tmp_path / "recording.pb.gz")
    monkeypatch.setenv("TRACEFIT_LEARNERS", "[rls]")  # the others take most of the time and are not exported
    return tmp_path


def test_every_command_of_the_blis_page_leaves_what_blis_is_started_with(home):
    subprocess.run(["bash", "-euc", FOLDER], cwd=home, check=True)
    for step in BLIS_STEPS:
        assert_said(step)
    named = re.findall(r"--(?:trace-header|trace-data|defaults-filepath|model-config-folder) (\S+)", BLIS)
    assert len(named) == 4
    assert all((home / path).exists() for path in named)
    file = yaml.safe_load((home / "tiny.blis.yaml").read_text())
    assert set(file) == {"version", "defaults", "workloads", "trained_physics_coefficients"}
    coefficients = file["trained_physics_coefficients"]
    assert (len(coefficients["alpha_coeffs"]), len(coefficients["beta_coeffs"])) == (3, 11)
    assert min(coefficients["alpha_coeffs"] + coefficients["beta_coeffs"]) >= 0
    with (home / "traffic" / "trace.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) > 600
    assert {"last_chunk_time_us", "arrival_time_us"} <= set(rows[0])


def test_blis_is_told_the_hardware_of_the_export():
    (export,) = [step.command for step in BLIS_STEPS if "blis-yaml" in step.command]
    hardware = re.compile(r"--hardware (\w+)")
    assert hardware.findall(export) == hardware.findall(BLIS)


# --- client.md

CLIENT = (DOCS / "client.md").read_text(encoding="utf-8")


@pytest.fixture
def client_pages():
    with serving(lambda page: page.send(body=encoded(), ETag='"a"')) as (_, url):
        yield url


def test_the_examples_of_the_client_run(client_pages):
    assert_python_says(CLIENT.replace("http://localhost:9464", client_pages), 10)
