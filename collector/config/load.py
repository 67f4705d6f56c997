"""Configuration: defaults, profile, YAML file, environment; checked whole before anything starts.

Strongest first: ``TRACEFIT_<KEY>`` variables (the value is YAML; a list may be words with commas between them), the
YAML file, the profile, the defaults. An unknown key or a value out of range is a :class:`ConfigError` that names the
key.

With ``TRACEFIT_ON_ERROR=degrade`` a wrong configuration does not end the process: in a pod a sidecar that ends takes
its vLLM out of service. Then the defaults hold, but for the directory, the address of the pages and the backend, if the
environment has them. They open nothing that was to be closed: they receive on the loopback alone, and the pages are
refused but for metrics and health.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import textwrap
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from .schema import PROFILES, Config, Rule, is_endpoint

ENV_PREFIX: Final = "TRACEFIT_"
ENV_FILE: Final = "TRACEFIT_CONFIG"
"""The path of the configuration file; not a key."""
ENV_ON_ERROR: Final = "TRACEFIT_ON_ERROR"
"""``degrade`` starts with the defaults if the configuration is wrong. Not a key: the file may be what is wrong."""
_KEPT: Final = ("TRACEFIT_DIRECTORY", "TRACEFIT_PAGES")
"""Variables that still apply when degraded: a pod may write nowhere else, and is probed there."""
_PASSED_ON: Final = ("TRACEFIT_FORWARD", "TRACEFIT_FORWARD_HEADERS_FILE", "TRACEFIT_CA_FILE")
"""Variables that also apply when degraded, if valid: traces must reach their backend, whatever fails here."""

FILE_BYTES_MAX: Final = 16 << 20
"""Largest file that is read; a device has no end."""
_SERVICE_LINK: Final = re.compile(
    r"TRACEFIT_(\w+_)?(SERVICE_HOST=[\da-fA-F.:]+|SERVICE_HOST=None|SERVICE_PORT(_\w+)?=\d+|PORT(_\d+_\w+)?=\w+://.*"
    r"|PORT_\d+_[A-Z]+_(PROTO|PORT|ADDR)=.*)"
)
"""What Kubernetes puts into every container for a Service named ``tracefit`` or ``tracefit-…``, with its value."""
_ALL_KEYS: Final = "; tracefit config explain lists all"
_STARRED: Final = "* is set: tracefit config check --changed"
_NOTHING_SET: Final = "nothing is set, the defaults hold"
_FIELDS: Final = {field.name: field for field in msgspec.structs.fields(Config)}
_UNKNOWN: Final = re.compile(r"unknown field `(.*)`$", re.DOTALL)
_NOT_ONE_OF: Final = re.compile(r"'(?P<word>[^']+)'.* is not one of (?P<known>[^;]+)$")
_AT: Final = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_KINDS: Final = {"object": "mapping", "null": "nothing", "boolean": "`true`, `false`", "string": "text"}
_BOUNDS: Final = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))


class ConfigError(Exception):
    """Bad configuration: ``key`` is the key, the environment variable or the option at fault.

    A ``problem`` that reads "'x' is not one of a, b" is completed by the nearest of those.
    """

    def __init__(self, key: str, problem: str) -> None:
        choice = _NOT_ONE_OF.search(problem)
        if choice is not None:
            problem += suggestion(choice["word"], choice["known"].split(", "))
        super().__init__(f"config error: {key}: {problem}")
        self.key = key
        self.problem = problem


def with_scheme(source: str) -> str:
    """``http://`` before a ``host:port``, perhaps with a path, that is no file; another source as it is."""
    with contextlib.suppress(OSError):  # no file has a name that long
        if Path(source).exists():
            return source
    return f"http://{source}" if is_endpoint(source.partition("/")[0]) else source


def suggestion(word: str, words: Iterable[str], likeness: float = 0.6, meant: Mapping[str, str] | None = None) -> str:
    """``; did you mean 'x'?`` for the nearest of some words, or what it is ``meant`` for; empty if none is near."""
    import difflib  # noqa: PLC0415 -- needed by who is wrong only

    names = {each.lower(): each for each in words}
    near = difflib.get_close_matches(word.lower(), names, 1, likeness)
    nearest = names[near[0]] if near else ""
    return f"; did you mean {(meant or {}).get(nearest, nearest)!r}?" if near else ""


# --- reading ----------------------------------------------------------------------------------------------------------


def load(path: Path | None, environ: Mapping[str, str], profile: str | None = None) -> Config:
    """The configuration, or a ConfigError that names the key at fault.

    ``profile`` wins over the one that the file or the environment names.
    """
    return check_keys(*read_keys(path, environ, profile))


def check_keys(tree: Mapping[str, Any], set_by: Mapping[str, str]) -> Config:
    """The configuration of what :func:`read_keys` found, or a ConfigError that names the key at fault."""
    try:
        return _convert(tree)
    except ConfigError as error:
        key = re.split(r"[.\[]", error.key)[0]
        is_of_variable = set_by.get(key) == _variable_of(key)
        raise ConfigError(_variable_of(key) if is_of_variable else error.key, error.problem) from None


