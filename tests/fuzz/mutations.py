"""Damage to inputs: seeded, and mindful of where lengths, tags and attributes are."""

from tests.support import otlp_bytes as otlp

_BYTES = (0x00, 0x01, 0x02, 0x09, 0x0A, 0x12, 0x18, 0x1A, 0x21, 0x5A, 0x7F, 0x80, 0x81, 0xFE, 0xFF)
_NUMBERS = (
    *(-1, 0, 127, 128, (1 << 14) - 1, 1 << 14, 1 << 31, (1 << 31) + 1, 1 << 53, (1 << 53) + 1, 1 << 62, (1 << 63) - 1),
    *(True, 0.0, -0.0, 1.0, 1.5, 1e300, float("nan"), float("-inf")),
)
_VALUES = (*_NUMBERS, "text", b"", b"\x18", b"\x21\x00", b"\x2a\x00")


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
