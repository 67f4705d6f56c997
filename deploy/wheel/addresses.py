# ruff: noqa: INP001 - a script that hatchling loads
"""A hook of hatchling: what a wheel says of itself away from the repository.

The repository knows no address of its own. Who publishes a release names one, as in ``make dist
URL=https://git.example.com/me/tracefit``: it becomes the project's addresses, and links of README.md lead there, to the
files of that version. Without it there are no addresses, and links to files name the file instead of leading nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "PROJECT_URL"
_OUTSIDE = r"(?![a-z]+:|#)"
_LINK = re.compile(rf"\[(?P<text>[^\]]+)\]\({_OUTSIDE}(?P<path>[^)]+)\)")
_PICTURE = re.compile(rf'(?P<attribute>src|srcset)="{_OUTSIDE}(?P<path>[^"]+)"')
_PICTURES = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)


class AddressHook(MetadataHookInterface):
    """Fills in what pyproject.toml declares as dynamic: ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both."""
        root = Path(self.root)
        url = os.environ.get(VARIABLE, "").rstrip("/")
        if url and not re.fullmatch(r"https?://[^\s\"'<>()]+", url):
            raise ValueError(f"{VARIABLE}: {url!r} is no address like https://git.example.com/me/tracefit")
        readme = (root / "README.md").read_text(encoding="utf-8")
        (version,) = re.findall(r'^__version__ = "(.+)"$', (root / "collector/__init__.py").read_text(), re.MULTILINE)
        text = addressed(readme, url, f"v{version}") if url else named(readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = addresses(url, f"v{version}") if url else {}


def addresses(url: str, tag: str) -> dict[str, str]:
    """Of the project, as an index shows them."""
    return {
        "Homepage": url,
        "Documentation": f"{url}/blob/{tag}/docs/index.md",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }


def addressed(readme: str, url: str, tag: str) -> str:
    """The text with links and pictures of that version at that address."""
    readme = _LINK.sub(rf"[\g<text>]({url}/blob/{tag}/\g<path>)", readme)
    return _PICTURE.sub(rf'\g<attribute>="{url}/raw/{tag}/\g<path>"', readme)


def named(readme: str) -> str:
    """The text without pictures, with the names of files where links to them were."""

    def name(link: re.Match[str]) -> str:
        text, path = link["text"], link["path"].partition("#")[0]
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(name, _PICTURES.sub("", readme))