def read_keys(
    path: Path | None, environ: Mapping[str, str], profile: str | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The keys that are set, unchecked, and what sets each: the file, a variable or a profile."""
    tree = read_yaml(path) if path is not None else {}
    set_by = dict.fromkeys(tree, str(path))
    for variable in sorted(environ):
        if _is_key(variable, environ[variable]):
            key = variable.removeprefix(ENV_PREFIX).lower()
            if key not in _FIELDS:
                near = suggestion(variable, map(_variable_of, _FIELDS), 0.85)  # all begin alike
                raise ConfigError(variable, f"unknown key{near or _ALL_KEYS}")
            tree[key], set_by[key] = _value_of(key, variable, environ[variable]), variable
    if profile is not None:
        tree["profile"], set_by["profile"] = profile, "--profile"
    named = tree.get("profile", "sidecar")
    defaults = PROFILES.get(named, {}) if isinstance(named, str) else {}
    return {**defaults, **tree}, {**dict.fromkeys(defaults, f"profile {named}"), **set_by}


def as_yaml(tree: Mapping[str, Any], set_by: Mapping[str, str]) -> str:
    """Keys as a file that gives them again; behind each that was set, a comment says by what."""
    lines = []
    for key, value in tree.items():
        first, *more = yaml.safe_dump({key: value}, sort_keys=False, width=math.inf).splitlines()
        lines += [f"{first}  # {set_by[key]}" if key in set_by else first, *more]
    return "\n".join(lines) or f"# {_NOTHING_SET}"


def to_tree(config: Config) -> dict[str, Any]:
    """The effective configuration as plain values."""
    tree: dict[str, Any] = msgspec.to_builtins(config, builtin_types=())
    return tree


def json_schema() -> dict[str, Any]:
    """JSON Schema of the configuration file."""
    return msgspec.json.schema(Config)


def scraping(config: Config, urls: Sequence[str]) -> Config:
    """The same with these pages to scrape too; they are options, so a wrong one is a wrong usage."""
    new = tuple(url for url in urls if url not in config.scrape)
    for url in new:
        if not is_page_url(url):
            shown = f"...@{url.rpartition('@')[2]}" if "@" in url else url  # what stands before it may be a password
            problem = f"{shown!r} is no address like http://host:8000/metrics; for several repeat the option"
            raise ConfigError("--scrape", problem)
    return msgspec.structs.replace(config, scrape=config.scrape + new)


def is_page_url(text: str) -> bool:
    """Whether a page may be there: an address like ``host:8000``, or a name with ``dns+http://`` before it."""
    try:
        _convert({"scrape": [text]})
    except ConfigError:
        return False
    return True


def refuse_special(path: Path) -> None:
    """OSError for a device, a socket or a named pipe, whose end may never come.

    A shell's ``<(…)`` has its writer, and ``/dev/null`` is a file without content.
    """
    if path.resolve().exists() and not (path.is_file() or path.is_dir() or path.samefile(os.devnull)):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_file(path: Path) -> bytes:
    """A file that somebody named; OSError if it cannot be read, or has more than ``FILE_BYTES_MAX``."""
    refuse_special(path)
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, "larger than 16 MiB", str(path))
    return data


