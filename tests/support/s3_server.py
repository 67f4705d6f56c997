"""An S3 server on loopback with the files of a directory in ``s3://bucket/otlp``, until its standard input ends.

python -m tests.support.s3_server DIRECTORY     prints its URL
"""

import os
import sys

KEYS = {"AWS_ACCESS_KEY_ID": "moto", "AWS_SECRET_ACCESS_KEY": "moto", "AWS_DEFAULT_REGION": "us-east-1"}


def main(directory):
    import s3fs
    from moto.server import ThreadedMotoServer

    os.environ |= KEYS
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    storage = s3fs.S3FileSystem(endpoint_url=url)
    storage.mkdir("bucket")
    storage.put(f"{directory}/", "bucket/otlp/", recursive=True)
    print(url, flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1])
