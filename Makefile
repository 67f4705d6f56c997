# Needs python3 (3.11 or newer) with venv and pip; everything else is pinned by hash in requirements.lock.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONFIG ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm demo-vllm-clean test e2e-vllm run bench bench-rows bench-learning bench-systems \
	bench-ingest validate check-vllm-releases fuzz torture soak stress bench-journal lint clean

help:
	@echo "make demo   watch coefficients being learned from a recording of a real server"
	@echo "make test   the test suite"
	@echo "make run    the sidecar itself (CONFIG=file.yaml)"
	@echo "make demo-vllm  the same with a real, un-forked vLLM on this CPU, our plugin and a load (first set-up: minutes, GBs)"
	@echo "make bench  measure what the documents state"
	@echo "make bench-rows      every number of the rows beside its target"
	@echo "make bench-ingest    every number of the receive path beside its target"
	@echo "make bench-systems   every number of the modelling systems beside its target"
	@echo "make bench-learning  every number of the learning core beside its target"
	@echo "make torture  kill the real process 110 times, with bad disks and jumping clocks, and compare with one never killed"
	@echo "make soak     a day of traffic in minutes: memory, files, threads, accounting"
	@echo "make stress   producers, scrapers, pullers and a shutdown at once"
	@echo "make fuzz     every parser, 60 s each"
	@echo "make bench-journal   what the journal costs, and how long a start takes after a crash"
	@echo "make validate FILE=x.yaml  manifests against the schemas of Kubernetes"
	@echo "make lint   ruff, mypy --strict, import contracts"

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tracefit needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP)
	@$(BIN)/tracefit demo

demo-vllm: $(STAMP)
	@$(BIN)/python deploy/vllm-plugin/demo/demo.py

demo-vllm-clean: $(STAMP)
	@$(BIN)/python deploy/vllm-plugin/demo/demo.py --remove

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal

e2e-vllm: $(STAMP)
	$(BIN)/python -m pytest deploy/vllm-plugin/e2e -s

check-vllm-releases: $(STAMP)
	$(BIN)/python deploy/vllm-plugin/matrix/check_wheels.py

run: $(STAMP)
	@$(BIN)/tracefit run $(if $(CONFIG),--config $(CONFIG))

bench: $(STAMP)
	$(BIN)/python -m pytest tests/bench -s

bench-rows: $(STAMP)
	$(BIN)/python -m tests.bench.bench_rows

LOAD ?= $(wildcard ../shared/tools/otlp_load.py)
bench-ingest: $(STAMP)
	$(BIN)/python -m tests.bench.bench_ingest $(if $(LOAD),--load $(LOAD))

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz.fuzz_decode --seconds 60
	$(BIN)/python -m tests.fuzz.fuzz_parsers all --seconds 60

torture: $(STAMP)
	$(BIN)/python -m tests.torture.harness --kills 110 --exports 5000
	$(BIN)/python -m tests.torture.harness --kills 20 --exports 1000 --seed 2 --fsync

soak: $(STAMP)
	$(BIN)/python -m tests.torture.soak

stress: $(STAMP)
	$(BIN)/python -X dev -m tests.torture.stress --seconds 30

bench-journal: $(STAMP)
	$(BIN)/python -m tests.bench.bench_journal
	$(BIN)/python -m tests.bench.bench_journal --fsync
	$(BIN)/python -m tests.bench.bench_journal --recovery

FILE ?= mine.yaml
validate: $(STAMP)
	@$(BIN)/kubernetes-validate --strict $(FILE)

bench-systems: $(STAMP)
	$(BIN)/python -m tests.bench.bench_systems

bench-learning: $(STAMP)
	$(BIN)/python -m tests.bench.bench_learning

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict deploy/vllm-plugin/tracefit_vllm
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
