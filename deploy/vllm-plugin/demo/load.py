"""Open-loop load on an OpenAI-compatible server: requests leave when they are due, whatever became of earlier ones.

    python load.py --port 8000 --seconds 90 --rate 3.5

Batch size, context and prompt length vary independently, so that each coefficient can be told from the others: chats,
long prompts, many short ones, few long outputs. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

VOCABULARY: Final = 8000


class Kind(NamedTuple):
    """A class of requests: relative weight, prompt and output tokens from … to."""

    weight: float
    prompt: tuple[int, int]
    output: tuple[int, int]


KINDS: Final = (
    Kind(5.0, (20, 250), (10, 80)),
    Kind(1.0, (600, 1500), (4, 40)),
    Kind(3.0, (4, 30), (2, 12)),
    Kind(1.0, (30, 120), (150, 300)),
)


GROWING: Final = (Kind(1.0, (10, 40), (150, 250)),)
"""Short prompts, long outputs: what is admitted together outgrows a small KV cache."""


BRIEF: Final = (Kind(1.0, (4, 30), (2, 12)),)
"""For machines that are busy already."""


class Load:
    """Sends requests and counts what became of them."""

    def __init__(self, host: str, port: int, model: str, rng: random.Random, kinds: Sequence[Kind] = KINDS) -> None:
        self._kinds = kinds
        self._address = (host, port)
        self._model = model
        self._rng = rng
        self._prefix = [rng.randrange(300, VOCABULARY) for _ in range(400)]
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()

    def run(self, seconds: float, rate: float) -> None:
        """Send for so long, at this mean rate; bursts and pauses alternate around it. Returns when all are answered."""
        threads: list[threading.Thread] = []
        begin = time.monotonic()
        due = 0.0
        while due < seconds:
            time.sleep(max(0.0, begin + due - time.monotonic()))
            thread = threading.Thread(target=self._request, args=(self._body(),), daemon=True)
            thread.start()
            threads.append(thread)
            busy = 1.8 if int(due / 7.5) % 2 else 0.6
            due += self._rng.expovariate(rate * busy)
        for thread in threads:
            thread.join(120)

    def _body(self) -> bytes:
        kind = self._rng.choices(self._kinds, [k.weight for k in self._kinds])[0]
        size = self._rng.randint(*kind.prompt)
        shared = min(self._rng.choice((0, 0, 0, 64, 256)), size // 2)
        prompt = self._prefix[:shared] + [self._rng.randrange(300, VOCABULARY) for _ in range(size - shared)]
        tokens = self._rng.randint(*kind.output)
        request = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
        return json.dumps(request).encode()

    def _request(self, body: bytes) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            outcome = str(response.status)
        except (OSError, http.client.HTTPException) as error:
            outcome = type(error).__name__
        finally:
            connection.close()
        with self._lock:
            self.outcomes[outcome] += 1


def main(arguments: list[str]) -> int:
    """Run the load and print the outcomes; 1 if any request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--rate", type=float, default=3.5, help="mean requests per second")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    load = Load(args.host, args.port, args.model, random.Random(args.seed))
    load.run(args.seconds, args.rate)
    print(f"load: {dict(load.outcomes)}")
    return 0 if set(load.outcomes) == {"200"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
