"""A process that runs a sidecar has the standard library that every other process has."""

from __future__ import annotations

import os
import subprocess
import sys

RUN = """
import os, signal, socket, sys, threading, time
from collector.cli import main

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ["TRACEFIT_PAGES"] = f"127.0.0.1:{port}"
problems = ["nobody looked"]

def served():
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0

async def speak_tls(asyncio, ssl):
    try:
        await asyncio.open_connection("127.0.0.1", port, ssl=ssl.create_default_context())
    except ssl.SSLError:  # the pages answer, but not with a record of TLS
        return

def look():
    while not served():
        time.sleep(0.02)
    import asyncio, hashlib, ssl
    try:
        asyncio.run(speak_tls(asyncio, ssl))
        hashlib.scrypt(b"word", salt=b"salt", n=2, r=1, p=1)
        hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 1)
        hashlib.new("sha512_256")
        problems.clear()
    except Exception as error:
        problems[:] = [repr(error)]
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=look).start()
code = main(["run"])
sys.exit(problems[0] if problems else code)
"""


def test_tls_of_asyncio_and_every_hash_work_in_a_process_that_runs_a_sidecar(tmp_path):
    # coverage, where it is measured, begins with the process and loads hashes of its own
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")} | {
        "TRACEFIT_LISTEN": "127.0.0.1:0",
        "TRACEFIT_LISTEN_HTTP": "127.0.0.1:0",
        "TRACEFIT_DIRECTORY": str(tmp_path),
    }
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