def read_yaml(path: Path) -> dict[str, Any]:
    """What a file says, unchecked; a ConfigError if it is no YAML."""
    try:
        text = read_file(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(str(path), f"cannot be read as --config: {reason}") from None
    tree = _parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(str(path), "expected a mapping of keys: lines of KEY: VALUE")
    return tree


def _parse_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(origin, f"{error.problem}{line}") from None
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        # the last three come from a tag that lies about its value: !!bool 2, !!int '', !!map [1], !!timestamp x
        raise ConfigError(origin, f"not YAML: {type(error).__name__}") from None


def _is_key(variable: str, value: str) -> bool:
    """Whether a variable sets a key: it has our prefix and another meaning neither for us nor for Kubernetes."""
    if not variable.startswith(ENV_PREFIX) or variable in (ENV_FILE, ENV_ON_ERROR):
        return False
    return _SERVICE_LINK.fullmatch(f"{variable}={value}") is None


def _variable_of(key: str) -> str:
    return f"{ENV_PREFIX}{key.upper()}"


def _value_of(key: str, variable: str, text: str) -> Any:
    """The value of a variable: YAML; but a text is taken as it is, and a list may be words with commas between."""
    default = _FIELDS[key].default
    if isinstance(default, str):
        return text
    if isinstance(default, tuple) and not text.startswith("["):
        return [_parse_yaml(each, variable) for each in text.split(",")] if text else []
    return _parse_yaml(text, variable)


# --- checking ---------------------------------------------------------------------------------------------------------


def _convert(tree: Mapping[str, Any]) -> Config:
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    for key, value in tree.items():
        texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        if not all(text.isprintable() for text in texts if isinstance(text, str)):  # bytes of no UTF-8, NUL
            raise ConfigError(key, "expected printable text")
    for number, target in enumerate(config.scrape):
        try:
            _ = urllib.parse.urlsplit(target).port
        except ValueError as error:
            raise ConfigError(f"scrape[{number}]", str(error)) from None
    return config


def _explain(text: str) -> ConfigError:
    """The key and the problem out of msgspec's sentence (``Expected `int` >= 1 - at `$.engines_max```)."""
    problem, path, *_ = *_AT.split(text), ""
    unknown = _UNKNOWN.search(problem)
    if unknown is not None:
        known = Rule.__struct_fields__ if path else _FIELDS
        where = ".".join(filter(None, (path, unknown[1] if unknown[1].isprintable() else repr(unknown[1]))))
        return ConfigError(where or "''", "unknown key" + (suggestion(unknown[1], known) or _ALL_KEYS))
    if "`key` in `$" in text:
        return ConfigError(path or "configuration", "a key is no text")
    values = {key.name: key.values for key in every_key()}
    name = re.sub(r"\[.*?\]", "[]", path).removesuffix("[]")
    return ConfigError(path, f"expected {values[name].replace('`', '')}" if name in values else problem)


# --- a start that must not fail ---------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """The configuration to run with, and why it is another than the one given; empty where it is the one given."""

    config: Config
    problem: str = ""


def load_or_degrade(
    path: Path | None,
    environ: Mapping[str, str],
    profile: str | None = None,
    check: Callable[[Config], object] = lambda _: None,
) -> Loaded:
    """The configuration; if it is wrong, a ConfigError, or the defaults if the environment says so.

    ``check`` raises ConfigError for what only shows when it is used (a feature set nobody knows, a missing file).
    """
    said = environ.get(ENV_ON_ERROR) or "exit"
    if said not in ("exit", "degrade"):
        raise ConfigError(ENV_ON_ERROR, f"expected exit or degrade, got {said!r}")
    try:
        config = load(path, environ, profile)
        if said == "degrade":
            check(config)
    except ConfigError as error:
        if said == "exit":
            raise
        problem = f"the defaults hold: {error.key}: {error.problem}"
        for kept in ((*_KEPT, *_PASSED_ON), _KEPT):
            with contextlib.suppress(ConfigError):
                defaults = load(None, {name: environ[name] for name in kept if name in environ})
                check(defaults)
                return Loaded(defaults, problem)
        return Loaded(Config(), problem)
    return Loaded(config)


# --- describing -------------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """A key, of an entry of ``rules`` after ``rules[].``; ``default`` as JSON, with what profiles have in its place."""

    name: str
    meaning: str
    values: str
    default: str


def every_key() -> list[Key]:
    """All keys in the order of the table, those of an entry of ``rules`` at the end."""
    return [
        Key(
            prefix + field.name,
            properties[field.name]["description"],
            values_of(properties[field.name]),
            _default(field),
        )
        for kind, prefix in ((Config, ""), (Rule, "rules[]."))
        for properties in [msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]]
        for field in msgspec.structs.fields(kind)
    ]


def explain_key(
    name: str, set_by: Mapping[str, str], *, changed: bool
) -> tuple[list[str], list[dict[str, str | None]]]:
    """What a key means and takes; of no name, what every key means, with a star at those that were set, by what.

    ``changed``: of no name, those that were set alone.

    Returns:
        Lines for eyes, and a mapping for each key.

    Raises:
        ValueError: nothing has this name; the message says what to type.
    """
    keys = {key.name: Key(*(text.replace("`", "") for text in key)) for key in every_key()}
    if name and name not in keys:
        raise ValueError(f"there is no key {name!r}" + (suggestion(name, keys) or _ALL_KEYS))
    chosen = [keys[name]] if name else [key for key in keys.values() if key.name in set_by or not changed]
    document = [{**key._asdict(), "set_by": set_by.get(key.name)} for key in chosen]
    if not name:
        lines = [f"{' *'[key.name in set_by]} {key.name:<21}  {key.meaning}" for key in chosen]
        return [*lines, _STARRED] if lines else [_NOTHING_SET], document
    key = keys[name]
    lines = [key.name, textwrap.fill(key.meaning, 100), f"  takes     {key.values}", f"  default   {key.default}"]
    lines += [f"  variable  {_variable_of(name)}"] if name in _FIELDS else []
    lines += [f"  set by    {set_by[name]}"] if name in set_by else []
    return lines, document


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    shown = [json.dumps(msgspec.to_builtins(value))]
    shown += [
        f"{name}: {json.dumps(changed[field.name])}" for name, changed in PROFILES.items() if field.name in changed
    ]
    return "; ".join(shown)


def values_of(schema: Mapping[str, Any]) -> str:
    """What a value may be, out of its JSON Schema."""
    if "anyOf" in schema:
        return " or ".join(values_of(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "title" in schema:
        return str(schema["title"])
    kind = schema.get("type", "mapping")
    if kind == "array":
        entries = values_of(schema["items"]) if "$ref" not in schema["items"] else "mapping"
        bounds = f"{schema.get('minItems', 0)} to {schema['maxItems']}" if "maxItems" in schema else "any number"
        return f"list of {bounds}: {entries}"
    bounds = ", ".join(f"{sign} {schema[bound]:,}" for bound, sign in _BOUNDS if bound in schema)
    return f"{_KINDS.get(kind, kind)} {bounds}".strip()
