"""Stages of a start and of a stop in which the process kills itself, as ``kill -9`` would."""

from __future__ import annotations

import os
import signal

from collector.app import Sidecar
from collector.ingest.otlp_grpc import OtlpGrpcReceiver
from collector.ingest.queue import AdmissionQueue
from collector.runtime.filesystem import SystemFiles
from collector.runtime.http import HttpServer
from collector.service.journal import Journal
from collector.service.keeper import Durability
from collector.service.pipeline import Pipeline
from collector.service.publish import SnapshotWriter
from collector.service.store import Directory, StateStore

START = {
    "directory-taken": (Directory, "take"),
    "state-read": (StateStore, "load"),
    "journal-read": (Journal, "open"),
    "writer-started": (SnapshotWriter, "start"),
    "backlog-taken": (Durability, "backlog"),
    "port-open": (OtlpGrpcReceiver, "start"),
    "started": (Sidecar, "start"),
}
"""Killed right after the first call of this."""

STOP = {
    "receiver-stopped": (OtlpGrpcReceiver, "stop"),
    "queue-closed": (AdmissionQueue, "close"),
    "state-taken": (Pipeline, "whole_state"),
    "state-half-written": (SystemFiles, "write"),
    "state-flushed": (SystemFiles, "sync"),
    "state-half-renamed": (SystemFiles, "replace"),
    "state-written": (StateStore, "write"),
    "journal-trimmed": (Journal, "applied"),
    "generation-published": (Pipeline, "flushed"),
    "snapshot-written": (SnapshotWriter, "stop"),
    "directory-released": (Directory, "release"),
    "pages-closed": (HttpServer, "stop"),
}
"""Killed right after the first call of this in a stop."""


def arm(stage: str) -> None:
    """Die in this stage."""
    stopping = stage not in START
    owner, name = STOP[stage] if stopping else START[stage]
    _die_after(owner, name, armed=not stopping)
    if stopping:
        _arm_at_stop()


_armed: list[bool] = []


def _die_after(owner, name, *, armed):
    original = getattr(owner, name)
    if armed:
        _armed.append(True)

    def deadly(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if _armed:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def _arm_at_stop():
    original = Sidecar.stop

    def stop(self):
        _armed.append(True)
        return original(self)

    Sidecar.stop = stop
