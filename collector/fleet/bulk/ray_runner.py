"""Tasks of a replay in bulk on Ray: shards are objects of its store, which spills them, and moves them to who learns.

A task whose worker is killed, and an object whose node is gone, is made again by Ray: both halves give the same bytes
however often they are done. Ray and its store are the caller's; ``local`` starts one on this machine for the while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from collector.runtime import StartError

from .bulk_files import StoreError
from .learn import Learned, learn_bucket
from .local_runner import TRIES, BucketTask, ShardPlace, SplitDone
from .shards import Shard
from .split import Part, split

LOCAL: Final = "local"
_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""As the command line sets it: one thread, the same bytes."""


class RayRunner:
    """Tasks on the cluster at ``address``."""

    def __init__(self, address: str) -> None:
        self._ray = _ray()
        settings: dict[str, Any] = {"log_to_driver": False, "runtime_env": {"env_vars": _ENVIRONMENT}}
        if address == LOCAL:
            settings |= {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        else:
            settings["address"] = address
        try:
            self._ray.init(**settings)
        except Exception as error:  # noqa: BLE001 -- Ray has an error of its own for each way not to be there
            raise StartError(f"no Ray at {address}: {error}") from None
        self._split = self._ray.remote(num_returns="streaming", max_retries=TRIES)(split_for_ray)
        self._learn = self._ray.remote(max_retries=TRIES)(learn_for_ray)

    def split_parts(self, parts: Sequence[Part]) -> Iterator[tuple[Part, SplitDone]]:
        """Each part when it is split, in any order."""
        running = {(shards := self._split.remote(part)).completed(): (part, shards) for part in parts}
        for done in self._each(list(running)):
            part, shards = running[done]
            *refs, last = list(shards)
            about, warnings = self._value_of(last)
            places = tuple(ShardPlace(bucket, ref, size) for (bucket, size), ref in zip(about, refs, strict=True))
            yield part, SplitDone(places, tuple(warnings))

    def learn_buckets(self, tasks: Sequence[BucketTask]) -> Iterator[tuple[BucketTask, Learned]]:
        """Each bucket when it is learned, in any order."""
        running = {self._learn.remote(task): task for task in tasks}
        for done in self._each(list(running)):
            yield running[done], self._value_of(done)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._ray.shutdown()

    def _each(self, running: list[Any]) -> Iterator[Any]:
        while running:
            done, running = self._ray.wait(running)
            yield from done

    def _value_of(self, ref: Any) -> Any:
        try:
            return self._ray.get(ref)
        except (StartError, StoreError) as error:
            raise StartError(str(getattr(error, "cause", error))) from None
        except self._ray.exceptions.RayError as error:
            raise StartError(f"Ray gave up: {getattr(error, 'cause', error)}") from None


def split_for_ray(part: Part) -> Iterator[Any]:
    """The shards of a part, as arrays that are shared and not copied, and at last what they are."""
    warnings: list[str] = []
    about: list[tuple[int, int]] = []
    for bucket, pieces in split(part, warnings.append):
        shard = b"".join(pieces)
        about.append((bucket, len(shard)))
        yield np.frombuffer(shard, np.uint8)
    yield about, warnings


def learn_for_ray(task: BucketTask) -> Learned:
    """Learn a bucket from shards in the object store."""
    ray = _ray()

    def opened(place: ShardPlace) -> Shard:
        return lambda: memoryview(ray.get(place.where))

    return learn_bucket(
        task.config, [opened(each) for each in task.shards], [opened(s) for s in task.shared], task.rows
    )


def _ray() -> Any:
    with contextlib.suppress(ImportError):
        import ray  # noqa: PLC0415

        return ray
    raise StartError("--ray needs packages that are not installed: install tracefit's extra fleet")
