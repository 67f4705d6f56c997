"""KV batches for tests: made by hand, as vLLM encodes them, and read back from recordings."""

import msgspec

from collector.decode.kv import KvBatch, read_line, read_payload
from tests.support.recordings import kv_lines

TS_S = 1_795_162_319.5

_TRANSFER = ("transfer_id", "request_id", "source_medium", "dest_medium", "block_count")
_REMOTE = ("transfer_id", "request_id", "connector_type", "source_rank", "dest_rank", "block_count")
_COMMITTED = ("request_id", "medium", "block_count", "scheduler_step")
FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "TransferInitiated": (*_TRANSFER, "scheduler_step"),
    "TransferCompleted": (*_TRANSFER, "success", "scheduler_step"),
    "CacheLoadCommitted": _COMMITTED,
    "CacheStoreCommitted": _COMMITTED,
    "CacheEviction": ("medium", "blocks_evicted", "eviction_reason", "scheduler_step", "block_hashes"),
    "RemoteTransferInitiated": _REMOTE,
    "RemoteTransferCompleted": (*_REMOTE, "success"),
    "AllBlocksCleared": (),
}
"""Field names by position after the tag, as the instrumented fork's classes have them."""


def stored(blocks=2, size=32, medium="GPU", tokens=None):
    tokens = list(range(blocks * size)) if tokens is None else tokens
    return ["BlockStored", [2**63 + i for i in range(blocks)], None, tokens, size, None, medium, None]


def named(event):
    """The same event as vLLM 0.32 encodes it: a map, without what is None."""
    fields = dict(zip(FIELDS[event[0]], event[1:], strict=False))
    return {"type": event[0]} | {key: value for key, value in fields.items() if value is not None}


def payload(*events, ts_s=TS_S, rank=0):
    return msgspec.msgpack.encode([ts_s, list(events), rank, None])


def batch(*events, seq=0, ts_s=TS_S, source="kv"):
    out = read_payload(payload(*events, ts_s=ts_s), source, seq)
    assert isinstance(out, KvBatch)
    return out


def kv_batches(name):
    return [read_line(line, "kv") for line in kv_lines(name)]
