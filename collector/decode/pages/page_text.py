"""A page of Prometheus text or OpenMetrics -> the numbers that are needed, per engine; the rest is stepped over.

    name{label="value",...} number [timestamp] [# exemplar]

A page is the same lines with other numbers every time, so the places of the needed ones are remembered with the bytes
that precede each number: while those stand where they stood, a page costs one split and some fifty conversions. Any
difference (a line more, a label that changed), and every 64th page, is read line by line again.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import msgspec

from collector.telemetry import ScrapeOutcome

from .engine_flavours import (
    BOUND_LABEL,
    CACHE_INFO,
    COPY_LABEL,
    ENGINE_LABEL,
    NEEDED,
    SERIES,
    Flavour,
    Meaning,
    Series,
    family,
)

PAGE_BYTES_MAX = 8 * 2**20
ENGINES_MAX = 64
"""Data-parallel ranks on one page."""
SERIES_MAX = 16_384
"""Needed series on one page, for reading it anew takes ten times as long as knowing it: 64 ranks have some 5,000."""
VALUE_MAX = 2.0**53
"""Beyond it a counter no longer counts by one."""
_REREAD_PAGES = 64
_LABELS_BYTES_MAX = 4096
_TEXT_CHARS_MAX = 256
_LABEL = re.compile(rb'\s*([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPED = re.compile(rb"\\(.)")
_HTML = re.compile(rb"\s*<(?:!doctype|html|\?xml|head|body)", re.IGNORECASE)
_DIGITS_MAX = 18
NAN = math.nan

InfoLabels = dict[str, str]


class EngineReading(msgspec.Struct, frozen=True, gc=False):
    """What the page says of one engine: ``values[meaning]``, NaN where the page has no such family."""

    engine: str
    model: str
    flavour: Flavour
    values: tuple[float, ...]
    facts: dict[str, int | bool]


class _Place(NamedTuple):
    """A needed number: the line it is in, the bytes before it, where it is added, and how often."""

    line: int
    before: bytes
    engine: int
    meaning: Meaning
    factor: float = 1.0


class _Layout(NamedTuple):
    lines: int
    places: tuple[_Place, ...]
    engines: tuple[tuple[str, str, Flavour, dict[str, int | bool]], ...]


class PageParser:
    """Reads the pages of one server, which mostly look alike.

    Attributes:
        missing: names of needed families that the last page lacked, when that was the reason to skip it.
    """

    def __init__(self) -> None:
        self._layout: _Layout | None = None
        self._pages = 0
        self.missing: tuple[str, ...] = ()

    def parse(self, page: bytes) -> tuple[EngineReading, ...] | ScrapeOutcome:
        """Readings per engine, or why there are none."""
        if len(page) > PAGE_BYTES_MAX:
            return ScrapeOutcome.TOO_LARGE
        if not page.endswith(b"\n"):  # the last number may be the beginning of another one
            return ScrapeOutcome.NOT_A_PAGE if _HTML.match(page) else ScrapeOutcome.TRUNCATED
        lines = page.split(b"\n")
        self._pages += 1
        layout = self._layout
        values = None
        if layout is not None and layout.lines == len(lines) and self._pages % _REREAD_PAGES:
            values = _numbers(lines, layout)
        if values is None:
            found = self._read_layout(page, lines)
            if isinstance(found, ScrapeOutcome):
                self._layout = None
                return found
            self._layout = layout = found
            values = _numbers(lines, layout)
        if layout is None or values is None:
            self._layout = None
            return ScrapeOutcome.NOT_A_NUMBER
        return tuple(
            EngineReading(name, model, flavour, tuple(numbers), facts)
            for (name, model, flavour, facts), numbers in zip(layout.engines, values, strict=True)
        )

    def explain(self, outcome: ScrapeOutcome) -> str:
        """Why the last page was refused: of families that it lacks, which."""
        lacks = f": {', '.join(self.missing)}" if outcome is ScrapeOutcome.MISSING_FAMILIES else ""
        return f"{outcome.value}{lacks}"

    def _read_layout(self, page: bytes, lines: list[bytes]) -> _Layout | ScrapeOutcome:
        search = _Search()
        for number, line in enumerate(lines):
            name, brace, _ = line.partition(b"{")
            series = SERIES.get(name if brace else name.partition(b" ")[0])
            if series is not None:
                search.add(number, line, series)
            elif line.startswith(CACHE_INFO):
                search.infos.append(_labels(line)[0])
            if search.series > SERIES_MAX:
                return ScrapeOutcome.TOO_LARGE
        if not search.known:
            return ScrapeOutcome.NOT_A_PAGE if _HTML.match(page) else ScrapeOutcome.UNKNOWN_ENGINE
        if len(search.known) > ENGINES_MAX:
            return ScrapeOutcome.TOO_MANY_ENGINES
        self.missing = _missing(search.known[0][2], {meaning for index, meaning in search.best if index == 0})
        return ScrapeOutcome.MISSING_FAMILIES if self.missing else search.layout(len(lines))


class _Search:
    """Needed series of a page that is read line by line."""

    def __init__(self) -> None:
        self.known: list[tuple[str, str, Flavour, dict[str, int | bool]]] = []
        self.best: dict[tuple[int, Meaning], int] = {}
        self.infos: list[InfoLabels] = []
        self._engines: dict[str, int] = {}
        self._places: list[tuple[int, _Place]] = []
        self._seen: set[tuple[bytes, tuple[tuple[str, str], ...]]] = set()
        self._histograms: dict[tuple[Series, tuple[tuple[str, str], ...]], list[tuple[float, _Place]]] = {}

    def add(self, number: int, line: bytes, series: Series) -> None:
        """Note where a needed number stands."""
        labels, end = _labels(line)
        if end < 0 or (series.only is not None and labels.get(series.only[0]) != series.only[1]):
            return
        labels.pop(COPY_LABEL, None)
        identity = (line[: _name_end(line)], tuple(sorted(labels.items())))
        if identity in self._seen:  # of another rank, or simply there twice
            return
        self._seen.add(identity)
        name = labels.get(ENGINE_LABEL, "0")
        index = self._engines.setdefault(name, len(self.known))
        if index == len(self.known):
            if index > ENGINES_MAX:
                return
            self.known.append((name, labels.get("model_name", ""), series.flavour, {}))
        place = _Place(number, line[:end], index, series.meaning)
        if BOUND_LABEL in labels:
            self._add_bucket(labels, series, place)
        else:
            self._places.append((series.rank, place))
        key = (index, series.meaning)
        self.best[key] = min(self.best.get(key, series.rank), series.rank)

    def _add_bucket(self, labels: InfoLabels, series: Series, place: _Place) -> None:
        try:
            bound = float(labels.pop(BOUND_LABEL))
        except ValueError:
            return
        if not 0.0 <= bound <= VALUE_MAX and bound != math.inf:
            return
        self._histograms.setdefault((series, tuple(sorted(labels.items()))), []).append((bound, place))

    @property
    def series(self) -> int:
        """How many were noted."""
        return len(self._seen) + len(self.infos)

    def layout(self, lines: int) -> _Layout:
        """The places of the best series of each meaning, and the facts in labels."""
        for (series, _), buckets in self._histograms.items():
            self._places += [(series.rank, place) for place in _squares(buckets)]
        for info in self.infos:
            for name, index in self._engines.items():
                if info.get(ENGINE_LABEL, name) == name:
                    self.known[index][3].update(_cache_facts(info, len(self._engines)))
        chosen = tuple(place for rank, place in self._places if rank == self.best[place.engine, place.meaning])
        return _Layout(lines, chosen, tuple(self.known))


def _squares(buckets: list[tuple[float, _Place]]) -> list[_Place]:
    """Places whose sum is that of the squares: every bucket also counts what is in those below it.

    Of buckets with one bound the first counts, as ``1e999`` and ``+Inf`` are one.
    """
    by_bound = dict(reversed(buckets))
    bounds = sorted(by_bound)
    middles = [
        (low + high) / 2.0 if high < math.inf else low for low, high in zip([0.0, *bounds], bounds, strict=False)
    ]
    above = [*(middle**2 for middle in middles[1:]), 0.0]
    return [
        place._replace(factor=middle**2 - next_square)
        for place, middle, next_square in zip((by_bound[bound] for bound in bounds), middles, above, strict=True)
    ]


def _missing(flavour: Flavour, found: set[Meaning]) -> tuple[str, ...]:
    lacking = sorted(NEEDED[flavour] - found)
    # How long steps take comes from the latencies or from the clock; how many there were, from the steps' counter or
    # from the latencies' one.
    if Meaning.STEPS not in found and Meaning.ITL_COUNT not in found:
        lacking.append(Meaning.STEPS if flavour is Flavour.VLLM else Meaning.ITL_COUNT)
    return tuple(dict.fromkeys(family(flavour, meaning) for meaning in lacking))


def _numbers(lines: list[bytes], layout: _Layout) -> list[list[float]] | None:
    """Values per engine; None where a line is not what it was, or where a number is none."""
    values = [[NAN] * len(Meaning) for _ in layout.engines]
    for line_number, before, engine, meaning, factor in layout.places:
        line = lines[line_number]
        if not line.startswith(before):
            return None
        text = line[len(before) :]
        try:
            value = float(text)
        except ValueError:
            value = _first_number(text)
        if not 0.0 <= value <= VALUE_MAX:
            return None
        row, value = values[engine], value * factor
        row[meaning] = value if math.isnan(row[meaning]) else row[meaning] + value
    return values


def _first_number(text: bytes) -> float:
    """The number before a timestamp or an exemplar; NaN for anything else."""
    parts = text.split(None, 1)
    try:
        return float(parts[0]) if parts else NAN
    except ValueError:
        return NAN


def _name_end(line: bytes) -> int:
    end = line.find(b"{")
    return end if end >= 0 else line.find(b" ")


def _labels(line: bytes) -> tuple[InfoLabels, int]:
    """Labels, and where the number begins; -1 for a line that is none."""
    at = _name_end(line)
    if at < 0:
        return {}, -1
    if line[at : at + 1] == b" ":
        return {}, at + 1
    labels: InfoLabels = {}
    at += 1
    limit = at + _LABELS_BYTES_MAX
    while match := _LABEL.match(line, at, limit):
        value = _ESCAPED.sub(_unescaped, match[2]) if b"\\" in match[2] else match[2]
        labels[match[1].decode()] = value.decode("utf-8", "replace")[:_TEXT_CHARS_MAX]
        at = match.end()
    return (labels, at + 1) if line[at : at + 1] == b"}" else ({}, -1)


def _unescaped(match: re.Match[bytes]) -> bytes:
    return b"\n" if match[1] == b"n" else match[1]


def _cache_facts(labels: InfoLabels, engines: int) -> dict[str, int | bool]:
    """Facts of one engine: vLLM tells each of them the blocks of all ``engines`` of the page together."""
    out: dict[str, int | bool] = {}
    for name, shared_by in (("block_size", 1), ("num_gpu_blocks", engines)):
        text = labels.get(name, "")
        if text.isascii() and text.isdigit() and (own := int(text[:_DIGITS_MAX]) // shared_by) > 0:
            out[name] = own
    if labels.get("enable_prefix_caching") in ("True", "False"):
        out["enable_prefix_caching"] = labels["enable_prefix_caching"] == "True"
    return out
