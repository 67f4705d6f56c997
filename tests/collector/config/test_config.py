"""Configuration: what holds, and the sentence for what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from collector.config import (
    PROFILES,
    Config,
    ConfigError,
    as_yaml,
    every_key,
    load,
    to_tree,
)
from collector.service.pipeline import make_pipeline


def from_text(tmp_path: Path, text: str, **environ: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load(path, {f"TRACEFIT_{name}": value for name, value in environ.items()})


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
"""What Kubernetes says of a service called tracefit."""


def test_nothing_configured_is_the_defaults(tmp_path):
    nothing = {"HOME": "/", "TRACEFIT_CONFIG": "x", **SERVICE_LINKS}
    assert load(None, nothing) == from_text(tmp_path, "# nothing\n") == Config()


def test_there_are_at_most_45_keys_beside_those_of_passing_on_and_of_forward_passes():
    assert len([key for key in every_key() if not key.name.startswith(("forward", "fpm"))]) <= 45


def test_the_environment_is_stronger_than_the_file(tmp_path):
    text = "join_timeout_s: 60\nallowed_lateness_s: 5"
    config = from_text(tmp_path, text, JOIN_TIMEOUT_S="70.5", LEARNERS="[rls]")
    assert (config.join_timeout_s, config.allowed_lateness_s, config.learners) == (70.5, 5, ("rls",))
    config = from_text(tmp_path, "", LISTEN="[::]:4317", LISTEN_HTTP="[::1]:4318")
    assert (config.listen, config.listen_http) == ("[::]:4317", "[::1]:4318")
    assert from_text(tmp_path, "", LISTEN_HTTP="").listen_http == "", "an empty variable means nowhere"


VARIABLES = """
ITL_MS=30 -> [30.0]
ITL_MS=30, 50 -> [30.0, 50.0]
SCRAPE=http://[::1]:8000/metrics -> ["http://[::1]:8000/metrics"]
SCRAPE=dns+http://vllm:8000/metrics,other:8000 -> ["dns+http://vllm:8000/metrics", "other:8000"]
KV=engine-1=tcp://127.0.0.1:5557 -> [engine-1=tcp://127.0.0.1:5557]
LEARNERS=rls,river:residual -> [rls, river:residual]
GPU=8 -> "8"
MODEL=null -> "null"
DIRECTORY=my dir -> my dir
"""


@pytest.mark.parametrize("line", VARIABLES.strip().splitlines())
def test_a_variable_of_a_list_needs_no_brackets_and_one_of_a_text_no_quotes(line):
    given, _, held = line.partition(" -> ")
    name, _, value = given.partition("=")
    config = to_tree(load(None, {f"TRACEFIT_{name}": value}))
    assert yaml.safe_load(as_yaml(config, {}))[name.lower()] == yaml.safe_load(held)


BAD = r"""
foo: 1 | foo | unknown key; tracefit config explain lists all
engine_max: 1 | engine_max | did you mean 'engines_max'?
rules: [{foo: 1}] | rules[0].foo | unknown key
'': 1 | '' | unknown key
1: 2 | configuration | a key is no text
"a\nb": 1 | 'a\nb' | unknown key
rules: [{"a\n": 1}] | rules[0].'a\n' | unknown key
directory: "a\0b" | directory | expected printable text
scrape: ["http://a:8000/\x07"] | scrape | expected printable text
listen: nowhere | listen | expected host:port
listen: 'a:65536' | listen | expected host:port
listen: '::1:4317' | listen | expected host:port
listen_http: 'off' | listen_http | or empty
message_max_mib: 1.5 | message_max_mib | expected integer ≥ 1
idle_timeout_s: .nan | idle_timeout_s | expected number
join_timeout_s: .inf | join_timeout_s | expected number
checkpoint_interval_s: 0 | checkpoint_interval_s | expected number ≥ 0.1
scrape: ['http://[:::::1]/'] | scrape[0] | IPv6
scrape: [./targets.yaml] | scrape[0] | http(s)://host
scrape: [vllm] | scrape[0] | http(s)://host:port
kv: ['127.0.0.1:5557'] | kv[0] | [instance=]tcp://host:port
fpm: ['tcp://127.0.0.1:65536'] | fpm[0] | [instance=][gpu+]tcp://host:port
scrape: http://a:8000 | scrape | expected list of 0 to 256: http(s)://host
rules: | rules | expected list
rules: x | rules | expected list of 0 to 1000: mapping
kv: true | kv | expected list of 0 to 64
kv: ['tcp://127.0.0.1:0'] | kv[0] | tcp://host:port
profile: 3 | profile | expected bulk, gateway, sidecar
learners: [] | learners | expected list of 1 to 16
rules: [{match: {a: 1}}] | rules[0].match[...] | expected mapping
"""
"""What a file says, which key is named for it, and what is said of it."""


@pytest.mark.parametrize(("text", "key", "problem"), [line.split(" | ") for line in BAD.strip().splitlines()])
def test_a_bad_value_is_named_by_its_path(tmp_path, text, key, problem):
    with pytest.raises(ConfigError) as caught:
        from_text(tmp_path, text)
    assert caught.value.key == key
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "in line"),
        ("- 1", "expected a mapping"),
        ("? {a: 1}\n: 2", "unhashable key in line 1"),
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


@pytest.mark.parametrize(
    "told",
    [
        "FOO=-1",
        "IDLE__TIMEOUT_S=-1",
        "ALLOWED_LATENESS_S=-1",
        "SERVICE=-1",
        "PORTS=-1",
        "PORT=yes",
        "SERVICE_HOST=my.host",
        "PORT_9464=9464",
    ],
)
def test_a_bad_variable_is_named_itself_and_only_service_links_are_passed_over(tmp_path, told):
    variable, _, value = told.partition("=")
    with pytest.raises(ConfigError) as caught:
        from_text(tmp_path, "allowed_lateness_s: 1", **{variable: value})
    assert caught.value.key == f"TRACEFIT_{variable}"


def test_the_effective_configuration_is_a_configuration(tmp_path):
    config = from_text(tmp_path, "profile: gateway\njoin_timeout_s: 60\nfeature_sets: [portable]")
    assert from_text(tmp_path, as_yaml(to_tree(config), {})) == config


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


def test_a_profile_holds_below_the_file_and_the_environment_and_an_option_names_it_before_both(tmp_path):
    config = from_text(tmp_path, "profile: gateway\nqueue_mib: 32", PUBLISH_INTERVAL_S="2")
    assert (config.queue_mib, config.publish_interval_s) == (32.0, 2.0), "as the file and the environment say"
    assert (config.engines_max, config.configs_max) == (500, 500), "as the profile says"
    assert config.join_timeout_s == Config().join_timeout_s, "as nobody says"
    by_variable = {"TRACEFIT_PROFILE": "sidecar"}
    assert load(tmp_path / "config.yaml", by_variable).engines_max == 64
    by_option = load(tmp_path / "config.yaml", by_variable, "bulk")
    assert (by_option.profile, by_option.block_rows, by_option.learners) == ("bulk", 8_192, ("rls",))


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_a_configuration_that_learns(profile):
    assert make_pipeline(load(None, {}, profile)).learned_rows == 0
