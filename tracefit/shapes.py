"""Names of batch shapes: which factor, which interval and which evidence belong to a step.

A step is described by its prefill tokens P and its requests n. Two partitions exist, both by integers only.

**Stratum**, for intervals. o = floor(log2 n), 0 to 15 (n < 1 counts as 1):

    decode:LOW-HIGH   P = 0        prefill:LOW-HIGH   P > 0        LOW = 2^o, HIGH = 2^(o+1) - 1, one number if equal

**Cell**, finer, for shape factors. Without prefill, by n rounded to an integer (half to even):

    n <= 16            decode:n                       every batch size is a kernel of its own
    17 <= n <= 512     decode:LOW-HIGH                eights: 17-24, 25-32, …, 505-512 (the last reaches to 558, below)
    n > 512            decode:LOW-HIGH                eight per octave: LOW = ceil(512 · 2^(k/8)), k >= 1

With prefill, by the octave of n (at most 11) and the half octave of P, k = floor(2 log2 P), at most 31:

    prefill:LOW-HIGH:TLOW-THIGH                       TLOW = ceil(2^(k/2)), THIGH = ceil(2^((k+1)/2)) - 1

k = 1 holds no whole number, only means of several steps; its THIGH is below its TLOW, and it is named 1.5.

The first class of several octaves (n beyond 512) begins at 559; 505 to 558 are one cell and it is named 505-558. The
last class of each kind has no end and is named LOW+. ``decode:0`` is a step without requests.
"""

from __future__ import annotations

import math
from functools import lru_cache

EXACT_REQUESTS = 16
PADDED_REQUESTS = 512
_DECODE_CELLS = 128
_PADDED_CELL = 14 + PADDED_REQUESTS // 8
_STRATUM_OCTAVE_MAX = 15
CELL_OCTAVE_MAX = 11
HALF_OCTAVE_MAX = 31
TOKEN_CLASSES = HALF_OCTAVE_MAX + 2
"""Classes of prefill tokens: none, and the half octaves."""
DECODE_FIRST = (
    *range(1, EXACT_REQUESTS + 1),
    *range(EXACT_REQUESTS + 1, PADDED_REQUESTS, 8),
    *(math.ceil(PADDED_REQUESTS * 2 ** (k / 8)) for k in range(1, _DECODE_CELLS - _PADDED_CELL)),
)
"""The fewest requests of each cell without prefill."""


def token_class(prefill_tokens: float) -> int:
    """0 without prefill, else 1 + floor(2 log2 P), at most 32."""
    if prefill_tokens <= 0:
        return 0
    if prefill_tokens < 1:
        return 1
    whole = int(prefill_tokens)
    octave = whole.bit_length() - 1
    # floor(2 log2 P) is odd where P >= sqrt(2) 2^octave; squared, so that integers decide
    upper = prefill_tokens * prefill_tokens >= 1 << (2 * octave + 1)
    return 1 + min(2 * octave + upper, HALF_OCTAVE_MAX)


def stratum_name(prefill_tokens: float, requests: float) -> str:
    """Name of the stratum of a step, as intervals are published by."""
    return _octave_name("prefill" if prefill_tokens > 0 else "decode", _octave(requests, _STRATUM_OCTAVE_MAX))


def cell_name(prefill_tokens: float, requests: float) -> str:
    """Name of the cell of a step, as shape factors are published by.

    >>> cell_name(0, 5), cell_name(0, 20), cell_name(0, 600), cell_name(300, 20)
    ('decode:5', 'decode:17-24', 'decode:559-608', 'prefill:16-31:256-362')
    """
    return cell_of_class(token_class(prefill_tokens), requests)


def stratum_of_cell(cell: str) -> str:
    """The stratum that a cell's smallest step lies in: ``prefill:16-31`` for ``prefill:16-31:256-362``."""
    kind, _, classes = cell.partition(":")
    low = classes.partition(":")[0].partition("-")[0].rstrip("+")
    return _octave_name(kind, _octave(float(low) if low.isdigit() else 1.0, _STRATUM_OCTAVE_MAX))


def cell_of_class(tokens_class: int, requests: float) -> str:
    """The same where the class of the prefill tokens is known."""
    if tokens_class:
        return _prefill_cell(_octave(requests, CELL_OCTAVE_MAX), tokens_class - 1)
    return _decode_cell(requests)


def _octave(requests: float, highest: int) -> int:
    return min(max(int(requests).bit_length() - 1, 0), highest)


def _octave_name(kind: str, octave: int) -> str:
    low, high = 2**octave, 2 ** (octave + 1) - 1
    return f"{kind}:{low}" if low == high else f"{kind}:{low}-{high}"


@lru_cache(maxsize=512)
def _prefill_cell(octave: int, half: int) -> str:
    low, high = _ceil_power(half, 2), _ceil_power(half + 1, 2) - 1
    tokens = f"{low}+" if half == HALF_OCTAVE_MAX else f"{low}-{high}"
    if low >= high:
        tokens = f"{low}" if low == high else "1.5"
    first, last = 2**octave, 2 ** (octave + 1) - 1
    requests = f"{first}+" if octave == CELL_OCTAVE_MAX else (f"{first}" if first == last else f"{first}-{last}")
    return f"prefill:{requests}:{tokens}"


def _decode_cell(requests: float) -> str:
    if requests <= EXACT_REQUESTS:
        return f"decode:{round(requests)}"
    if requests <= PADDED_REQUESTS - 8:
        eight = math.ceil(requests / 8)
        return f"decode:{8 * eight - 7}-{8 * eight}"
    octaves = 8.0 * math.log2(max(requests, PADDED_REQUESTS) / PADDED_REQUESTS)
    step = min(int(octaves), _DECODE_CELLS - 1 - _PADDED_CELL)
    low = PADDED_REQUESTS - 7 if step == 0 else math.ceil(PADDED_REQUESTS * 2 ** (step / 8))
    if step == _DECODE_CELLS - 1 - _PADDED_CELL:
        return f"decode:{low}+"
    return f"decode:{low}-{math.ceil(PADDED_REQUESTS * 2 ** ((step + 1) / 8)) - 1}"


def _ceil_power(half_octaves: int, per_octave: int) -> int:
    """Smallest integer that is at least 2^(half_octaves / per_octave)."""
    octave, rest = divmod(half_octaves, per_octave)
    if not rest:
        return 1 << octave
    return math.isqrt((1 << half_octaves) - 1) + 1
