"""Tables in documents that are made from code: <!-- table: name --> … <!-- end -->."""

import os
import re

from tests.support.paths import DOCS


def make_table(header, rows):
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def assert_table(document, name, table):
    """Compare a document's table with what the code says; ``UPDATE_GOLDEN=1`` rewrites it."""
    path = DOCS / document
    pattern = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    text = path.read_text(encoding="utf-8")
    expected = pattern.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)
    assert pattern.search(text), f"{document} has no table {name}"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(expected, encoding="utf-8")
        text = expected
    assert text == expected, f"docs/{document}: table {name} is not what the code says (UPDATE_GOLDEN=1 rewrites it)"
