"""Wrong usages of the command line: no traceback, the right exit code, the wrong word named, the near one suggested."""

from __future__ import annotations

from pathlib import Path

import pytest

from collector.cli import main

USAGE, FAILED, CONFIG = 2, 1, 78
SNAPSHOT = "tests/data/golden_snapshot.json"
RECORDING = "tests/data/c8_stock_0.32.0/otlp.pb.gz"

WRONG = [
    ("", USAGE, "COMMAND"),
    ("evaluat x", USAGE, "'evaluat'", "did you mean 'lab evaluate'?"),
    ("check-config --explain x", USAGE, "did you mean 'config check'?"),
    ("serve", USAGE, "did you mean 'run'?"),
    ("fleet", USAGE, "pull"),
    ("run --profile bulc", USAGE, "'bulc'", "did you mean 'bulk'?"),
    ("run --port 4317", USAGE, "--listen HOST:PORT takes telemetry"),
    ("run --url http://vllm:8000", USAGE, "did you mean '--scrape'?"),
    ("run --scrape 127.0.0.1", USAGE, "vLLM listens on 8000: --scrape http://127.0.0.1:8000/metrics"),
    ("run --model llama", USAGE, "set TRACEFIT_MODEL"),
    ("run --verbose", USAGE, "set TRACEFIT_LOG_LEVEL"),
    ("capacity x", USAGE, "did you mean 'plan'?"),
    (f"plan {SNAPSHOT} --prompt 1 --output 1 --tpot 30ms", USAGE, "did you mean '--itl'?"),
    (f"show {SNAPSHOT} --model llama", USAGE, "did you mean '--which'?"),
    ("run --config missing.yaml", CONFIG, "missing.yaml: cannot be read"),
    ("run --scrape ftp://a", USAGE, "--scrape: 'ftp://a' is no address like"),
    ("run --scrape http://a:99999/metrics", USAGE, "--scrape: 'http://a:99999/metrics'"),
    ("run http://vllm:8000", USAGE, "did you mean '--scrape http://vllm:8000'?"),
    ("run tracefit.yaml", USAGE, "did you mean '--config tracefit.yaml'?"),
    ("run --listen :4317", USAGE, "did you mean '127.0.0.1:4317'?"),
    ("run --scrape", USAGE, "see 'tracefit run --help'"),
    ("version", USAGE, "did you mean '--version'?"),
    ("fleet push", USAGE, "there are pull, replay"),
    ("config show", USAGE, "there are check, explain, schema"),
    ("doctor 127.0.0.1:99999", FAILED, "Port out of range"),
    ("doctor {tmp}", FAILED, "is a path, and doctor asks an address"),
    ("doctor gone.json", FAILED, "is a path, and doctor asks an address"),
    ("doctor 127.0.0.1:1", FAILED, "/metrics: Connection refused"),
    *((f"doctor {url}", FAILED, "error: ") for url in ("ftp://here", "http://[")),
    ("doctor {newer}", FAILED, "tracefit show {newer}"),
    ("run --itl 30", USAGE, "set TRACEFIT_ITL_MS"),
    ("run --k", USAGE, "there is no option '--k' (see"),
    ("replay a", USAGE, "--out"),
    ("replay a --snapsot b", USAGE, "'--snapsot'", "did you mean '--snapshot'?"),
    ("replay missing.pb.gz --snapshot {tmp}/s.json", FAILED, "missing.pb.gz"),
    ("replay {tmp} --snapshot {tmp}/s.json", FAILED, "there is no file in it"),
    ("replay http://vllm:8000/metrics -o {tmp}/s.json", USAGE, "'http://vllm:8000/metrics' is no file", "run --scrape"),
    ("replay /dev/null -o {tmp}/s.json", FAILED, "error: nothing was learned", "docs/telemetry.md"),
    ("replay {junk} --snapshot {tmp}/s.json", FAILED, "junk"),
    (f"replay {RECORDING} --snapshot /nowhere/s.json", FAILED, "/nowhere"),
    (f"replay {RECORDING} --snapshot {{tmp}}", FAILED, "it is a directory"),
    ("replay {junk} --snapshot {junk}", FAILED, "it is read"),
    (f"replay {RECORDING} -o {{tmp}}/s --state {{tmp}}/../empty/s", FAILED, "another result goes there"),
    ("lab evaluate {junk} -o {junk}", FAILED, "it is read"),
    ("lab merge {junk} -o {tmp}/m --snapshot {tmp}/m", FAILED, "another result goes there"),
    ("export {published}/snapshot.json --format blis-yaml -o {published}/snapshot.json", FAILED, "it is read"),
    *((f"replay x --snapshot y {abbreviated} 1", USAGE, abbreviated) for abbreviated in ("--hel", "--snap", "--work")),
    (f"export {SNAPSHOT}", USAGE, "--format"),
    ("export /dev/null --format blis-trace --out {tmp}/x", FAILED, "error: no finished request in the recording"),
    (f"export {RECORDING} --format blis-trace", USAGE, "--out", "in which directory"),
    (f"export {SNAPSHOT} --format blis-yml", USAGE, "'blis-yml'", "did you mean 'blis-yaml'?"),
    ("export missing.json --format blis-yaml", FAILED, "missing.json", "cannot read"),
    ("export {junk} --format blis-yaml", FAILED, "not a snapshot", "tracefit replay {junk} -o"),
    (f"show {RECORDING}", FAILED, f"a recording becomes one: tracefit replay {RECORDING} -o snapshot.json"),
    ("show {published}", FAILED, "did you mean '{published}/snapshot.json'?"),
    ("lab evaluate x --snapshot {newer}", FAILED, "has schema 'tracefit.snapshot/2'"),
    (f"export {SNAPSHOT} --format blis-yaml --which zzzz", FAILED, "zzzz"),
    (f"export {SNAPSHOT} --format blis-yaml --model-config {{junk}}", FAILED, "junk"),
    ("demo --speed 1e-300", USAGE, "--speed", "'1e-300'"),
    ("demo --dir=", USAGE, "--dir", "no path"),
    ("demo --to 127.0.0.1:1 --speed 2", USAGE, "--to: not with --speed or --dir"),
    (f"demo --gpu --recording {RECORDING}", USAGE, "--gpu: not with --recording"),
    ("demo --throttle -1", USAGE, "'-1'"),
    ("demo --to 127.0.0.1:99999", USAGE, "'127.0.0.1:99999' is not host:port"),
    ("demo --dir {junk}", FAILED, "junk: it is a file, and a directory is wanted"),
    ("demo --recording missing.pb.gz", FAILED, "missing.pb.gz"),
    (f"lab evaluate {SNAPSHOT}", USAGE, "is a snapshot", "lab evaluate RECORDING --snapshot"),
    (f"replay {SNAPSHOT} -o {{tmp}}/s.json", USAGE, f"tracefit show {SNAPSHOT}"),
    (f"lab evaluate {RECORDING} --learn-until 7", USAGE, "'7'"),
    (f"lab evaluate {RECORDING} --systems portible", USAGE, "'portible'", "did you mean 'portable'?"),
    (f"lab evaluate {RECORDING} -o {{tmp}}", FAILED, "it is a directory"),
    ("lab donors missing", FAILED, "missing"),
    ("lab merge missing.bin -o {tmp}/m.bin", FAILED, "missing.bin"),
    ("lab merge {junk} -o {tmp}/m.bin --json", USAGE, "--json"),
    ("fleet pull x --out {tmp}/fleet --every 5m --json", USAGE, "--json"),
    ("config explain slo --json", USAGE, "--json"),
    ("show {tmp}/state.bin", FAILED, "in the snapshot.json beside it"),
    ("fleet pull 127.0.0.1:1 --out {tmp}/fleet", FAILED, "http://127.0.0.1:1/state"),
    ("fleet pull missing --out {junk}", FAILED, "it is a file, and a directory is wanted"),
    ("fleet pull x --out {tmp}/fleet --token-file {tmp}/none", FAILED, "none: No such file"),
    ("fleet pull x --out {tmp} --every soon", USAGE, "'soon'"),
    ("fleet pull x --out {tmp} --require 2", USAGE, "'2' is no number from 0 to 1"),
    ("fleet replay x --out {tmp} --workers 2", USAGE, "--workers"),
    (f"predict {SNAPSHOT}", USAGE, "--prompt: missing: give a load"),
    (f"predict {SNAPSHOT} --prefill 3", USAGE, "--requests: missing"),
    (f"predict {SNAPSHOT} --requests 0", USAGE, "error: --requests: 0: a step without a request is none"),
    (f"predict {SNAPSHOT} --requests 3 --output 3", USAGE, "--output: a load"),
    (f"plan {SNAPSHOT} --prompt 3 --output 3 --itl soon", USAGE, "'--itl': 'soon'"),
    (f"show {SNAPSHOT} --token-file /nowhere/token", FAILED, "/nowhere/token"),
    (f"predict {SNAPSHOT} --prefill -1 --requests 1", USAGE, "error: --prefill: "),
    (f"predict {SNAPSHOT} --prompt 100 --output 10 --prefix-hit 2", USAGE, "error: --prefix-hit: "),
    (f"plan {SNAPSHOT} --prompt 100 --output 10 --itl nan", USAGE, "'--itl': 'nan'"),
    (f"plan {SNAPSHOT} --prompt 100 --output 10 --itl 30 --max-num-seqs 0", USAGE, "error: --max-num-seqs: "),
    (f"predict {SNAPSHOT} --tpot 30ms", USAGE, "tracefit plan"),
    (f"plan {SNAPSHOT} --isl 9 --osl 9 --itl 30ms", USAGE, "did you mean '--prompt'?"),
    (f"plan {SNAPSHOT} --prompt 9 --output 9 --concurrency 3", USAGE, "tracefit predict"),
    ("show 127.0.0.1:1", FAILED, "http://127.0.0.1:1 cannot be asked"),
    (f"diff {SNAPSHOT}", USAGE, "SNAPSHOT"),
    ("config explain join_timeout", USAGE, "'join_timeout'", "did you mean 'join_timeout_s'?"),
    ("config check --config {junk}", CONFIG, "junk"),
    ("config check --config {directory}", CONFIG, "unknown key", "did you mean 'directory'?"),
    ("config check --config {detector}", CONFIG, "detector", "did you mean 'cusum'?"),
    ("config check --config {durability}", CONFIG, "durability: 'lok'", "log, memory; did you mean 'log'?"),
    ("config check --config {learners}", CONFIG, "learners: 'rsl'", "did you mean 'rls'?"),
]


