# Needs python3 (3.11 or newer) with venv and pip; everything else is pinned by hash in requirements.lock.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONFIG ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm demo-vllm-clean test test-fleet e2e-vllm run bench coverage validate check-vllm-releases explore fuzz mutants torture stress \
	lint manifests dist sbom audit site clean

help:
	@echo "make demo   watch coefficients being learned from a recording of a real server"
	@echo "make test   the test suite"
	@echo "make test-fleet  fleet replay on Ray and from S3, in an environment of its own (first: 300 MB to fetch)"
	@echo "make coverage  the same, with what it covered beside the gate"
	@echo "make run    the sidecar itself (CONFIG=file.yaml)"
	@echo "make demo-vllm  the same with a real, un-forked vLLM on this CPU, our plugin and a load (first set-up: minutes, GBs)"
	@echo "make demo-vllm-clean  remove what that one installed"
	@echo "make e2e-vllm  the same as a test, and the plugin against the own schedulers of vLLM"
	@echo "make check-vllm-releases  whether what the plugin overrides exists in the releases of vLLM"
	@echo "make bench WHAT=x  measure what the documents state, every number beside its target; x is one of"
	@echo "            $(BENCHES)"
	@echo "            (ARGS='names of sections'; some of them need TOOLS=DIR, TABLES=DIR or CAPTURES=DIR, and say so)"
	@echo "make torture  kill the real process 100 times, also in stages of start, checkpoint and stop, with bad disks and clocks,"
	@echo "            and compare with one never killed; damage the log; hostile neighbours beside an honest exporter"
	@echo "make stress   producers, scrapers, pullers and a shutdown at once"
	@echo "make fuzz     every parser of what others send, 60 s each"
	@echo "make mutants  put one fault after another into the learner: does the outer wall of tests notice?"
	@echo "make explore  the property tests with examples they have not seen"
	@echo "make validate FILE=x.yaml  manifests against the schemas of Kubernetes"
	@echo "make manifests  kube-score over everything that renders (needs kubectl and kube-score, helm for the chart)"
	@echo "make site   the documents as a site, into build/site"
	@echo "make dist   the wheel, into dist/"
	@echo "make sbom   what the wheel and the image are made of, as CycloneDX, into dist/"
	@echo "make audit  known vulnerabilities of the same (says it loudly where the index cannot be asked)"
	@echo "make lint   ruff, mypy --strict, import contracts"
	@echo "make clean  remove the environment and everything made"

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tracefit needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

FLEET_VENV := $(VENV)/fleet
FLEET_STAMP := $(FLEET_VENV)/.installed

$(FLEET_STAMP): requirements.lock requirements-fleet.lock
	$(PYTHON) -m venv $(FLEET_VENV)
	$(FLEET_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock -r requirements-fleet.lock
	@touch $@

GPUS_VENV := $(VENV)/gpus
GPUS_STAMP := $(GPUS_VENV)/.installed

$(GPUS_STAMP): requirements.lock requirements-gpus.lock
	$(PYTHON) -m venv $(GPUS_VENV)
	$(GPUS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock -r requirements-gpus.lock
	@touch $@

demo: $(STAMP)
	@$(BIN)/tracefit demo

demo-vllm: $(STAMP)
	@$(BIN)/python deploy/vllm-plugin/demo/demo.py $(ARGS)

demo-vllm-clean: $(STAMP)
	@$(BIN)/python deploy/vllm-plugin/demo/demo.py --remove

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal $(TESTS)

test-fleet: $(FLEET_STAMP)
	FLEET_TEST=1 $(FLEET_VENV)/bin/python -m pytest tests/collector/fleet/test_fleet_extra.py

explore: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m hypothesis --hypothesis-profile explore $(TESTS)

dist: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

SITE := $(VENV)/site
$(SITE)/.installed: deploy/site/requirements.lock
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r deploy/site/requirements.lock
	@touch $@

site: $(STAMP) $(SITE)/.installed
	@mkdir -p build
	@PYTHONPATH=. $(BIN)/python deploy/site/system_tables.py >build/system_tables.json
	$(SITE)/bin/mkdocs build --quiet --strict

AUDIT := $(VENV)/audit
$(AUDIT)/.installed: deploy/audit/requirements.lock
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r deploy/audit/requirements.lock
	@touch $@

sbom: $(STAMP) $(AUDIT)/.installed
	@$(BIN)/python deploy/audit/audit.py sbom $(AUDIT)/bin/cyclonedx-py dist/sbom.json

audit: $(STAMP) $(AUDIT)/.installed
	@$(BIN)/python deploy/audit/audit.py known $(AUDIT)/bin/pip-audit

coverage: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal --cov --cov-report=term:skip-covered

e2e-vllm: $(STAMP)
	$(BIN)/python -m pytest deploy/vllm-plugin/e2e -s

check-vllm-releases: $(STAMP)
	$(BIN)/python deploy/vllm-plugin/matrix/check_wheels.py

run: $(STAMP)
	@$(BIN)/tracefit run $(if $(CONFIG),--config $(CONFIG))

BENCHES := client cost demo gpus ingest learning pages plugin rows silicon systems vllm wires
WHAT ?=
ARGS ?=
GIVEN = $(if $(TOOLS),--tools $(TOOLS)) $(if $(TABLES),--tables $(TABLES)) $(if $(CAPTURES),--captures $(CAPTURES)) $(ARGS)
bench_client = $(GPUS_VENV)/bin/python -m tests.bench.bench_client $(ARGS)
bench_cost = $(BIN)/python -m tests.bench.bench_cost $(ARGS)
bench_demo = $(BIN)/python -m tests.bench.bench_demo $(ARGS)
bench_gpus = $(GPUS_VENV)/bin/python -m tests.bench.bench_gpus $(ARGS)
bench_ingest = $(BIN)/python -m tests.bench.bench_cost latency $(ARGS)
bench_learning = $(BIN)/python -m tests.bench.bench_learning $(GIVEN)
bench_pages = $(BIN)/python -m tests.bench.bench_pages $(GIVEN)
bench_plugin = $(BIN)/python deploy/vllm-plugin/bench/hook_cost.py $(ARGS)
bench_rows = $(BIN)/python -m tests.bench.bench_rows $(GIVEN)
bench_silicon = $(GPUS_VENV)/bin/python -m tests.bench.bench_silicon $(ARGS)
bench_systems = $(GPUS_VENV)/bin/python -m tests.bench.bench_systems $(GIVEN)
bench_vllm = PYTHONPATH=. $(BIN)/python deploy/vllm-plugin/bench/closed_loops.py $(ARGS)
bench_wires = $(BIN)/python -m tests.bench.bench_wires $(ARGS)
bench: $(STAMP) $(if $(filter client gpus silicon systems,$(WHAT)),$(GPUS_STAMP))
	$(if $(filter $(WHAT),$(BENCHES)),,$(error make bench WHAT=x, x one of: $(BENCHES)))
	$(bench_$(WHAT))

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz.fuzz_parsers all --seconds 60

mutants: $(STAMP)
	@$(BIN)/python -m tests.wall.mutants $(ARGS)

torture: $(STAMP)
	$(BIN)/python -m tests.torture.kills $(ARGS)
	$(BIN)/python -m tests.torture.neighbours
	$(BIN)/python -m pytest -q tests/collector/service/test_log.py tests/collector/join/test_event_times.py tests/wire/test_bad_input.py

stress: $(STAMP)
	STRESS_S=30 $(BIN)/python -X dev -m pytest -q tests/wire/test_stress.py

FILE ?= mine.yaml
validate: $(STAMP)
	@$(BIN)/kubernetes-validate --strict $(FILE)

MANIFESTS := $(addprefix deploy/,otel-gateway otel-gateway-tls scrape-gateway fleet/service fleet/cron)
CHART := helm template gate deploy/chart --kube-version 1.37 --set scrape.selector.app=vllm,receive.enabled=true
# Left out, because: images are named by version or digest; which servers and stores may be reached is known to you, not to us; a Service
# matches your vLLMs; nobody asks for a pod of a StatefulSet of one by name; one process writes to a directory.
UNSCORED := $(addprefix --ignore-test ,container-image-pull-policy pod-networkpolicy service-targets-pod statefulset-has-servicename \
	deployment-strategy deployment-replicas)
manifests:
	@mkdir -p build
	@for directory in $(MANIFESTS); do kubectl kustomize $$directory || exit; echo ---; done >build/manifests.yaml
	@if command -v helm >/dev/null; then $(CHART) >>build/manifests.yaml; else echo "helm is not here: the chart is left out"; fi
	kube-score score --ignore-container-cpu-limit $(UNSCORED) build/manifests.yaml >build/manifests.txt || { cat build/manifests.txt; exit 1; }

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict deploy/vllm-plugin/tracefit_vllm
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) dist build .coverage .coverage.* htmlcov .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
