"""OpenSSL is loaded by whoever speaks TLS, and by nobody else."""

from __future__ import annotations

import os
import subprocess
import sys

BEGIN = """
import sys
from collector.runtime import without_openssl
with without_openssl():
    import collector.app
"""


def run(code: str) -> None:
    # coverage, where it is measured, begins with the process and loads hashes of its own
    bare = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=bare)
    assert done.returncode == 0, done.stderr


def test_a_sidecar_that_speaks_tls_with_nobody_has_none_of_it():
    run(f"{BEGIN}\nassert not {{'ssl', '_ssl', '_hashlib'}} & sys.modules.keys()")


def test_whoever_speaks_tls_gets_the_real_one_though_it_was_imported_before():
    run(f"""{BEGIN}
import http.client, ssl
from collector.receive import tls
context = tls.ssl.SSLContext(tls.ssl.PROTOCOL_TLS_SERVER)
context.minimum_version = tls.ssl.TLSVersion.TLSv1_2
assert type(context) is ssl.SSLContext and "_ssl" in sys.modules
assert type(http.client.HTTPSConnection("host")._context) is ssl.SSLContext
""")


def test_an_import_that_needs_more_than_names_gets_the_real_one():
    run("""
import sys
from collector.runtime import without_openssl
with without_openssl():
    import ssl
    assert ssl.SSLContext is object
    assert ssl.OP_NO_TLSv1 and "_ssl" in sys.modules
import ssl
assert ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).check_hostname
""")


def test_hashes_are_the_same_without_it():
    run("""
from collector.runtime import without_openssl
with without_openssl():
    import hashlib
assert hashlib.sha256(b"abc").hexdigest().startswith("ba7816bf8f01cfea")
assert hashlib.blake2b(b"abc", digest_size=4).hexdigest() == "63906248"
""")
