"""State files taken apart and put together again, under a right checksum."""

import hashlib
import zlib

import msgspec

from online.state import decode, encode


def file_of(body):
    """A file as docs and code say it is made, of any body."""
    packed = zlib.compress(msgspec.msgpack.encode(body))
    return b"tracefit.state/1\n" + hashlib.blake2b(packed).digest() + packed


def with_value(data, part, name, value):
    """The file with one value replaced in the first part of this name."""
    tree = decode(data)
    _first(tree, part)[name] = value
    return encode(tree)


def _first(tree, part):
    for key, value in tree.items():
        own = value[-1] if isinstance(value, list) and value else value  # of replicas, or of a model and its columns
        if key == part:
            return own
        if isinstance(own, dict) and (found := _first(own, part)) is not None:
            return found
    return None


def through_bytes(saved, fresh):
    """``fresh``, filled with what was saved of another object."""
    fresh.from_state(decode(encode({"part": saved.to_state()}))["part"])
    return fresh
