"""State files taken apart and put together again, under a right checksum."""

from __future__ import annotations

import msgspec

from online.state import Image, decode, encode, sealed
from online.state.file import _DIGEST_BYTES, MAGIC


def body_of_file(data):
    """Plain data of a file of the learners' kind."""
    return msgspec.msgpack.decode(data[len(MAGIC) + _DIGEST_BYTES :], ext_hook=msgspec.msgpack.Ext)


def file_of(body):
    return sealed(msgspec.msgpack.encode(body))


def with_value(data, part, kind, name, value):
    """The file with one attribute of the first object of a kind replaced."""
    body = body_of_file(data)
    graph = body["parts"][part]
    values = next(values for each, values in graph["objects"] if each == kind)
    values[graph["kinds"][kind].index(name)] = value
    return file_of(body)


def through_bytes(saved, fresh):
    """``fresh``, filled with what was saved of another object."""
    image: Image = decode(encode({"part": saved}))
    return image.load("part", fresh)
