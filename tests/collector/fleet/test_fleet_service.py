"""``tracefit fleet pull --every``: pages, metrics and health around the rounds."""

import urllib.error

import msgspec
import pytest

from collector.cli import main
from collector.fleet.pull import Puller
from collector.fleet.service import FleetService
from collector.runtime import StartError, running
from collector.telemetry import table
from tests.support.clocks import FakeClock, eventually
from tests.support.fleets import CONFIG, NOW_NS, state_of, state_server
from tests.support.pipelines import value_of
from tests.support.sidecars import as_json, get, metric

PAGES = msgspec.structs.replace(CONFIG, pages="127.0.0.1:0")


@pytest.fixture(scope="module")
def states():
    made = {f"e{n}": state_of(f"engine-{n}", n) for n in range(4)}
    return made | {"slow": state_of("engine-slow", 9, gain=1.3)}


def service_of(sources, out):
    puller = Puller(sources, out, PAGES)
    return FleetService(puller, PAGES, FakeClock(NOW_NS), interval_s=300.0)


def test_a_fleet_is_pulled_shown_counted_and_examined(states, tmp_path, capsys):
    with state_server(dict(states)) as server:
        sources = [f"http://127.0.0.1:{server.port}/{name}" for name in (*states, "gone")]
        service = service_of(sources, tmp_path / "fleet")
        with running(service) as stop:
            eventually(lambda: service.snapshot() is not None)
            port = service.http_port
            eventually(lambda: metric(port, "tracefit_fleet_last_write_timestamp_seconds") > 0)
            assert metric(port, 'tracefit_fleet_sources{outcome="merged"}') == 5
            assert metric(port, 'tracefit_fleet_sources{outcome="refused"}') == 1
            of, target = 'config="0f3c52aa9b1e"', 'target="step_time",vector="beta"'
            series = f'{{{of},instance="engine-slow",{target}}}'
            assert metric(port, f"tracefit_replica_speed_ratio{series}") == pytest.approx(1.3, abs=0.01)
            named = series.replace(",vector", ',term="all",vector')
            assert metric(port, f"tracefit_replica_differs{named}") == 1
            assert metric(port, f"tracefit_usable{{{of}}}") == 0
            assert b'"us": ' in get(port, "/predict?requests=5")
            assert main(["doctor", f"127.0.0.1:{port}"]) == 1
            said = "takes states\nfair  pulling    sources of states: 5 merged, 1 refused\n"
            assert said in capsys.readouterr().out
            page = get(port, "/").decode()
            assert "6 sources: 1 not in the coefficients" in page
            assert "refused: status 404" in page
            assert page.index("/gone") < page.index("/slow") < page.index("/e0"), "missing, odd, others"
            assert get(port, "/readyz")
            assert get(port, "/healthz")
            assert get(port, "/snapshot") == (tmp_path / "fleet" / "snapshot.json").read_bytes()
            assert stop()


def test_a_round_that_writes_nothing_leaves_the_last_good_one_and_readiness_says_why(states, tmp_path):
    served = dict(states)
    with state_server(served) as server:
        service = service_of([f"http://127.0.0.1:{server.port}/{name}" for name in states], tmp_path / "fleet")
        with running(service):
            eventually(lambda: value_of(service.metrics, table.FLEET_WRITTEN) > 0)
            service._task.stop(60)
            served.update(dict.fromkeys(("e0", "e1", "e2"), 500))
            service.pull_round()
            assert service.snapshot().configs
            with pytest.raises(urllib.error.HTTPError) as unready:
                get(service.http_port, "/readyz")
            assert b"3 of 5 sources gave no state: nothing written" in unready.value.read()
            assert metric(service.http_port, "tracefit_fleet_pull_failures_total") == 1
            served.update(states)
            service.pull_round()
            assert value_of(service.metrics, table.FLEET_PULL_FAILURES) == 1
            (tmp_path / "fleet" / ".pull").touch()  # no directory can be made, as on a full disk
            service.pull_round()
            assert value_of(service.metrics, table.FLEET_PULL_FAILURES) == 2
    assert as_json(tmp_path / "fleet" / "snapshot.json")["generation"] == 1, "the same states: nothing to write"


def test_a_second_fleet_on_the_same_directory_does_not_start(tmp_path):
    first, second = (service_of(["http://127.0.0.1:9"], tmp_path) for _ in range(2))
    with running(first), pytest.raises(StartError, match="another process uses OUT"), running(second):
        pass
