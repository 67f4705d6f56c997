"""Configuration: defaults, profile, YAML, environment; checked whole before anything starts.

Strongest first: ``TRACEFIT_<SECTION>__<KEY>`` variables (two underscores go one level down, values are YAML, so lists
work), the YAML file, a profile (a configuration file that comes with tracefit), the defaults here. Where the
OpenTelemetry Collector has the same knob, the key has its name. An unknown key, a key given twice or a value out of
range is a :class:`ConfigError` with the key's path.

With ``config.on_error: degrade`` a wrong configuration does not end the process: in a pod a sidecar that ends takes its
vLLM out of service. There the defaults hold instead, with those environment variables that can be used. They open
nothing that was to be closed: where the wrong configuration names a token or a certificate anywhere, they receive on
the loopback alone and refuse the pages that a token would have closed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from .schema import Config, ReceiversConfig, ScrapeEndpoint, Section, entry_of

ENV_PREFIX = "TRACEFIT_"
ENV_FILE = "TRACEFIT_CONFIG"
"""The one variable that is no key: the path of the configuration file."""


_SERVICE_LINK: Final = re.compile(
    r"""TRACEFIT_(?:[A-Z0-9]+_)*?(?:
        SERVICE_HOST | SERVICE_PORT(?:_[A-Z0-9]+)*
      | PORT | PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?
    )""",
    re.VERBOSE,
)
"""What Kubernetes puts into every container for a Service named ``tracefit`` or ``tracefit-…``."""
_SERVICE_LINK_VALUE: Final = re.compile(r"(?:(?:tcp|udp|sctp)://.*|[0-9a-fA-F.:]+|tcp|udp|sctp|None)", re.IGNORECASE)

_V6_ENDPOINT: Final = re.compile(r"\[[0-9a-fA-F:.]+\]:[0-9]+")
"""YAML would take it for a list; as a variable nobody quotes it."""

_PROFILES = Path(__file__).parent / "profiles"


def profile_names() -> list[str]:
    """The configuration files that come with tracefit."""
    return sorted(path.stem for path in _PROFILES.glob("*.yaml"))


def scraping(config: Config, urls: Sequence[str]) -> Config:
    """The same with these pages to scrape, beside those of the file; an address alone means its ``/metrics``."""
    endpoints = []
    for url in urls:
        try:
            endpoint = msgspec.convert({"url": url if "://" in url else f"http://{url}"}, ScrapeEndpoint)
        except msgspec.ValidationError:
            shown = f"...@{url.rpartition('@')[2]}" if "@" in url else url  # what stands before it may be a password
            raise ConfigError("--scrape", f"{shown!r} is no address like http://host:8000/metrics") from None
        endpoints.append(endpoint)
    receivers, scrape = config.receivers, config.receivers.scrape
    new = tuple(endpoint for endpoint in endpoints if endpoint not in scrape.endpoints)
    scrape = msgspec.structs.replace(scrape, endpoints=scrape.endpoints + new)
    return msgspec.structs.replace(config, receivers=msgspec.structs.replace(receivers, scrape=scrape))


def load(path: Path | None, environ: Mapping[str, str], profile: str | None = None) -> Config:
    """The configuration, or a ConfigError that names the key at fault."""
    tree = read_yaml(path) if path is not None else {}
    if profile is not None:
        tree = _merge(read_yaml(_PROFILES / f"{profile}.yaml"), tree)
    origin: dict[str, str] = {}
    for variable in sorted(environ):
        if _is_key(variable, environ[variable]):
            _override(tree, variable, environ[variable], origin)
    found = _check_words(tree, Config)
    if found is None:
        try:
            return msgspec.convert(tree, Config)
        except msgspec.ValidationError as error:
            found = _explain(str(error))
    key, problem = found
    if problem == "unknown key" and key in origin:  # TRACEFIT_QUEUE_WAIT_S: nothing near it at the top level
        problem += suggestion(origin[key], _variables(to_tree(Config()), ENV_PREFIX))
    below = (variable for path, variable in origin.items() if path.startswith(f"{key}."))
    raise ConfigError(origin.get(key) or next(below, key), problem)


def _is_key(variable: str, value: str) -> bool:
    """Whether a variable sets a key: it has our prefix and is neither the file nor a service link of Kubernetes."""
    if not variable.startswith(ENV_PREFIX) or variable == ENV_FILE:
        return False
    return not (_SERVICE_LINK.fullmatch(variable) and _SERVICE_LINK_VALUE.fullmatch(value))


def _variables(tree: dict[str, Any], prefix: str) -> list[str]:
    """The variable of every key, as it is written."""
    return [
        variable
        for key, value in tree.items()
        for variable in (
            _variables(value, f"{prefix}{key.upper()}__")
            if value and isinstance(value, dict)
            else [f"{prefix}{key.upper()}"]
        )
    ]


def to_yaml(config: Config) -> str:
    """The effective configuration, as a file that gives it again."""
    text: str = yaml.safe_dump(to_tree(config), sort_keys=False)
    return text


def to_tree(config: Config) -> dict[str, Any]:
    """The effective configuration, as sections of plain values."""
    tree: dict[str, Any] = msgspec.to_builtins(config, builtin_types=())
    return tree


def json_schema() -> dict[str, Any]:
    """JSON Schema of the configuration file."""
    return msgspec.json.schema(Config)


class _UniqueKeys(yaml.SafeLoader):
    """YAML says that a key given twice is an error; PyYAML keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a word", key_node.start_mark)
            if key_node.value in keys:
                problem = f"key {key_node.value!r} given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of a file, unchecked; a ConfigError if it is no YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(str(path), f"cannot be read: {reason}") from None
    tree = _parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(str(path), f"expected a mapping of sections, got {type(tree).__name__}")
    return tree


