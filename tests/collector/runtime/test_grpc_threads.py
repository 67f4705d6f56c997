"""Who reads gRPC's sockets: the thread that serves, where the installed version can."""

from __future__ import annotations

import os
import subprocess
import sys

import grpc
import pytest

from collector.runtime import grpc_threads
from collector.runtime.grpc_threads import NEWEST_KNOWN, OLDER_WAY, VARIABLE, installed_version, serve_where_read


def stderr_of_import(experiments):
    environ = {**os.environ, VARIABLE: experiments, "GRPC_VERBOSITY": "ERROR"}
    script = "import grpc; from concurrent import futures; grpc.server(futures.ThreadPoolExecutor(1)).start()"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, env=environ
    ).stderr


def test_the_version_is_that_of_the_installed_package():
    assert installed_version() == tuple(map(int, grpc.__version__.split(".")[:2]))


def test_the_installed_version_knows_the_name_and_would_complain_of_another():
    assert "Unknown experiment" in stderr_of_import("-no_such_thing")
    assert "Unknown experiment" not in stderr_of_import(OLDER_WAY)


def test_the_older_way_is_asked_for():
    environ = {}
    serve_where_read(environ)
    assert installed_version() <= NEWEST_KNOWN, "measure with this version, then raise NEWEST_KNOWN"
    assert environ == {VARIABLE: OLDER_WAY}


def test_whoever_chose_experiments_keeps_them():
    environ = {VARIABLE: "others"}
    serve_where_read(environ)
    assert environ == {VARIABLE: "others"}


@pytest.mark.parametrize("version", [None, (NEWEST_KNOWN[0], NEWEST_KNOWN[1] + 1)])
def test_a_version_that_may_not_know_the_name_is_told_nothing(monkeypatch, version):
    monkeypatch.setattr(grpc_threads, "installed_version", lambda: version)
    environ = {}
    serve_where_read(environ)
    assert not environ
