"""``tracefit run``: what its options set, whatever file and environment say."""

from __future__ import annotations

import pytest
import yaml

import collector.app
from collector.cli import main


@pytest.fixture
def started(monkeypatch):
    """What would have been started."""
    seen = []

    def serve(loaded, _clock, _stop):
        seen.append(loaded)
        return True

    monkeypatch.setattr(collector.app, "run", serve)
    return seen


OPTIONS = ["--listen", "127.0.0.1:5317", "--pages", "[::1]:5464", "--dir", "my: files", "--scrape", "h:8000"]


def test_options_win_over_the_file_and_the_environment(started, monkeypatch, tmp_path):
    file = tmp_path / "tracefit.yaml"
    file.write_text("listen: 127.0.0.1:1\npages: 127.0.0.1:2\ndirectory: d\nscrape: [http://a/metrics]\nitl_ms: [30]")
    monkeypatch.setenv("TRACEFIT_LISTEN", "127.0.0.1:3")
    assert main(["run", "--config", str(file), *OPTIONS]) == 0
    config = started[0].config
    assert (config.listen, config.pages, config.directory) == ("127.0.0.1:5317", "[::1]:5464", "my: files")
    assert (config.scrape, config.itl_ms) == (("http://a/metrics", "h:8000"), (30.0,))


def test_options_hold_where_the_file_is_broken_and_the_process_must_run(started, monkeypatch, tmp_path):
    file = tmp_path / "tracefit.yaml"
    file.write_text("{ not: [yaml")
    monkeypatch.setenv("TRACEFIT_ON_ERROR", "degrade")
    assert main(["run", "--config", str(file), *OPTIONS]) == 0
    assert started[0].config.listen == "127.0.0.1:5317"
    assert "the defaults hold" in str(started[0].fallback)


def test_config_check_marks_what_is_not_the_default(monkeypatch, capsys):
    monkeypatch.setenv("TRACEFIT_SCRAPE", "[h:8000]")
    assert main(["config", "check", "--profile", "gateway"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "#" in line] == ["scrape:  # not the default"]
    assert yaml.safe_load("\n".join(lines))["scrape"] == ["h:8000"]


def test_the_help_of_run_shows_how_a_variable_sets_a_key(capsys):
    assert main(["run", "--help"]) == 0
    assert "TRACEFIT_ITL_MS=30 tracefit run" in capsys.readouterr().out


def test_the_help_of_a_question_has_its_options_under_headings(capsys):
    assert main(["predict", "--help"]) == 0
    text = capsys.readouterr().out
    step, load = text.index("What one step costs:"), text.index("What requests see at a load:")
    assert step < text.index("--prefill") < load < text.index("--concurrency")
