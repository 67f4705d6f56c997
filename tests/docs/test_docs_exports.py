"""docs/exports.md names every format and option of the command."""

from __future__ import annotations

import argparse
import re

from collector.commands.questions import EXPORT_FORMATS, add_assumption_options
from exporters.files.dynamo import DECODE_FILE, MOCKER_FILE, NOTE_FILE, PREFILL_FILE
from tests.support.paths import DOCS

TEXT = (DOCS / "exports.md").read_text()


def test_every_format_is_told():
    table = TEXT.partition("| format |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert sorted(name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)) == sorted(EXPORT_FORMATS)


def test_every_option_is_told():
    parser = argparse.ArgumentParser(add_help=False)
    add_assumption_options(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    assert options <= set(re.findall(r"--[\w-]+", TEXT))


def test_every_file_of_the_directory_is_told():
    assert all(f"`{name}`" in TEXT for name in (PREFILL_FILE, DECODE_FILE, MOCKER_FILE, NOTE_FILE))
