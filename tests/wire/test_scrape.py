"""The whole sidecar, learning from nothing but a server's page, on real sockets."""

import contextlib
import itertools

from tests.support.clocks import eventually
from tests.support.page_server import PageServer, recorded_pages
from tests.support.sidecars import get, metric, running_sidecar


@contextlib.contextmanager
def scraped_server():
    """Settings of a sidecar that asks a server for its page alone."""
    others = {"/version": b'{"version": "0.32.0"}', "/v1/models": b'{"data": [{"id": "tiny", "max_model_len": 2048}]}'}
    pages = [page for _, page in recorded_pages()]
    asked = itertools.count()

    def answer(path, _):
        """Every question for the page gets the next of the recording, however long the last answer took."""
        return (200, {}, others[path] if path in others else pages[min(next(asked), len(pages) - 1)])

    with PageServer(answer) as server:
        yield {
            "SCRAPE": server.url,
            "SCRAPE_INTERVAL_S": "0.05",
            "ALLOWED_LATENESS_S": "0",
        }


def test_a_server_with_nothing_set_is_learned_from_by_its_page_alone(tmp_path):
    with scraped_server() as settings, running_sidecar(tmp_path, **settings) as sidecar:

        def learned():
            snapshot = sidecar.snapshot()
            targets = snapshot.configs[0].targets if snapshot is not None and snapshot.configs else {}
            return "step_time" in targets and targets["step_time"].models["portable"].rows >= 40

        eventually(learned)
        (config,) = sidecar.snapshot().configs
        assert config.telemetry == "metrics"
        assert config.config["model"] == "tiny"
        intercept = config.targets["step_time"].models["portable"].features[0]
        assert 12_000 < intercept.coefficient < 22_000
        assert metric(sidecar.http_port, 'tracefit_scrape_pages_total{of="counters",outcome="read"}') > 40
        assert metric(sidecar.http_port, 'tracefit_size{of="servers"}') == 1
        eventually(lambda: sidecar.snapshot().configs[0].config.get("vllm_version") == "0.32.0")
        assert sidecar.snapshot().configs[0].config["max_model_len"] == 2048
        assert b"metrics" in get(sidecar.http_port, "/")


def test_what_pages_alone_taught_survives_a_restart(tmp_path):
    with scraped_server() as settings:
        with running_sidecar(tmp_path, **settings) as sidecar:
            eventually(lambda: len(sidecar.pipeline.joiner.emitters) == 1)
        known = sidecar.pipeline.joiner.emitters_by_config().keys()
    with running_sidecar(tmp_path, **settings) as again:
        assert metric(again.http_port, 'tracefit_state_restored{outcome="checkpoint"}') == 1
        assert again.pipeline.joiner.emitters_by_config().keys() == known