CONFIGS = {
    "directory": "dirctory: /tmp",
    "detector": "detector: cusim",
    "durability": "durability: lok",
    "learners": "learners: [rsl]",
}


@pytest.fixture
def places(tmp_path):
    junk, empty = tmp_path / "j" / "junk", tmp_path / "empty"
    junk.parent.mkdir()
    junk.write_bytes(b"\x00\xffnothing of ours")
    empty.mkdir()
    published, newer = tmp_path / "published", tmp_path / "newer.json"
    published.mkdir()
    (published / "snapshot.json").write_bytes(Path(SNAPSHOT).read_bytes())
    newer.write_text('{"schema": "tracefit.snapshot/2", "configs": []}')
    configs = {name: tmp_path / f"{name}.yaml" for name in CONFIGS}
    for name, file in configs.items():
        file.write_text(CONFIGS[name])
    return {"tmp": empty, "junk": junk, "published": published, "newer": newer, **configs}


@pytest.mark.parametrize("usage", WRONG, ids=lambda usage: usage[0][:60])
def test_a_wrong_usage_ends_with_its_code_and_names_the_word(usage, places, capsys):
    text, code, *words = usage
    ended = main(text.format(**places).split())
    printed = capsys.readouterr()
    assert ended == code, printed.err
    assert "Traceback" not in printed.err
    for word in words:
        assert word.format(**places) in printed.err


def test_a_wrong_variable_is_named_as_it_was_written(monkeypatch, capsys):
    monkeypatch.setenv("TRACEFIT_JOIN_TIMEOUT", "1")
    assert main(["config", "check"]) == CONFIG
    assert "TRACEFIT_JOIN_TIMEOUT: unknown key; did you mean 'TRACEFIT_JOIN_TIMEOUT_S'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("join_timeout_s", ["journeys", "180.0", "TRACEFIT_JOIN_TIMEOUT_S"]),
        ("log_level", ["info", "Least important"]),
        ("rules[].match", ["pattern"]),
    ],
)
def test_explain_says_what_a_key_means_and_what_holds_without_it(name, words, capsys):
    assert main(["config", "explain", name]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed
