"""Configuration: what holds, and the sentence for what does not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from collector.config import Config, Endpoint, parse_endpoint
from collector.config.load import ConfigError, json_schema, load, profile_names, to_yaml
from collector.service.build import make_pipeline


def from_text(tmp_path: Path, text: str, **environ: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load(path, {f"TRACEFIT_{name}": value for name, value in environ.items()})


def test_nothing_configured_is_the_defaults():
    assert load(None, {"HOME": "/", "TRACEFIT_CONFIG": "x"}) == Config()


def test_an_empty_file_is_the_defaults(tmp_path):
    assert from_text(tmp_path, "# nothing\n") == Config()


def test_the_environment_is_stronger_than_the_file(tmp_path):
    config = from_text(tmp_path, "join: {window_s: 60, grace_s: 5}", JOIN__WINDOW_S="70.5", LEARNERS="[rls]")
    assert (config.join.window_s, config.join.grace_s, config.learners) == (70.5, 5, ("rls",))
    config = from_text(tmp_path, "", RECEIVERS__GRPC__ENDPOINT="[::]:4317", RECEIVERS__HTTP__ENDPOINT='"[::1]:4318"')
    assert (config.receivers.grpc.endpoint, config.receivers.http.endpoint) == ("[::]:4317", "[::1]:4318")


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        ("foo: 1", "foo", "unknown key"),
        ("queue: {foo: 1}", "queue.foo", "unknown key"),
        ("receivers: {grpc: {endpoint: nowhere}}", "receivers.grpc.endpoint", "expected host:port"),
        ("receivers: {grpc: {endpoint: 'a:65536'}}", "receivers.grpc.endpoint", "expected host:port"),
        ("receivers: {grpc: {endpoint: '::1:4317'}}", "receivers.grpc.endpoint", "expected host:port"),
        ("receivers: {grpc: {max_recv_msg_size_mib: 1.5}}", "receivers.grpc.max_recv_msg_size_mib", "expected int"),
        ("shutdown: {drain_s: .nan}", "shutdown.drain_s", "expected float"),
        ("join: {window_s: .inf}", "join.window_s", "expected float"),
        ("state: {interval_s: 0}", "state.interval_s", "expected float >= 0.1"),
        ("queue: 3", "queue", "expected object"),
        ("queue:", "queue", "expected object"),
        ("learners: []", "learners", "length >= 1"),
        ("1: 2", "(top level)", "keys are words"),
    ],
)
def test_a_bad_value_is_named_by_its_path(tmp_path, text, key, problem):
    with pytest.raises(ConfigError) as caught:
        from_text(tmp_path, text)
    assert caught.value.key == key
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\na: 2", "key 'a' given twice in line 2"),
        ("join: {grace_s: 1, grace_s: 2}", "given twice"),
        ("a: [", "in line"),
        ("- 1", "expected a mapping"),
        ("? {a: 1}\n: 2", "a key is not a word"),
        ("a: \x00", "not YAML"),
        ("a: !!python/object/apply:os.getpid []", "could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_configuration_is_named_by_its_path(tmp_path, text, problem):
    with pytest.raises(ConfigError) as caught:
        from_text(tmp_path, text)
    assert caught.value.key == str(tmp_path / "config.yaml")
    assert problem in caught.value.problem


def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "absent.yaml", {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "binary", {})


@pytest.mark.parametrize("variable", ["FOO", "JOIN__FOO", "JOIN__GRACE_S", "JOIN__GRACE_S__X"])
def test_a_bad_variable_is_named_itself(tmp_path, variable):
    with pytest.raises(ConfigError) as caught:
        from_text(tmp_path, "join: {grace_s: 1}", **{variable: "-1"})
    assert caught.value.key == f"TRACEFIT_{variable}"


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [("127.0.0.1:4317", Endpoint("127.0.0.1", 4317)), ("[::1]:0", Endpoint("::1", 0))],
)
def test_an_endpoint_is_an_address_and_a_port_and_prints_as_it_was_written(text, endpoint):
    assert parse_endpoint(text) == endpoint
    assert str(endpoint) == text


def test_the_effective_configuration_is_a_configuration(tmp_path):
    config = from_text(tmp_path, "join: {window_s: 60}\nfeature_sets: [portable]")
    assert from_text(tmp_path, to_yaml(config)) == config


def test_the_schema_knows_every_section_and_forbids_other_keys():
    schema = json_schema()["$defs"]
    for field in msgspec.structs.fields(Config):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            assert schema[field.type.__name__]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("learners: [magic]", "learners"),
        ("feature_sets: [magic]", "feature_sets"),
        ("custom: {step_time: [magic]}", "custom"),
        ("custom: {nothing: [running]}", "custom"),
    ],
)
def test_a_learner_or_feature_that_nobody_knows_is_a_configuration_error(tmp_path, text, key):
    with pytest.raises(ConfigError) as caught:
        make_pipeline(from_text(tmp_path, text))
    assert caught.value.key == key


def test_a_profile_holds_below_the_file_and_the_environment(tmp_path):
    (tmp_path / "config.yaml").write_text("bank: {block_rows: 100}\nlearners: [rls, 'river:residual']")
    config = load(tmp_path / "config.yaml", {"TRACEFIT_JOIN__BLOCK_STEPS": "1024"}, "bulk")
    assert (config.bank.block_rows, config.learners) == (100, ("rls", "river:residual")), "as the file says"
    assert config.join.block_steps == 1024, "as the environment says"
    assert config.bank.block_s == 60.0, "as the profile says"
    assert config.join.window_s == Config().join.window_s, "as nobody says"


@pytest.mark.parametrize("profile", profile_names())
def test_every_profile_that_comes_along_is_a_configuration_that_learns(profile):
    assert make_pipeline(load(None, {}, profile)).learned_rows == 0


SERVICE_LINKS = {
    "TRACEFIT_SERVICE_HOST": "10.0.0.1",
    "TRACEFIT_SERVICE_PORT": "9464",
    "TRACEFIT_SERVICE_PORT_HTTP_METRICS": "9464",
    "TRACEFIT_PORT": "tcp://10.0.0.1:9464",
    "TRACEFIT_PORT_9464_TCP": "tcp://10.0.0.1:9464",
    "TRACEFIT_PORT_9464_TCP_PROTO": "tcp",
    "TRACEFIT_PORT_9464_TCP_PORT": "9464",
    "TRACEFIT_PORT_9464_TCP_ADDR": "10.0.0.1",
    "TRACEFIT_HEADLESS_PORT_4317_UDP": "udp://[fd00::1]:4317",
    "TRACEFIT_HEADLESS_SERVICE_HOST": "fd00::1",
}


def test_what_kubernetes_says_of_a_service_called_tracefit_is_no_configuration():
    assert load(None, SERVICE_LINKS) == Config()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TRACEFIT_PORT", "yes"),
        ("TRACEFIT_SERVICE_HOST", "my.host"),
        ("TRACEFIT_SERVICE", "10.0.0.1"),
        ("TRACEFIT_HTTP__PORT", "9464"),
        ("TRACEFIT_PORTS", "9464"),
        ("TRACEFIT_PORT_9464", "9464"),
    ],
)
def test_only_service_links_are_passed_over(variable, value):
    with pytest.raises(ConfigError):
        load(None, {variable: value})
