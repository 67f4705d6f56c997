"""Where snapshots come from, and everything that can be wrong with them: one sentence each, never a hang."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracefit
from tests.tracefit.example_snapshot import config_of, encoded, step_time_of, tree
from tracefit import loading


class Page(BaseHTTPRequestHandler):
    """Answers with what the test put into the server."""

    def do_GET(self):
        self.server.asked.append((self.path, dict(self.headers)))
        self.server.answer(self)

    def log_message(self, *_):
        """Say nothing."""

    def send(self, status=200, body=b"", **headers):
        self.send_response(status)
        headers = {"Content_Length": str(len(body)), "Content_Type": "application/json", **headers}
        for name, value in headers.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def serving(answer):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    server.daemon_threads = True
    server.asked, server.answer = [], answer
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def refused(source, **options):
    with pytest.raises(tracefit.LoadError) as raised:
        tracefit.load(source, **options)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


# -------------------------------------------------------------------- good ones


def test_bytes_a_path_and_a_url_say_the_same(tmp_path):
    (tmp_path / "snapshot.json").write_bytes(encoded())
    with serving(lambda page: page.send(body=encoded(), ETag='"a"')) as (_, url):
        sources = [tmp_path / "snapshot.json", str(tmp_path / "snapshot.json"), url, f"{url}/snapshot"]
        sources += [kind(encoded()) for kind in (bytes, bytearray, memoryview)]
        assert {tracefit.load(source).config().step_time(requests=3) for source in sources} == {
            config_of().step_time(requests=3)
        }


def test_a_url_is_asked_with_its_token():
    with serving(lambda page: page.send(body=encoded())) as (server, url):
        tracefit.load(url, token="secret")
    ((path, headers),) = server.asked
    assert (path, headers["Authorization"]) == ("/snapshot", "Bearer secret")


def test_a_later_minor_with_keys_nobody_knows_is_read():
    later = tree()
    later["schema"] = "tracefit.snapshot/1.7"
    later["new"] = later["configs"][0]["new"] = step_time_of(later)["new"] = {"a": [1]}
    step_time_of(later)["models"]["portable"]["features"][0]["new"] = None
    assert config_of(later) is not None


# -------------------------------------------------------------------- what is no snapshot


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not JSON"),
        (b"\x00\xff", "not JSON"),
        (b"<!DOCTYPE html><html>", "page for people"),
        (b"[1]", "not a snapshot of tracefit"),
        (b'{"a": 1}', "not a snapshot of tracefit"),
        (b"[" * 100_000, "not JSON"),
        (b'{"schema": "tracefit.snapshot/2", "configs": []}', "reads tracefit.snapshot/1"),
        (b'{"schema": "tracefit.snapshot/10", "configs": []}', "reads tracefit.snapshot/1"),
        (b'{"schema": 7, "configs": []}', "not a snapshot of tracefit"),
        (b'{"schema": "tracefit.snapshot/1", "configs": [[]]}', "another form"),
        (b'{"schema": "tracefit.snapshot/1", "configs": [], "generation": "x"}', "expected a whole number, got 'x'"),
        (b'{"configs": [], "generation": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
    ids=lambda each: repr(each)[:24],
)
def test_what_is_no_snapshot_is_refused_in_one_sentence(data, why):
    assert why in refused(data)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"5"', "null", "true", "[]"])
def test_a_coefficient_that_is_no_finite_number_is_refused(value):
    text = json.dumps(tree()).replace("7900.0", value, 1)
    assert "expected a finite number" in refused(text.encode())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_fact_that_is_no_finite_number_is_none(value):
    bent = tree()
    bent["configs"][0]["config"] = {"model": "m", "dtype": value}
    assert config_of(bent).facts == {"model": "m"}


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    st.data(),
)
def test_whatever_stands_anywhere_it_is_read_or_refused(junk, data):
    bent = tree()
    node, path = bent, []
    while isinstance(node, (dict, list)) and node and (not path or data.draw(st.integers(0, 5))):
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        path.append((node, key))
        node = node[key]
    path[-1][0][path[-1][1]] = junk
    try:
        snapshot = tracefit.load(json.dumps(bent).encode())
    except tracefit.LoadError as error:
        refusal = str(error)
        assert refusal.isprintable()
        return
    for config in snapshot.configs:
        with contextlib.suppress(tracefit.NoCoefficientsError):
            config.step_time(requests=5, prefill_tokens=70)
            with contextlib.suppress(tracefit.BadInputError):
                config.plan(prompt_tokens=100, output_tokens=10, itl_ms=30)


def test_a_place_that_is_none(tmp_path):
    assert "refused" in refused("http://127.0.0.1:9")
    assert "cannot read" in refused(tmp_path / "nothing.json")
    assert "cannot read" in refused(tmp_path)
    assert "cannot read" in refused("a\0b")
    assert "empty" in refused("")


def test_a_file_larger_than_any_snapshot(tmp_path):
    with (tmp_path / "big").open("wb") as file:
        file.truncate(loading.BYTES_MAX + 1)
    assert "larger than 64 MiB" in refused(tmp_path / "big")


# -------------------------------------------------------------------- what servers do


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda page: page.send(body=b"<html>", Content_Type="text/html; charset=utf-8"), "page for people"),
        (lambda page: page.send(401), "wants a token"),
        (lambda page: page.send(404), "has no snapshot"),
        (lambda page: page.send(503), "learned nothing yet"),
        (lambda page: page.send(500), "status 500"),
        (lambda page: page.send(302), "status 302"),
        (lambda page: page.send(body=b"[", Content_Length="1000"), "not JSON"),
        (lambda page: page.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"A: " + b"a" * 70_000), "cannot be asked"),
        (lambda page: page.wfile.write(b"nonsense\r\n\r\n"), "cannot be asked"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_a_server_does_wrong_is_said_with_its_url(answer, why):
    with serving(answer) as (_, url):
        message = refused(url, timeout_s=60)
    assert why in message
    assert "http://" in message or "file://" in message


def test_a_server_that_never_stops_sending_is_cut_off(monkeypatch):
    monkeypatch.setattr(loading, "BYTES_MAX", 2**20)

    def endless(page):
        page.send(body=b"[", Content_Length=None)
        with contextlib.suppress(OSError):
            while True:
                page.wfile.write(b" " * 65536)

    with serving(endless) as (_, url):
        assert "larger than 1 MiB" in refused(url)


def silent(_page, left):
    left.wait()


def dripping_body(page, left):
    page.send(body=b"[", Content_Length=None)
    with contextlib.suppress(OSError):
        while not left.wait(0.05):
            page.wfile.write(b" ")


def dripping_headers(page, left):
    with contextlib.suppress(OSError):
        while not left.wait(0.05):
            page.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize("answer", [silent, dripping_body, dripping_headers])
def test_a_server_that_hangs_or_drips_is_left_although_it_never_ends(answer):
    left = threading.Event()
    with serving(lambda page: answer(page, left)) as (_, url):
        try:
            assert "did not answer within" in refused(url, timeout_s=0.4)
        finally:
            left.set()


def test_a_token_does_not_follow_to_another_host():
    with (
        serving(lambda page: page.send(body=encoded())) as (other, other_url),
        serving(lambda page: page.send(302, Location=f"{other_url}/snapshot")) as (_, url),
    ):
        assert "status 302" in refused(url, token="secret")
        assert other.asked == []


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://[",
        "http://h:port/",
        "http://h/a b",
        "http://h/ä",
        "file:///etc/passwd",
        "s3://b/s",
    ],
)
def test_what_is_no_url_that_is_asked_is_refused_and_no_path_either(url):
    assert "URL" in refused(url)


def test_a_token_that_no_header_can_hold_is_refused():
    assert "header" in refused("http://127.0.0.1:1", token="a\r\nb: c")


# -------------------------------------------------------------------- which configuration


def fleet():
    both = tree()
    other = json.loads(json.dumps(both["configs"][0]))
    other["config_id"] = "beef00000000"
    other["config"].update(model="meta-llama/Llama-3-8B-Instruct", gpu="NVIDIA A100")
    both["configs"].append(other)
    return tracefit.load(encoded(both))


@pytest.mark.parametrize(
    ("asked", "config_id"),
    [
        ({"gpu": "h100"}, "0f3c5a9b77e1"),
        ({"model": "instruct"}, "beef00000000"),
        ({"model": "meta-llama/Llama-3-8B"}, "0f3c5a9b77e1"),
        ({"config_id": "beef"}, "beef00000000"),
        ({"config_id": "LLAMA a100"}, "beef00000000"),
        ({"config_id": "meta-llama/Llama-3-8B · NVIDIA H100 80GB HBM3 · TP 1"}, "0f3c5a9b77e1"),
        ({"config_id": "h100 tp1"}, "0f3c5a9b77e1"),
        ({"config_id": "0f3c", "gpu": "h100"}, "0f3c5a9b77e1"),
    ],
)
def test_a_configuration_is_found_by_a_part_of_its_names(asked, config_id):
    assert fleet().config(**asked).config_id == config_id


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, "several"),
        ({"model": "qwen"}, "no configuration fits"),
        ({"config_id": "llama-3"}, "several configurations fit 'llama-3'"),
        *(({"config_id": which}, "no configuration fits") for which in ("·", " ", "h100 tp 20", "tp", "llama qwen")),
        ({"config_id": "0f3c", "gpu": "a100"}, "no configuration fits"),
    ],
)
def test_none_or_several_are_listed(asked, why):
    with pytest.raises(tracefit.NotFoundError, match=rf"{why}.*0f3c5a9b77e1 .*beef00000000"):
        fleet().config(**asked)


def test_one_whose_model_nobody_knows_is_not_meant_more_than_others():
    both = json.loads(fleet().data)
    del both["configs"][1]["config"]["model"]
    with pytest.raises(tracefit.NotFoundError, match="several"):
        tracefit.load(encoded(both)).config()
