"""Settings from the environment. A value that cannot be read keeps the plugin off, with a line that names it.

Where telemetry goes, and with which headers and certificate, only ``TRACEFITVLLM_*`` says. The general
``OTEL_EXPORTER_OTLP_ENDPOINT`` names the collector of a company's traces: it would get an event for every step, and
the sidecar would get the credentials that were meant for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

DEFAULT_ENDPOINT: Final = "http://127.0.0.1:4317"
TRUE: Final = frozenset({"1", "true", "yes", "on"})
FALSE: Final = frozenset({"0", "false", "no", "off"})


class SettingError(ValueError):
    """A variable of the environment that cannot be used; the text names it."""


@dataclass(frozen=True)
class Settings:
    """What the plugin sends and where to.

    Attributes:
        target: host:port of the OTLP/gRPC receiver.
        secure: TLS or plaintext.
        step_sample: share of steps sent, in whole blocks of consecutive steps.
        snapshot_sample: share of the sampled steps that also carry one snapshot per running request.
        queue_items: bound of the queue between the engine's thread and the exporter's.
    """

    enabled: bool = True
    target: str = "127.0.0.1:4317"
    secure: bool = False
    certificate: str = ""
    gzip: bool = False
    timeout_s: float = 5.0
    headers: tuple[tuple[str, str], ...] = ()
    service_name: str = "vllm"
    resource: Mapping[str, str] = field(default_factory=dict)
    step_sample: float = 1.0
    snapshot_sample: float = 0.0
    journeys: bool = True
    kv_events: bool = True
    queue_items: int = 20_000
    interval_s: float = 0.25


def _flag(name: str, text: str) -> bool:
    value = text.strip().lower()
    if value in TRUE:
        return True
    if value in FALSE:
        return False
    raise SettingError(f"{name}: expected 1 or 0, got {text!r}")


def _number(name: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise SettingError(f"{name}: expected a number, got {text!r}") from None
    if not low <= value <= high:  # also refuses nan
        raise SettingError(f"{name}: expected {low:g} to {high:g}, got {text!r}")
    return value


def _pairs(name: str, text: str) -> dict[str, str]:
    """Parse ``k=v,k=v`` with percent-encoded values (W3C baggage, as the OTel variables use it)."""
    pairs: dict[str, str] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        key, sign, value = part.partition("=")
        if not sign or not key.strip():
            raise SettingError(f"{name}: expected key=value pairs, got {part.strip()!r}")
        pairs[key.strip()] = unquote(value.strip())
    return pairs


def _target(name: str, text: str) -> tuple[str, bool]:
    """Return host:port and whether TLS is wanted, which the scheme says."""
    split = urlsplit(text if "://" in text else f"//{text}")
    try:
        host, port = split.hostname, split.port
    except ValueError:
        host, port = None, None
    if split.scheme not in ("", "http", "https", "grpc", "grpcs") or not host:
        raise SettingError(f"{name}: expected http://host:port, got {text!r}")
    bracketed = f"[{host}]" if ":" in host else host
    return f"{bracketed}:{port or 4317}", split.scheme in ("https", "grpcs")


def read_settings(env: Mapping[str, str]) -> Settings:
    """Read ``TRACEFITVLLM_*``, and the standard ``OTEL_*`` variables that say who this is and how it packs.

    Raises:
        SettingError: a value cannot be used.
    """

    def first(*names: str) -> tuple[str, str]:
        return next(((n, env[n]) for n in names if env.get(n, "").strip()), (names[0], ""))

    def read(name: str, default: float, low: float, high: float) -> float:
        return _number(name, env[name], low, high) if env.get(name, "").strip() else default

    def flag(names: tuple[str, ...], default: bool, parse: Callable[[str, str], bool] = _flag) -> bool:
        name, text = first(*names)
        return parse(name, text) if text else default

    if not flag(("TRACEFITVLLM_ENABLED",), default=True):
        return Settings(enabled=False)
    target, secure = _target("TRACEFITVLLM_ENDPOINT", first("TRACEFITVLLM_ENDPOINT")[1] or DEFAULT_ENDPOINT)
    headers = _pairs("TRACEFITVLLM_HEADERS", env.get("TRACEFITVLLM_HEADERS", ""))
    resource = _pairs("OTEL_RESOURCE_ATTRIBUTES", env.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    return Settings(
        target=target,
        secure=secure,
        certificate=first("TRACEFITVLLM_CERTIFICATE")[1],
        gzip=first("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION")[1] == "gzip",
        timeout_s=read("TRACEFITVLLM_TIMEOUT_S", 5.0, 0.1, 60.0),
        headers=tuple((k.lower(), v) for k, v in headers.items()),
        service_name=env.get("OTEL_SERVICE_NAME") or resource.pop("service.name", "") or "vllm",
        resource=resource,
        step_sample=read("TRACEFITVLLM_STEP_SAMPLE", 1.0, 0.0, 1.0),
        snapshot_sample=read("TRACEFITVLLM_SNAPSHOT_SAMPLE", 0.0, 0.0, 1.0),
        journeys=flag(("TRACEFITVLLM_JOURNEYS",), default=True),
        kv_events=flag(("TRACEFITVLLM_KV_EVENTS",), default=True),
        queue_items=int(read("TRACEFITVLLM_QUEUE_ITEMS", 20_000, 100, 1_000_000)),
    )
