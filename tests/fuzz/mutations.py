"""Damage that looks like protobuf: seeded, and mindful of where lengths, tags and attributes are."""

from __future__ import annotations

import copy

from tests.support import otlp_bytes as otlp

_BYTES = (0x00, 0x01, 0x02, 0x09, 0x0A, 0x12, 0x18, 0x1A, 0x21, 0x5A, 0x7F, 0x80, 0x81, 0xFE, 0xFF)
_INTEGERS = (-1, 0, 127, 128, (1 << 14) - 1, 1 << 14, 1 << 31, (1 << 31) + 1, 1 << 53, (1 << 53) + 1, 1 << 56, 1 << 62)
_VALUES = (True, "text", 0.0, -0.0, 1.0, 1.5, float("nan"), float("inf"), b"", b"\x18", b"\x21\x00", b"\x2a\x00")


def step_event(rng):
    """A summary with random values in range; now and then one value or the order is odd."""
    keys = list(otlp.SUMMARY_KEYS if rng.random() < 0.6 else otlp.PLUGIN_KEYS)
    values = otlp.step_values(rng.randrange(1 << rng.randrange(1, 40)), rng.randrange(4096), rng.randrange(300))
    width = 0
    oddity = rng.randrange(8)
    if oddity == 0:
        values[rng.choice(keys)] = rng.choice(_INTEGERS + _VALUES)
    elif oddity == 1:
        values[rng.choice(keys)] = rng.randrange(1 << rng.randrange(1, 64))
    elif oddity == 2:
        rng.shuffle(keys)
    elif oddity == 3:
        width = rng.randrange(2, 11)
    elif oddity == 4:
        key = "x" * rng.randrange(1, 70)
        values[key] = rng.choice(_INTEGERS + _VALUES)
        keys.insert(rng.randrange(len(keys)), key)
    unix_ns = rng.choice((otlp.EPOCH_NS, otlp.EPOCH_NS, otlp.EPOCH_NS, 0, rng.getrandbits(64)))
    return otlp.event([otlp.attribute(key, values[key], width) for key in keys], unix_ns=unix_ns)


def damage(rng, data):
    """A few edits of a byte string."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0:
                out[at : at + 1] = bytes([rng.choice(_BYTES)])
            case 1:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                del out[at : at + rng.choice((1, 1, 2, 8, 40))]
            case 3:
                out[at:at] = bytes([rng.choice(_BYTES)]) * rng.choice((1, 1, 2, 9))
            case 4:
                out[at:at] = out[rng.randrange(len(out) + 1) :][: rng.randrange(40)]
            case 5:
                del out[at:]
            case _:
                if at < len(out):
                    out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


def edited(rng, data, tokens):
    """One to four edits: as for protobuf, and now and then a token that means something to the format."""
    if rng.random() < 0.4:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice(tokens) + data[at + rng.choice((0, 0, 1, 4)) :]
        if rng.random() < 0.5:
            return data
    return damage(rng, data)


_LEAVES = (None, True, -1, 0, 1, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63), 0.5, 1e300, float("nan"), float("-inf"))
_PLACED = (*_LEAVES, "", "x" * 40, b"", b"\0" * 7, [], {}, [0], [[]], {"a": 1})


def edited_tree(rng, value):
    """Plain data with one value deep inside replaced, repeated, taken out or swapped for its neighbour; in place."""
    if not isinstance(value, dict | list) or not value:
        return _placed(rng)
    places = list(value) if isinstance(value, dict) else range(len(value))
    place = rng.choice(places)
    if isinstance(value[place], dict | list) and value[place] and rng.random() < 0.9:
        value[place] = edited_tree(rng, value[place])
        return value
    match rng.randrange(8):
        case 0:
            del value[place]
        case 1:
            value[place] = copy.deepcopy(value[rng.choice(places)])
        case 2 if isinstance(value, list):
            value.insert(place, copy.deepcopy(value[rng.choice(places)]))
        case 3 if isinstance(value[place], bytes):
            value[place] = damage(rng, value[place])
        case 4 if type(value[place]) is int:
            value[place] += rng.choice((-1, 1, 1 << 20, 1 << 53, -(1 << 53)))
        case _:
            value[place] = _placed(rng)
    return value


def _placed(rng):
    """A copy: what is placed is edited later, and no file can hold a list that is in two places, or in itself."""
    return copy.deepcopy(rng.choice(_PLACED))
