"""All configurations in one table, with a filter where they are many; which of them are opened below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from exporters.status_page.sections import config_facts, config_title
from exporters.wording import count, escape, percent
from online import ConfigSnapshot
from tracefit import told_apart

MAX_OVERVIEW = 200
MAX_DETAILS = 6
"""More configurations than this are in the overview only; their links open them one by one."""
MANY = 10
"""Beyond so many there is a filter."""
MAX_WORDS = 200
FILTER = "filter"
"""The parameter of the page's address."""
REFRESH = "refresh"
"""Seconds after which a page without a script is loaded again."""


class Choice(NamedTuple):
    """What of all configurations is shown.

    Attributes:
        chosen: id of the only one that is opened; empty without such a wish.
        words: each of them is in the title, the facts, the telemetry or the id of what is listed.
    """

    chosen: str
    words: str
    listed: Sequence[ConfigSnapshot]
    opened: Sequence[ConfigSnapshot]


def choose(configs: Sequence[ConfigSnapshot], query: Mapping[str, str]) -> Choice:
    """By the address of the page: ``config`` opens one, ``filter`` lists those with these words."""
    chosen = [config for config in configs if config.config_id == query.get("config")]
    words = query.get(FILTER, "")[:MAX_WORDS]
    wanted = words.casefold().split()
    listed = [config for config in configs if all(word in _text(config) for word in wanted)] if wanted else configs
    return Choice(chosen[0].config_id if chosen else "", words, listed, chosen or listed[:MAX_DETAILS])


def _text(config: ConfigSnapshot) -> str:
    words = (config_title(config), config_facts(config), config.telemetry, config.config_id)
    return " ".join(words).casefold()


def learned_rows(config: ConfigSnapshot) -> int:
    """Rows of all targets."""
    return sum(max((model.rows for model in target.models.values()), default=0) for target in config.targets.values())


def overview(configs: Sequence[ConfigSnapshot], choice: Choice) -> str:
    """The section of the page; empty where there is one configuration only."""
    if len(configs) == 1:
        return ""
    shown = told_apart_of(configs, choice.listed[:MAX_OVERVIEW])
    rows = "".join(_row(config, choice.chosen, apart) for config, apart in shown)
    hidden = len(choice.listed) - MAX_OVERVIEW
    more = f'<p class="quiet">{hidden} more in <a href="/snapshot">/snapshot</a>.</p>' if hidden > 0 else ""
    narrowed = choice.chosen or choice.words
    back = f'<p><a href="/">All {count(len(configs))} configurations</a></p>' if narrowed else ""
    none = "<p>No configuration has all of these words.</p>" if not choice.listed else ""
    return (
        f"{_filter(choice.words) if len(configs) > MANY else ''}"
        '<section id="overview" aria-labelledby="overview-title" data-live><h2 id="overview-title">Configurations</h2>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of configurations"><table class="overview">'
        '<thead><tr><th scope="col">model</th><th scope="col">facts</th><th scope="col">telemetry</th>'
        '<th scope="col" class="num">rows</th><th scope="col" class="num">step error</th><th scope="col">id</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>{none}{more}{back}</section>"
    )


def _filter(words: str) -> str:
    """Outside of what the script replaces, so that a half-typed word stays."""
    return (
        '<form class="filter" method="get" action="/" role="search"><label>Filter configurations '
        f'<input type="search" name="{FILTER}" value="{escape(words)}" placeholder="model, GPU, TP, id" '
        'autocomplete="off"></label> <button>Show</button></form>'
    )


def told_apart_of(
    configs: Sequence[ConfigSnapshot], shown: Sequence[ConfigSnapshot]
) -> Iterator[tuple[ConfigSnapshot, tuple[str, ...]]]:
    """What tells each that is shown from all others, and since when it is silent."""
    heard = [each.last_heard_unix_nano for each in configs]
    replaced = [bool(each.replaced_by) for each in configs]
    apart = told_apart([(each.config_id, each.config) for each in configs], heard, replaced)
    by_id = {each.config_id: words for each, words in zip(configs, apart, strict=True)}
    yield from ((each, by_id[each.config_id]) for each in shown)


def _row(config: ConfigSnapshot, chosen: str, apart: Sequence[str]) -> str:
    step = config.targets.get("step_time")
    error = None if step is None else step.prediction_error
    name = escape(config.config_id)
    facts = escape(" · ".join(filter(None, (config_facts(config), *apart))))
    current = ' aria-current="true"' if config.config_id == chosen else ""
    return (
        f'<tr{current}><th scope="row"><a href="/?config={name}">{escape(config_title(config))}</a></th>'
        f"<td>{facts}</td><td>{escape(config.telemetry)}</td>"
        f'<td class="num">{count(learned_rows(config))}</td>'
        f'<td class="num">{"–" if error is None else percent(error.median_ape)}</td><td><code>{name}</code></td></tr>'
    )
