"""Stop, start, kill: what a sidecar keeps, as its pages tell it."""

import errno
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import grpc
import pytest

from collector.cli import main
from collector.runtime.filesystem import StartError, SystemFiles
from collector.service.checkpoint import NAME as STATE
from collector.service.durability import WRITER
from collector.telemetry.reasons import Outcome
from collector.telemetry.table import SPANS
from exporters.snapshot_file import SNAPSHOT_NAME, write_atomically
from online.state import LEARNERS, encode
from tests.support.clocks import eventually
from tests.support.pipelines import value_of
from tests.support.sidecars import SmallVolume, call_export, code_of, metric, ready, running_sidecar
from tests.support.step_exports import make_export

LOG = {"DURABILITY": "log", "CHECKPOINT_INTERVAL_S": "0.2"}


@cache
def export(first_step, spans):
    return make_export(spans, first_step=first_step).SerializeToString()


def send(sidecar, first_step, spans=10):
    call_export(sidecar.grpc_port, export(first_step, spans))


def kept(directory, *names):
    """The files whose names begin so, as a kill would leave them now."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name.startswith(names or "")}


def laid_back(directory, files):
    for path in directory.iterdir():
        path.unlink()
    for name, data in files.items():
        (directory / name).write_bytes(data)


def rows(directory):
    document = json.loads((directory / "snapshot.json").read_bytes())
    return document["generation"], document["configs"][0]["targets"]["step_time"]["models"]["portable"]["rows"]


@pytest.mark.parametrize(
    "published",
    [b'{"schema": "tracefit.snapshot/2", "generation": 41, "configs": {}}', b'{"schema": "tracef'],
)
def test_generations_begin_anew_aloud_beside_a_file_that_this_version_does_not_read(tmp_path, published, caplog):
    (tmp_path / "snapshot.json").write_bytes(published)
    with running_sidecar(tmp_path) as sidecar:
        send(sidecar, 1)
    assert 1 <= rows(tmp_path)[0] < 11
    (warning,) = (each.rpartition("/")[2] for each in caplog.messages if "generations" in each)
    assert warning == "snapshot.json cannot be read: generations begin at 1 again"


OWNERS = 0o600
"""What telemetry says is nobody else's business."""


def mode_of(path):
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("durability", ["memory", "log"])
def test_a_stop_and_a_start_go_on_where_they_were(tmp_path, durability):
    (tmp_path / "log.00000000000fffff").mkdir()  # with the name of a segment: it is left alone
    with running_sidecar(tmp_path, DURABILITY=durability) as sidecar:
        assert ready(sidecar)["state_at_start"] == "empty"
        send(sidecar, 1)
        if durability == "log":
            assert mode_of(next(path for path in tmp_path.glob("log.*") if path.is_file())) == OWNERS
    generation, before = rows(tmp_path)
    assert before == 99, "what still waited is learned at the stop"
    assert mode_of(tmp_path / STATE) == OWNERS
    with running_sidecar(tmp_path, DURABILITY=durability) as sidecar:
        assert (ready(sidecar)["state_at_start"], ready(sidecar).get("lost")) == ("checkpoint", None)
        assert metric(sidecar.http_port, 'tracefit_state_restored{outcome="checkpoint"}') == 1
        send(sidecar, 1)
        send(sidecar, 101)
    later, after = rows(tmp_path)
    assert after == 199, "the step between the two lives is learned, the repeat is not"
    assert later > generation


@pytest.mark.parametrize(
    ("unusable", "problem"),
    [(b"no state", "does not begin with"), (encode({LEARNERS: {}}), "no progress in this state file")],
)
def test_a_start_from_nothing_usable_is_cold_and_loud(tmp_path, caplog, unusable, problem):
    (tmp_path / STATE).write_bytes(unusable)
    with running_sidecar(tmp_path) as sidecar:
        told = ready(sidecar)
        assert told["state_at_start"] == "cold"
        assert problem in told["state_problem"]
        assert metric(sidecar.http_port, 'tracefit_state_restored{outcome="cold"}') == 1
    assert "cold start" in caplog.text
    assert (tmp_path / f"{STATE}.corrupt").read_bytes() == unusable