def _parse_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeys)  # noqa: S506 -- a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(origin, f"{error.problem}{line}") from None
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        # the last three come from a tag that lies about its value: !!bool 2, !!int '', !!map [1], !!timestamp x
        raise ConfigError(origin, f"not YAML: {type(error).__name__}") from None


def _merge(weaker: dict[str, Any], stronger: dict[str, Any]) -> dict[str, Any]:
    """Sections key by key, values whole."""
    merged = weaker | stronger
    for key in weaker.keys() & stronger.keys():
        if isinstance(weaker[key], dict) and isinstance(stronger[key], dict):
            merged[key] = _merge(weaker[key], stronger[key])
    return merged


def _override(tree: dict[str, Any], variable: str, text: str, origin: dict[str, str]) -> None:
    path = variable.removeprefix(ENV_PREFIX).lower().split("__")
    level = tree
    for depth, name in enumerate(path[:-1]):
        below = level.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(variable, f"{'.'.join(path[: depth + 1])} is a value, not a section")
        level = below
    level[path[-1]] = text if _V6_ENDPOINT.fullmatch(text) else _parse_yaml(text, variable)
    origin[".".join(path)] = variable


_AT = re.compile(r"^(?P<problem>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)


def _check_words(tree: Any, kind: Any, path: str = "") -> tuple[str, str] | None:
    """The first key that a section does not have, or value that is none of a few words: its path, and why."""
    if isinstance(tree, list):
        return _first(_check_words(each, kind, f"{path}[...]") for each in tree)
    if isinstance(kind, type) and issubclass(kind, Section):
        if not isinstance(tree, dict):
            return path, f"expected object, got {'null' if tree is None else type(tree).__name__}"
        return _check_keys(tree, kind, path)
    entry = entry_of(kind)
    if entry is not None and isinstance(tree, dict):
        return _check_keys(tree, entry, path)
    known = msgspec.json.schema(kind).get("enum", ()) if isinstance(tree, str) else ()
    return (path, f"{tree!r} is not one of {', '.join(known)}") if known and tree not in known else None


def _check_keys(tree: dict[Any, Any], section: type[Section], path: str) -> tuple[str, str] | None:
    if any(not isinstance(key, str) for key in tree):
        return path or "(top level)", "keys are words"
    fields = {field.name: field.type for field in msgspec.structs.fields(section)}
    paths = {key: f"{path}.{key}".lstrip(".") for key in tree}
    unknown = next((key for key in tree if key not in fields), None)
    if unknown is not None:
        return paths[unknown], "unknown key" + suggestion(unknown, fields)
    return _first(_check_words(value, fields[key], paths[key]) for key, value in tree.items())


def _first(found: Iterable[tuple[str, str] | None]) -> tuple[str, str] | None:
    return next(filter(None, found), None)


def _explain(text: str) -> tuple[str, str]:
    """The dotted key and the problem out of msgspec's sentence (``Expected `int` >= 1 - at `$.join.engines_max```)."""
    match = _AT.match(text)
    if match is None:
        return "(top level)", text
    problem, path = match["problem"], (match["path"] or "").lstrip(".")
    if "matching regex" in problem:
        problem = "expected host:port, the port 0 to 65535"
    return path or "(top level)", problem[:1].lower() + problem[1:].replace("`", "")


_ON_ERROR: Final = f"{ENV_PREFIX}CONFIG__ON_ERROR"
_CREDENTIAL: Final = re.compile(rb"(token|cert|key|ca)_file", re.IGNORECASE)


class Fallback(NamedTuple):
    """Why the defaults hold instead of the configuration given, and whether the pages have to stay closed."""

    problem: str
    closed: bool

    def __str__(self) -> str:
        return f"the defaults hold: {self.problem}"


class Loaded(NamedTuple):
    """The configuration to run with, and why it is another than the one given (None: it is the one given)."""

    config: Config
    fallback: Fallback | None = None


def load_or_degrade(
    path: Path | None,
    environ: Mapping[str, str],
    profile: str | None = None,
    check: Callable[[Config], None] = lambda _: None,
) -> Loaded:
    """The configuration; if it is wrong, what ``config.on_error`` says: a ConfigError, or the defaults.

    Args:
        path: the file, if there is one.
        environ: the environment.
        profile: the name of a profile.
        check: raises ConfigError for what only shows when it is used (a feature set nobody knows, a missing file).
    """
    try:
        config = load(path, environ, profile)
        if config.config.on_error == "degrade":
            check(config)
    except ConfigError as error:
        if not _must_run(path, environ):
            raise
        closed = _names_credential(path, environ)
        defaults = load(None, _usable_variables(environ, check))
        if closed:
            defaults = msgspec.structs.replace(defaults, receivers=ReceiversConfig())
        return Loaded(defaults, Fallback(str(error).removeprefix("config error: "), closed))
    return Loaded(config)


def _must_run(path: Path | None, environ: Mapping[str, str]) -> bool:
    """Whether ``config.on_error`` is ``degrade``, as far as a wrong configuration can say so."""
    if _ON_ERROR in environ:
        return environ[_ON_ERROR] == "degrade"
    try:
        section = read_yaml(path).get("config") if path is not None else None
    except ConfigError:
        return False
    return isinstance(section, dict) and section.get("on_error") == "degrade"


def _usable_variables(environ: Mapping[str, str], check: Callable[[Config], None]) -> dict[str, str]:
    """Those that can be used together; one that cannot is left out."""
    usable: dict[str, str] = {}
    for variable, value in ((name, environ[name]) for name in environ if name.startswith(ENV_PREFIX)):
        try:
            check(load(None, usable | {variable: value}))
        except ConfigError:
            continue
        usable[variable] = value
    return usable


def _names_credential(path: Path | None, environ: Mapping[str, str]) -> bool:
    """Whether a token or TLS is asked for anywhere; the text is searched, because it may be no YAML."""
    if any(variable.startswith(ENV_PREFIX) and _CREDENTIAL.search(variable.encode()) for variable in environ):
        return True
    try:
        return path is not None and _CREDENTIAL.search(path.read_bytes()) is not None
    except OSError:
        return False


_NOT_ONE_OF = re.compile(r"'(?P<word>[^']+)'.* is not one of (?P<known>[^;]+)$")


class ConfigError(Exception):
    """Bad configuration: ``key`` is the dotted path, the environment variable or the option at fault.

    A ``problem`` that reads "'x' is not one of a, b" is completed by the nearest of those.
    """

    def __init__(self, key: str, problem: str) -> None:
        choice = _NOT_ONE_OF.search(problem)
        if choice is not None:
            problem += suggestion(choice["word"], choice["known"].split(", "))
        super().__init__(f"{'usage' if key.startswith('--') else 'config'} error: {key}: {problem}")
        self.key = key
        self.problem = problem


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest of some words, empty if none is near."""
    import difflib  # noqa: PLC0415 -- needed by who is wrong only

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
