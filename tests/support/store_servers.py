"""Google's or Azure's object store on loopback, with a directory's files in ``bucket/otlp``, until its input ends.

python -m tests.support.store_servers gs|az DIRECTORY     prints what to set to reach it, as JSON
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

AZURITE = Path(sys.prefix, "node_modules/.bin/azurite-blob")
"""Where ``make test-stores`` puts it."""
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The one that every Azurite has."""


@contextlib.contextmanager
def google():
    from gcp_storage_emulator.server import create_server

    with create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket") as server:
        url = f"http://127.0.0.1:{server._api._httpd.server_address[1]}"
        # its first question would be another one, to a server on the Internet
        yield {
            "STORAGE_EMULATOR_HOST": url,
            "FSSPEC_GS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }


@contextlib.contextmanager
def azure():
    options = ["--inMemoryPersistence", "--blobPort", "0", "--skipApiVersionCheck", "--disableTelemetry"]
    server = subprocess.Popen([AZURITE, *options], stdout=subprocess.PIPE, text=True)
    try:
        url = next(found[0] for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        words = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, "AccountKey": KEY}
        words["BlobEndpoint"] = f"{url}/{ACCOUNT}"
        yield {"AZURE_STORAGE_CONNECTION_STRING": ";".join(f"{name}={value}" for name, value in words.items())}
    finally:
        server.terminate()
        server.communicate(timeout=60)


def main(scheme, directory):
    import fsspec

    with {"gs": google, "az": azure}[scheme]() as settings:
        os.environ |= settings
        storage = fsspec.filesystem(scheme)
        if scheme == "az":
            storage.mkdir("bucket")
        storage.put(f"{directory}/", "bucket/otlp/", recursive=True)
        print(json.dumps(settings), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