def test_when_an_export_came_in_is_kept_with_it_in_the_log(tmp_path):
    """An hour ahead is an hour ahead also after a kill."""
    ahead = make_export(begin_ns=time.time_ns() + 3_600 * 10**9).SerializeToString()
    with running_sidecar(tmp_path, **LOG) as sidecar:
        sidecar.pipeline.process = lambda _: None  # as if it had been killed first
        call_export(sidecar.grpc_port, ahead)
    with running_sidecar(tmp_path, **LOG) as sidecar:
        eventually(lambda: metric(sidecar.http_port, 'tracefit_decode_spans_total{outcome="out_of_range"}') == 1)


def test_entries_that_no_checkpoint_has_learned_are_read_again_before_anything_new(tmp_path):
    with running_sidecar(tmp_path, **LOG) as sidecar:
        send(sidecar, 1)
        eventually((tmp_path / STATE).exists)
        state = kept(tmp_path, "state")
        send(sidecar, 101)
        send(sidecar, 201)
        log = kept(tmp_path, "log")
    laid_back(tmp_path, state | log)  # as a kill after the first checkpoint would have left it
    with running_sidecar(tmp_path, **LOG) as sidecar:
        eventually(lambda: metric(sidecar.http_port, "tracefit_log_replayed_spans_total") >= 20)
        send(sidecar, 301)
    assert rows(tmp_path)[1] == 399


@pytest.mark.parametrize(
    ("call", "refused"),
    [("write_atomically", "the log is full"), ("write", "the log cannot be written, {}: No space left on device")],
)
def test_a_log_without_room_refuses_for_a_while_and_says_why(tmp_path, caplog, call, refused):
    """Full, while a checkpoint that would empty it waits for the disk; or no write succeeds."""
    caplog.set_level("INFO")
    config = {"DURABILITY": "log", "LOG_CAPACITY_MIB": "1", "CHECKPOINT_INTERVAL_S": "3600"}
    with running_sidecar(tmp_path, files := BadDisk(call), **config) as sidecar:
        with pytest.raises(grpc.RpcError) as caught:  # noqa: PT012
            for number in range(100):
                send(sidecar, 1 + number * 500, 50)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details().startswith("log full")
        assert ready(sidecar)["refused"] == refused.format(tmp_path)
        spans = f'tracefit_receiver_spans_total{{outcome="{Outcome.LOG}",transport="grpc"}}'
        assert metric(sidecar.http_port, spans) == 50
        size = metric(sidecar.http_port, 'tracefit_size_bytes{of="log"}')
        assert size <= metric(sidecar.http_port, 'tracefit_capacity_bytes{of="log"}')
        files.is_well.set()
        eventually(lambda: metric(sidecar.http_port, 'tracefit_size_bytes{of="log"}') < max(size, 1))
        send(sidecar, 100_001)
        assert "refused" not in ready(sidecar)
        assert "exports are accepted again" in caplog.text


def test_what_stands_in_the_place_of_the_next_segment_is_named_until_it_is_gone(tmp_path, capsys):
    (in_its_way := tmp_path / "log.0000000000000001").mkdir()
    with running_sidecar(tmp_path, DURABILITY="log") as sidecar:
        assert not accepted(sidecar, 1)
        assert main(["doctor", f"127.0.0.1:{sidecar.http_port}"]) == 1
        refused = f"refuses telemetry; refused: the log cannot be written, {in_its_way}: Is a directory"
        assert refused in capsys.readouterr().out
        in_its_way.rmdir()
        assert accepted(sidecar, 1)


def test_who_waits_for_the_log_is_told_of_the_stop_at_once(tmp_path):
    class Full(SystemFiles):
        def write(self, *_):
            asked.set()
            raise OSError(errno.ENOSPC, "No space left on device")

    asked = threading.Event()
    with running_sidecar(tmp_path, Full(), DURABILITY="log") as sidecar, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(code_of, sidecar.grpc_port, export(1, 10))
        asked.wait(100)
        sidecar.halt()
        assert waiting.result(100) is grpc.StatusCode.UNAVAILABLE
        assert value_of(sidecar.metrics, SPANS, "grpc", Outcome.SHUTTING_DOWN) == 10


