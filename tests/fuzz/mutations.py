"""Damage to inputs: seeded, and mindful of where lengths, tags and attributes are."""

import copy

from tests.support import otlp_bytes as otlp

_BYTES = (0x00, 0x01, 0x02, 0x09, 0x0A, 0x12, 0x18, 0x1A, 0x21, 0x5A, 0x7F, 0x80, 0x81, 0xFE, 0xFF)
_NUMBERS = (
    *(-1, 0, 127, 128, (1 << 14) - 1, 1 << 14, 1 << 31, (1 << 31) + 1, 1 << 53, (1 << 53) + 1, 1 << 62, (1 << 63) - 1),
    *(True, 0.0, -0.0, 1.0, 1.5, 1e300, float("nan"), float("-inf")),
)
_VALUES = (*_NUMBERS, "text", b"", b"\x18", b"\x21\x00", b"\x2a\x00")
_PLACED = (*_NUMBERS, None, 1 << 63, -(1 << 63), "", "x" * 40, b"", b"\0" * 7, [], {}, [0], [[]], {"a": 1})


def step_event(rng):
    """A summary with random values in range; every other one has an odd value, order, width or key."""
    keys = list(rng.choice((otlp.SUMMARY_KEYS, otlp.PLUGIN_KEYS)))
    values = otlp.step_values(rng.randrange(1 << rng.randrange(1, 40)), rng.randrange(4096), rng.randrange(300))
    odd, width = rng.choice((*_VALUES, rng.randrange(1 << rng.randrange(1, 64)))), 0
    match rng.randrange(8):
        case 0:
            values[rng.choice(keys)] = odd
        case 1:
            rng.shuffle(keys)
        case 2:
            width = rng.randrange(2, 11)
        case 3:
            keys.insert(rng.randrange(len(keys)), "x" * rng.randrange(1, 70))
    unix_ns = rng.choice((otlp.EPOCH_NS, otlp.EPOCH_NS, otlp.EPOCH_NS, 0, rng.getrandbits(64)))
    return otlp.event([otlp.attribute(key, values.get(key, odd), width) for key in keys], unix_ns=unix_ns)


def damaged(rng, data, tokens=(b"",)):
    """One to four edits: some bytes go, and one, a piece of the rest or a token of the format comes in their place."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, other = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
        byte = bytes([rng.choice((*_BYTES, rng.randrange(256), rng.randrange(256)))])
        gone, come = rng.choice(
            (
                (1, byte),
                (1, bytes([data[at] ^ 1 << rng.randrange(8)]) if at < len(data) else byte),
                (0, byte * rng.choice((1, 1, 2, 9))),
                (0, data[other : other + rng.randrange(40)]),
                (rng.choice((1, 1, 2, 8, 40, len(data))), b""),
                (rng.choice((0, 0, 1, 4)), rng.choice(tokens)),
                (rng.choice((0, 0, 1, 4)), rng.choice(tokens)),
            )
        )
        data = data[:at] + come + data[at + gone :]
    return data


def edited_tree(rng, value):
    """Plain data with one value deep inside replaced, repeated, taken out or swapped for its neighbour; in place."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.05:
        if isinstance(value, bytes) and rng.random() < 0.5:
            return damaged(rng, value)
        if type(value) is int and rng.random() < 0.3:
            return value + rng.choice((-1, 1, 1 << 20, 1 << 53, -(1 << 53)))
        # a copy: what is placed is edited later, and no file can hold a list that is in two places, or in itself
        return copy.deepcopy(rng.choice(_PLACED))
    places = list(value) if isinstance(value, dict) else range(len(value))
    place, kind = rng.choice(places), rng.randrange(30)
    if kind == 0:
        del value[place]
    elif kind == 1:
        value[place] = copy.deepcopy(value[rng.choice(places)])
    elif kind == 2 and isinstance(value, list):
        value.insert(place, copy.deepcopy(value[place]))
    else:
        value[place] = edited_tree(rng, value[place])
    return value
