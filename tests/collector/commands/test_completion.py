"""The completion script knows commands, options and files, in a real shell."""

from __future__ import annotations

import subprocess

import pytest

from collector.cli import main


@pytest.fixture
def script(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--print-completion", "bash"])
    assert stop.value.code == 0
    path = tmp_path / "tracefit.bash"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tracefit exp", {"export"}),
        ("tracefit export --forma", {"--format"}),
        ("tracefit fleet p", {"pull"}),
        ("tracefit export --format blis-", {"blis-yaml", "blis-flags", "blis-trace"}),
        ("tracefit run --config tracefit.b", {"tracefit.bash"}),
    ],
)
def test_the_shell_offers_what_fits(script, words, expected):
    asked = f"""
        source {script}
        COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _shtab_tracefit
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", asked], cwd=script.parent, capture_output=True, text=True, check=True, timeout=60
    )
    assert expected <= set(done.stdout.split())