class BadDisk(SystemFiles):
    """Until it is well no checkpoint is written, or no entry of the log."""

    def __init__(self, call):
        self._call, self.is_well = call, threading.Event()

    def write_atomically(self, *written):
        if self._call == "write_atomically":
            self.is_well.wait(60)
        write_atomically(*written)

    def write(self, descriptor, data):
        if self._call == "write" and not self.is_well.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(descriptor, data)


SMALL_BYTES, EXPORT_STEPS, EXPORT_BYTES = 4 << 20, 200, 124_000
SMALL = {"DURABILITY": "log", "LOG_CAPACITY_MIB": "32"}


def accepted(sidecar, first_step):
    """Whether an export was taken; if not, the log is full."""
    code = code_of(sidecar.grpc_port, export(first_step, EXPORT_STEPS // 10))
    assert code in {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    return code is grpc.StatusCode.OK


def test_a_log_leaves_room_for_two_checkpoints_on_a_small_volume_and_says_so_at_the_start(tmp_path, caplog):
    settings = {"CHECKPOINT_INTERVAL_S": "0.1", **SMALL}
    with running_sidecar(tmp_path, SmallVolume(tmp_path, SMALL_BYTES), **settings) as sidecar:
        assert metric(sidecar.http_port, 'tracefit_capacity_bytes{of="log"}') <= SMALL_BYTES // 3
        said = "the log has 1.33 MiB instead of 32 (log_capacity_mib)"
        assert ready(sidecar)["log_problem"].startswith(said)
        for number in range(1 + SMALL_BYTES // EXPORT_BYTES):
            eventually(lambda first_step=1 + EXPORT_STEPS * number: accepted(sidecar, first_step))
        assert "unsaved" not in ready(sidecar)
    assert [r.levelname for r in caplog.records if said in r.message] == ["WARNING"]


def test_a_log_that_is_full_of_an_engines_last_steps_frees_itself_while_the_next_export_waits(tmp_path):
    """What waits is learned, and its last step, which the next row would begin with, does not keep the log full."""
    exports = 1 + (1 << 20) // EXPORT_BYTES
    with running_sidecar(tmp_path, SmallVolume(tmp_path, 1 << 20), **SMALL) as sidecar:
        assert all(accepted(sidecar, 1 + EXPORT_STEPS * number) for number in range(exports))
    with running_sidecar(tmp_path, SmallVolume(tmp_path, 1 << 20), **SMALL) as sidecar:
        assert "lost" not in ready(sidecar)
        assert accepted(sidecar, 1 + EXPORT_STEPS * exports)


@pytest.mark.parametrize("durability", ["memory", "log"])
def test_the_second_sidecar_on_a_directory_is_told_who_has_it_and_changes_nothing(tmp_path, durability):
    with running_sidecar(tmp_path, DURABILITY=durability, CHECKPOINT_INTERVAL_S="0.2") as sidecar:
        send(sidecar, 1)
        before = kept(tmp_path, "log", "snapshot")
        with (
            pytest.raises(StartError, match=rf"another process uses directory .*: process {os.getpid()} on .*; give"),
            running_sidecar(tmp_path, DURABILITY=durability),
        ):
            pass
        assert before.items() <= kept(tmp_path).items()


def test_a_log_that_cannot_be_used_ends_the_start_with_its_file_named(tmp_path):
    (tmp_path / "log.head").mkdir()
    with pytest.raises(StartError, match=r"/log\.head: Is a directory"), running_sidecar(tmp_path, DURABILITY="log"):
        pass


def test_a_restart_after_a_kill_without_a_log_says_how_much_is_lost_and_how_old_the_state_is(tmp_path, caplog):
    with running_sidecar(tmp_path, CHECKPOINT_INTERVAL_S="3600") as sidecar:
        send(sidecar, 1)
    with running_sidecar(tmp_path, CHECKPOINT_INTERVAL_S="3600") as sidecar:
        send(sidecar, 101)
        eventually(lambda: sidecar.queue.in_flight_bytes == 0)
        files = kept(tmp_path)
    laid_back(tmp_path, files)
    an_hour_ago_s = time.time() - 3600
    os.utime(tmp_path / STATE, (an_hour_ago_s, an_hour_ago_s))
    caplog.clear()
    with running_sidecar(tmp_path) as sidecar:
        told = ready(sidecar)
        assert told["lost"].startswith(f"what process {os.getpid()} on ")
        assert metric(sidecar.http_port, "tracefit_state_last_write_timestamp_seconds") == pytest.approx(an_hour_ago_s)
    (line,) = [record for record in caplog.records if "continuing from" in record.message]
    assert line.levelname == "WARNING"
    assert line.message.startswith("continuing from state.bin, 360")
    assert re.search(r"learned in the 36\d\d s since its checkpoint at most, and what waited in the join", line.message)
    caplog.clear()
    with running_sidecar(tmp_path) as sidecar:
        assert "lost" not in ready(sidecar), "the one before stopped in order"
    assert "Lost" not in caplog.text


def test_a_writer_that_hangs_makes_the_process_not_alive_and_nothing_is_piled_up_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr("collector.service.durability.CHECK_IN_TIMEOUT_S", 1.0)
    monkeypatch.setattr("collector.service.durability.PAUSE_S", 0.1)
    with running_sidecar(tmp_path, files := BadDisk("write_atomically"), CHECKPOINT_INTERVAL_S="0.1") as sidecar:
        send(sidecar, 1)
        eventually(lambda: sidecar.health.late() == (WRITER,))
        send(sidecar, 101)
        eventually(lambda: sidecar._keeper._dirty)
        time.sleep(0.5)
        waiting = len(sidecar._keeper._pending)
        files.is_well.set()
        eventually(lambda: not sidecar.health.late())
    assert waiting == 1


def test_readiness_names_the_snapshot_file_that_cannot_be_written_as_long_as_it_cannot(tmp_path):
    with running_sidecar(tmp_path, ALLOWED_LATENESS_S="0.2", IDLE_TIMEOUT_S="1") as sidecar:
        (tmp_path / SNAPSHOT_NAME).mkdir()  # in its way
        send(sidecar, 1)
        eventually(lambda: f"{SNAPSHOT_NAME}: Is a directory" in ready(sidecar).get("snapshot_problem", ""))
        (tmp_path / SNAPSHOT_NAME).rmdir()
        eventually(lambda: "snapshot_problem" not in ready(sidecar))


def test_a_state_that_cannot_be_encoded_is_said_and_tried_again_and_ends_no_receiving(tmp_path, monkeypatch):
    monkeypatch.setattr("collector.service.durability.encode", lambda _: 1 / 0)
    with running_sidecar(tmp_path, CHECKPOINT_INTERVAL_S="0.1") as sidecar:
        send(sidecar, 1)
        eventually(lambda: ready(sidecar).get("unsaved") == "state not written: division by zero")
        monkeypatch.undo()
        eventually(lambda: "unsaved" not in ready(sidecar))
        send(sidecar, 101)
    assert rows(tmp_path)[1] == 199


@pytest.mark.parametrize(
    ("durability", "outcome"),
    [("memory", "lost"), ("log", "in the log")],
)
def test_a_state_that_cannot_be_written_is_said_by_readiness_and_at_the_stop(tmp_path, caplog, durability, outcome):
    with running_sidecar(tmp_path, DURABILITY=durability, CHECKPOINT_INTERVAL_S="0.1") as sidecar:
        (in_its_way := tmp_path / f".{STATE}.tmp.{os.getpid()}").mkdir()
        send(sidecar, 1)
        eventually(lambda: "unsaved" in ready(sidecar))
        told = ready(sidecar)
        assert told["unsaved"] == "state not written: Is a directory"
        assert told["ok"]
    (line,) = [record for record in caplog.records if record.message.startswith("stopped without a last checkpoint")]
    assert line.message.endswith(f"Is a directory); what came since the one before: {outcome}")
    in_its_way.rmdir()
    with running_sidecar(tmp_path, CHECKPOINT_INTERVAL_S="0.1") as sidecar:
        send(sidecar, 101)
        eventually((tmp_path / STATE).exists)
        assert "unsaved" not in ready(sidecar)
