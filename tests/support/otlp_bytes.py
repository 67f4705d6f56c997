"""Protobuf by hand: exports with every oddity that a schema's own serialiser would never write."""

import struct

EPOCH_NS = 1_763_600_000_000_000_000
MONOTONIC_NS = 4_000_000_000_000


def varint(value, width=0):
    """A varint; with a width of more bytes than needed it is the long form that decoders accept too."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F or len(out) + 1 < width:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number, body):
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def any_value(value, width=0):
    if isinstance(value, bytes):  # raw, whatever it is
        return value
    if isinstance(value, bool):
        return b"\x10" + varint(value)
    if isinstance(value, int):
        return b"\x18" + varint(value, width)
    if isinstance(value, float):
        return b"\x21" + struct.pack("<d", value)
    return field(1, value.encode())


def attribute(key, value, width=0, number=3):
    return field(number, field(1, key.encode()) + field(2, any_value(value, width)))


def event(attributes, name="step.BATCH_SUMMARY", unix_ns=EPOCH_NS):
    """The content of an event; ``attributes`` are encoded ones."""
    return b"\x09" + struct.pack("<Q", unix_ns) + field(2, name.encode()) + b"".join(attributes)


def step_values(step, prefill=0, decode=7, **more):
    """Values by key of a good summary."""
    start_ns = MONOTONIC_NS + step * 21_000_000
    return {
        "step.id": step,
        "step.ts_start_ns": start_ns,
        "step.ts_end_ns": start_ns + 82_000,
        "step.duration_us": 82,
        "queue.running_depth": decode + (prefill > 0),
        "queue.waiting_depth": step % 300,
        "batch.num_prefill_reqs": int(prefill > 0),
        "batch.num_decode_reqs": decode,
        "batch.scheduled_tokens": prefill + decode,
        "batch.prefill_tokens": prefill,
        "batch.decode_tokens": decode,
        "batch.num_finished": step % 3,
        "batch.num_preempted": 0,
        "kv.usage_gpu_ratio": (step % 17) / 17,
        "kv.blocks_total_gpu": 2047,
        "kv.blocks_free_gpu": 2047 - step % 1000,
        "batch.context_tokens": 456 * step,
        "batch.context_tokens_multi": 0,
        "batch.context_tokens_single": 456 * step,
        "batch.num_multi_reqs": 0,
        "batch.multi_tokens": 0,
        "batch.attn_pairs": 456 * step,
        "plugin.prev_hook_ns": 30_195,
        "plugin.hook_ns": 28_933,
        "step.ts_output_ns": start_ns + 13_000_000,
        "step.ts_done_ns": start_ns + 13_200_000,
    } | more


_KEYS = tuple(step_values(0))
SUMMARY_KEYS = _KEYS[:16]
"""Of the instrumented fork."""
PLUGIN_KEYS = (
    *(*SUMMARY_KEYS[:13], *_KEYS[16:23]),
    *("kv.blocks_total_gpu", "kv.blocks_free_gpu", "kv.usage_gpu_ratio"),
    *_KEYS[23:],
)


def summary(step, keys=SUMMARY_KEYS, **more):
    values = step_values(step, **more)
    return event([attribute(key, values[key]) for key in keys], unix_ns=EPOCH_NS + step * 21_000_000)


def snapshot(step):
    values = {
        "step.id": step,
        "request.id": "chatcmpl-1",
        "request.num_computed_tokens": 600,
        "request.num_output_tokens": 12,
        "request.scheduled_tokens_this_step": 1,
    }
    return event([attribute(key, value) for key, value in values.items()], "step.REQUEST_SNAPSHOT")


def step_span(events, span_id=b"12345678", end_ns=EPOCH_NS, tail=b""):
    """The content of a span of the step scope; ``events`` are contents."""
    return (
        field(1, b"t" * 16)
        + field(2, span_id)
        + field(5, b"scheduler_steps_1")
        + b"\x39"
        + struct.pack("<Q", end_ns - 10**9)
        + b"\x41"
        + struct.pack("<Q", end_ns)
        + b"".join(field(11, content) for content in events)
        + tail
    )


def export(*scopes):
    """An export of one resource; each scope is its name and the contents of its spans."""
    resource = field(1, attribute("service.instance.id", "engine-1", number=1))
    parts = [
        field(2, field(1, field(1, name.encode())) + b"".join(field(2, s) for s in spans)) for name, spans in scopes
    ]
    return field(1, resource + b"".join(parts))


def steps_export(events, **more):
    return export(("vllm.scheduler.step", [step_span(events, **more)]))


def in_step_span(content):
    """An export of one span of the step scope with this content."""
    scope = field(1, field(1, b"vllm.scheduler.step"))
    return field(1, field(2, scope + field(2, content)))
