"""Certificates made on the spot by openssl: a CA of our own, server and client pairs, also expired ones.

They have the extensions of RFC 5280 that Python 3.13 asks for: what a key is for, and whose key signed it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    def __init__(self, directory: Path, openssl: str):
        self.directory = directory
        self._openssl = openssl
        self.ca = directory / "ca.crt"
        self._run("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                  "-subj", "/CN=test-ca", "-addext", "keyUsage=critical,keyCertSign",
                  "-keyout", directory / "ca.key", "-out", self.ca)  # fmt: skip

    def pair(self, name: str, *, days: int = 2, passphrase: str = "") -> tuple[Path, Path]:
        """Certificate and key for 127.0.0.1; ``days`` may be negative; the key is encrypted with a passphrase."""
        key, request, cert, extensions = (self.directory / f"{name}.{end}" for end in ("key", "csr", "crt", "ext"))
        extensions.write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
        kept = ("-passout", f"pass:{passphrase}") if passphrase else ("-nodes",)
        self._run("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *kept, "-subj", f"/CN={name}",
                  "-keyout", key, "-out", request)  # fmt: skip
        self._run("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.directory / "ca.key",
                  "-CAcreateserial", "-days", days, "-extfile", extensions, "-out", cert)  # fmt: skip
        return cert, key

    def _run(self, *arguments: object) -> None:
        subprocess.run([self._openssl, *map(str, arguments)], check=True, capture_output=True)
