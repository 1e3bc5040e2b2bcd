# `make serve` runs the service, `make test` its tests; both install what they need into .venv first.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_REQUIRE_VIRTUALENV := 1
# Where it is set, each service and command that a test starts would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## show what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Stamps, so that an environment is made once and again only when its lock changes.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: requirements/build.txt requirements/core.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/build.txt -r requirements/core.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.core
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/test.txt
	@touch $@

.PHONY: install
install: $(VENV)/.core ## make .venv with what the service needs

.PHONY: install-test
install-test: $(VENV)/.test ## the same, with what the tests need

# Environments of other targets. What their locks name is installed once for all checkouts of a machine, below ENVIRONMENTS.
# environment.py returns at once where an environment is made already.
export ENVIRONMENTS ?= $(HOME)/.cache/attention-service
ENVIRONMENT := $(PYTHON) requirements/environment.py
LOCKS := requirements/build.txt requirements/core.txt requirements/test.txt

# With torch, what the service is compared with, what attacks it, servers other than its own, and what drives a browser.
TORCH_VENV ?= .venv-torch
TORCH_BIN := $(TORCH_VENV)/bin
# What was chosen before. Elsewhere choose your build: pytorch.org says which index has which CUDA.
TORCH ?= $(or $(shell cat $(TORCH_VENV)/torch 2>/dev/null),torch==2.13.0)

.PHONY: install-torch
install-torch: ## make .venv-torch with torch (TORCH=...) and all that other tests need
	@$(ENVIRONMENT) $(TORCH_VENV) $(LOCKS) $(patsubst %,requirements/%.txt,peers attack servers page) \
		--torch "$(TORCH)" --models requirements/models.txt --project

# What checks, runs and ships images and packages.
DEPLOY_VENV ?= .venv-deploy
DEPLOY_BIN := $(DEPLOY_VENV)/bin

.PHONY: install-deploy
install-deploy:
	@$(ENVIRONMENT) $(DEPLOY_VENV) requirements/build.txt requirements/deploy.txt

# Clients that nobody here wrote. Some want older packages than the service.
CLIENTS_VENV ?= .venv-clients
CLIENTS_BIN := $(CLIENTS_VENV)/bin

.PHONY: install-clients
install-clients:
	@$(ENVIRONMENT) $(CLIENTS_VENV) requirements/build.txt requirements/clients.txt --models requirements/mlserver.txt --project

# Ray, which wants another filelock than transformers.
RAY_VENV ?= .venv-ray
RAY_BIN := $(RAY_VENV)/bin

.PHONY: install-ray
install-ray:
	@$(ENVIRONMENT) $(RAY_VENV) $(LOCKS) requirements/ray.txt --project

# The site of the documentation.
DOCS_VENV ?= .venv-docs

.PHONY: install-docs
install-docs:
	@$(ENVIRONMENT) $(DOCS_VENV) requirements/docs.txt

.PHONY: install-all
install-all: install-test install-torch install-deploy install-clients install-ray install-docs ## make all environments

.PHONY: serve
serve: $(VENV)/.core ## run the service (ATTENTION_HOST, ATTENTION_PORT)
	@exec $(BIN)/attention-service serve

.PHONY: format
format: $(VENV)/.test ## put the code into its one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: check
check: $(VENV)/.test ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Four processes, each of up to a gigabyte, also on two processors, as tests of servers wait half of their time. A process
# that has no tests left takes those of another. `make test PARALLEL=` runs all tests in one process.
PARALLEL ?= --numprocesses 4 --dist worksteal
# Two processes where each test has a server or a browser of its own, and measures time or memory.
PARALLEL_SERVERS ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder
# BLAS and torch compute on the thread that calls them: threads of their own, in each process, would spin.
test test-slow test-pythons test-torch test-peers test-attack test-page: export OPENBLAS_NUM_THREADS ?= 1
test-torch test-peers: export OMP_NUM_THREADS ?= 1

.PHONY: test
test: check ## format, lint, types, and all tests that are not marked slow
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"
	@echo 'What else there is, with minutes of a machine that CONTRIBUTING.md describes (make help lists all targets):'
	@awk -F '|' '/^\| `make [a-z-]+` / && !/`make test`/ { gsub(/`/, ""); printf "  %-19s %4s  %s\n", $$2, $$4, $$3 }' CONTRIBUTING.md

.PHONY: test-slow
test-slow: $(VENV)/.test ## the tests that are marked slow, and the coverage of all others
	@rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest $(PARALLEL) -m "not slow"
	@$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
	$(BIN)/python -m pytest $(PARALLEL) -m slow

# Versions of Python besides that of .venv, each with an environment of its own, .venv-3.13 for example.
# The oldest and the newest: a change that breaks only a version between them has not been seen.
PYENV_PYTHONS := $(sort $(wildcard $(HOME)/.pyenv/versions/3.1[1-9].*/bin/python))
# Tests of numbers, which NumPy computes in the same way in each.
OF_NUMBERS := tests/memory $(wildcard tests/test_compare*.py tests/test_conformance*.py) $(patsubst %,tests/test_%.py, \
	batch_invariance corner_cases gates gradients head_scales hidden_by laws long_sequences norms options outputs properties \
	relative_keys rotation_tables selected_keys sigmoid sinks tiles)
OTHER_PYTHONS ?= $(firstword $(PYENV_PYTHONS)) $(lastword $(PYENV_PYTHONS))

.PHONY: test-pythons
test-pythons: $(VENV)/.test ## tests that are not slow or of numbers, with the oldest and the newest Python of pyenv (OTHER_PYTHONS=... for others)
	@for python in $(OTHER_PYTHONS); do \
		version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])') && \
		test "$$version" != "$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" || continue; \
		echo "== Python $$version"; \
		$$python requirements/environment.py .venv-$$version $(LOCKS) --project && \
		.venv-$$version/bin/python -m pytest $(PARALLEL) -m "not slow" $(addprefix --ignore=,$(OF_NUMBERS)) || exit; \
	done

.PHONY: test-torch
test-torch: install-torch ## the tests that need torch
	$(TORCH_BIN)/python -m pytest $(PARALLEL) -m torch

.PHONY: test-peers
test-peers: install-torch ## compare with implementations that nobody here wrote (Chromium at CHROMIUM=/usr/bin/chromium)
	$(TORCH_BIN)/python -m pytest $(PARALLEL) tests/peers

.PHONY: test-gpu
test-gpu: install-torch ## the torch backend on a GPU, where torch sees one (TORCH=... for a build with CUDA)
	$(TORCH_BIN)/python -m pytest tests/test_gpu.py

.PHONY: test-deep
test-deep: $(VENV)/.test install-torch ## thousands of examples for each property, requests made from the API document, configurations for each peer, cuts of connections; 60 changes that tests must notice
	$(TORCH_BIN)/python -m pytest $(PARALLEL) -m "not slow" --hypothesis-profile deep tests/test_properties.py tests/test_json.py \
		tests/test_binary_codecs.py tests/test_dtypes.py tests/test_batch_invariance.py
	$(TORCH_BIN)/python -m pytest -m torch --hypothesis-profile deep tests/test_batch_invariance.py
	ATTACK_CASES=5000 $(TORCH_BIN)/python -m pytest tests/attack/test_api.py tests/attack/test_hostile_shapes.py
	$(TORCH_BIN)/python -m tests.peers.deep
	$(TORCH_BIN)/python -W ignore -m tests.deep_compare
	$(BIN)/python -m tests.deep_engines
	$(TORCH_BIN)/python -m tests.framing.deep
	$(TORCH_BIN)/python -m benchmarks.overload
	$(TORCH_BIN)/python -m benchmarks.soak
	$(BIN)/python -m tests.deep_mutations

.PHONY: test-attack
test-attack: install-torch ## hostile requests and clients, ten seconds of overload and of soak
	$(TORCH_BIN)/python -m pytest $(PARALLEL_SERVERS) tests/attack
	$(TORCH_BIN)/python -m benchmarks.overload --seconds 10
	$(TORCH_BIN)/python -m benchmarks.soak --seconds 10

.PHONY: test-servers
test-servers: install-torch ## the same answers under uvicorn, hypercorn and granian, and through nginx (Debian's package nginx)
	$(TORCH_BIN)/python -m pytest --numprocesses 2 tests/servers

.PHONY: test-ray
test-ray: install-ray ## the Ray backend on a cluster of two nodes on this machine
	$(RAY_BIN)/python -m pytest tests/ray

.PHONY: fuzz
fuzz: install-torch ## 1,000,000 mutated bodies for each wire format
	$(TORCH_BIN)/python -m tests.attack.fuzz

# Images. deploy/engine says what makes them: docker or podman. BASE_IMAGE is what they start from.
IMAGE ?= attention-service
TARGET ?= cpu
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' service/attention_service/version.py)
REVISION := $(shell git rev-parse HEAD 2>/dev/null)

.PHONY: deploy-check
deploy-check: $(VENV)/.test install-deploy ## lint Dockerfile, compose file and scripts; build and validate manifests; test the alerts (promtool of Debian's package prometheus), and the systemd unit
	$(DEPLOY_BIN)/hadolint Dockerfile
	$(DEPLOY_BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	promtool check config deploy/prometheus/prometheus.yml
	promtool check rules deploy/prometheus/rules/*.yml
	promtool test rules deploy/prometheus/tests/*.yml
	$(DEPLOY_BIN)/shellcheck deploy/engine deploy/local-base-image deploy/release-check .ci/prepare .ci/run
	PATH=$(abspath $(DEPLOY_BIN)):$$PATH $(BIN)/python -m pytest tests/deploy

.PHONY: image
image: ## build an image (TARGET=cpu, torch or cuda; TORCH=... for torch; GRPC=yes for gRPC, OTEL=yes for traces)
	@engine=$$(deploy/engine) && eval "$$engine" && set -x && \
	$$ENGINE build $$BUILD_FLAGS --build-arg BASE_IMAGE=$$BASE_IMAGE --build-arg TORCH="$(TORCH)" --build-arg GRPC="$(GRPC)" \
		--build-arg OTEL="$(OTEL)" --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) --target $(TARGET) --tag $(IMAGE):$(TARGET) .

# RUN_FLAGS has further options of the engine, like --env ATTENTION_WORKERS=2.
PORT ?= 8000
CPUS ?= 2
MEMORY ?= 2g

.PHONY: run-image
run-image: ## run an image until Ctrl-C (TARGET=..., PORT=8000, CPUS=2, MEMORY=2g, RUN_FLAGS=...)
	@engine=$$(deploy/engine) && eval "$$engine" && set -x && \
	exec $$ENGINE run --rm --pull never --publish 127.0.0.1:$(PORT):8000 \
		--read-only --tmpfs /tmp --cap-drop all --security-opt no-new-privileges \
		--cpus $(CPUS) --memory $(MEMORY) --pids-limit 256 $(RUN_FLAGS) $(IMAGE):$(TARGET)

.PHONY: image-test
image-test: TESTS = tests/image
image-test: image run-image-test ## build the image, and test it as it runs in production

.PHONY: scale-test
scale-test: TESTS = tests/image/test_scale.py
scale-test: image run-image-test ## the same with three replicas behind a proxy, one of which is killed

.PHONY: run-image-test
run-image-test: $(VENV)/.test install-deploy
	@engine=$$(deploy/engine) && eval "$$engine" && \
	IMAGE=$(IMAGE) PODMAN_COMPOSE=$(DEPLOY_BIN)/podman-compose $(BIN)/python -m pytest $(TESTS)

# Generated from the API document, by the generators that docs/clients.md lists.
CLIENTS := build/clients
NODE := tests/clients/typescript
GENERATOR = $$($(CLIENTS_BIN)/python -c 'import openapi_generator_cli as cli; print(cli.__path__[0])')/openapi-generator.jar

$(NODE)/node_modules/.installed: $(NODE)/package.json $(NODE)/package-lock.json
	npm ci --prefix $(NODE) --no-audit --no-fund
	@touch $@

.PHONY: clients
clients: install-clients $(NODE)/node_modules/.installed ## generate clients in Python, TypeScript, Java, Go, C# and Rust (npm, Java)
	@rm -rf $(CLIENTS) && mkdir -p $(CLIENTS)/python $(CLIENTS)/openapi-typescript
	PATH=$(abspath $(CLIENTS_BIN)):$$PATH openapi-python-client generate --path openapi/openapi.json --meta none \
		--config tests/clients/python/openapi-python-client.yaml --output-path $(CLIENTS)/python/attention_client --overwrite
	$(NODE)/node_modules/.bin/openapi-typescript openapi/openapi.json --default-non-nullable=false \
		--output $(CLIENTS)/openapi-typescript/schema.ts
	$(NODE)/node_modules/.bin/openapi-ts --file $(NODE)/hey-api.config.js --no-log-file --silent
	java -jar "$(GENERATOR)" batch --fail-fast --threads 2 tests/clients/*/generator.yaml > $(CLIENTS)/generated.log

.PHONY: lint-openapi
lint-openapi: $(NODE)/node_modules/.installed ## hold the API document against the rules of redocly and spectral
	$(NODE)/node_modules/.bin/redocly lint openapi/openapi.json --config $(NODE)/redocly.yaml
	$(NODE)/node_modules/.bin/redocly lint openapi/openapi-3.0.json --config $(NODE)/redocly.yaml
	$(NODE)/node_modules/.bin/spectral lint openapi/openapi.json openapi/openapi-3.0.json \
		--ruleset $(NODE)/spectral.yaml --fail-severity hint

.PHONY: test-clients
test-clients: clients lint-openapi ## ask a running service by clients that nobody here wrote, and by generated ones (.ci/prepare installs their compilers)
	$(CLIENTS_BIN)/python -m pytest tests/clients
	$(CLIENTS_BIN)/python -m pytest tests/clients/alone

tests/page/node_modules/.installed: tests/page/package.json tests/page/package-lock.json
	npm ci --prefix tests/page --no-audit --no-fund
	@touch $@

.PHONY: test-page
test-page: install-torch tests/page/node_modules/.installed ## the page at / in a browser (npm, and Chromium at CHROMIUM=/usr/bin/chromium)
	$(TORCH_BIN)/python -m pytest $(PARALLEL_SERVERS) tests/page

.PHONY: bench
bench: $(VENV)/.test ## compare the service with other servers over HTTP, each with one BLAS thread: those of bench-peers that are installed
	$(BIN)/python -m benchmarks.http

.PHONY: profile
profile: $(VENV)/.test ## where the time of a request goes, beside bare uvicorn and FastAPI by hand (WORKLOAD=W3; all by default)
	$(BIN)/python -m benchmarks.profile $(if $(WORKLOAD),--workloads "$(WORKLOAD)")

# Each peer has its own environment, as their requirements conflict.
PEERS := mlserver bentoml kserve litserve ray triton
PEER_STAMPS := $(PEERS:%=benchmarks/peers/%/.venv/.installed)

$(PEER_STAMPS): benchmarks/peers/%/.venv/.installed: benchmarks/peers/%/requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps -r $<
	@touch $@

.PHONY: bench-peers
bench-peers: ## install the servers to compare with; a failed installation does not stop the others
	@$(MAKE) --no-print-directory --keep-going $(PEER_STAMPS)

.PHONY: bench-beside
bench-beside: $(VENV)/.test ## latency of small requests beside large ones
	$(BIN)/python -m benchmarks.beside

.PHONY: overload
overload: $(VENV)/.test ## 200 clients for a minute, more than can be answered: throughput, latency, memory
	$(BIN)/python -m benchmarks.overload

.PHONY: soak
soak: $(VENV)/.test ## valid, invalid and aborted requests for 15 minutes: answers, memory, descriptors
	$(BIN)/python -m benchmarks.soak

.PHONY: bench-memory
bench-memory: $(VENV)/.test ## time and memory of 65,536 tokens
	$(BIN)/python -m benchmarks.memory

.PHONY: bench-kernel
bench-kernel: install-torch ## the NumPy backend beside torch and onnxruntime
	$(TORCH_BIN)/python -m pip install --quiet --no-deps -r benchmarks/requirements-kernel.txt
	$(TORCH_BIN)/python -m benchmarks.kernel

.PHONY: conformance
conformance: install-torch ## judge other libraries anew, and write what docs/conformance.md says of them
	$(TORCH_BIN)/python -m tests.peers.conformance.matrix

.PHONY: bench-gpu
bench-gpu: install-torch ## the torch backend on a GPU beside torch's kernels, the copies and the HTTP floor
	$(TORCH_BIN)/python -m benchmarks.gpu

.PHONY: openapi
openapi: $(VENV)/.test ## regenerate what is generated: API document, examples, tables in docs
	$(BIN)/python openapi/generate.py

# In folder $(1): the core by the package's own metadata, the rest by their .in; with $(2), to the newest versions.
define compile-locks
cd $(1) && $(abspath $(BIN))/pip-compile $(LOCK_FLAGS) $(2) --output-file requirements/core.txt pyproject.toml && \
for name in build test grpc otel peers attack servers page ray cuda deploy docs; do \
	$(abspath $(BIN))/pip-compile $(LOCK_FLAGS) $(2) --output-file requirements/$$name.txt requirements/$$name.in || exit; \
done && \
$(abspath $(BIN))/pip-compile $(LOCK_FLAGS) $(2) --output-file requirements/clients.txt pyproject.toml requirements/clients.in
endef

.PHONY: lock
lock: $(VENV)/.test ## resolve the dependencies anew
	$(call compile-locks,.,--upgrade)

# Where the service installs without a compiler: versions of Python, and systems by the tags of their wheels.
PYTHONS := 3.11 3.12 3.13 3.14
SYSTEMS := manylinux@x86_64 manylinux@aarch64 macosx@arm64
TAGS_manylinux := manylinux_2_17 manylinux_2_27 manylinux_2_28
TAGS_macosx := macosx_14_0

# The lock of the core, for version $(1) and system $(2), whose tags are $(3). pip judges markers by the version of Python
# that it runs on, so the packages that only older versions need are left out here.
define ask-for-wheels
@awk -v minor=$(lastword $(subst ., ,$(1))) '/^[a-z]/ { older = split($$0, part, "python_version < \"3[.]") > 1 && part[2] + 0 <= minor } !older' \
	requirements/core.txt > build/wheels-$(1).txt
$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --target build/wheels --no-deps --require-hashes \
	--only-binary=:all: --implementation cp --python-version $(1) $(3:%=--platform %_$(lastword $(subst @, ,$(2)))) \
	-r build/wheels-$(1).txt

endef

.PHONY: wheels-check
wheels-check: $(VENV)/.test ## fail where a package of the core has no wheel for a version of Python on a system
	@mkdir -p build
	$(foreach version,$(PYTHONS),$(foreach system,$(SYSTEMS),$(call ask-for-wheels,$(version),$(system),$(TAGS_$(firstword $(subst @, ,$(system)))))))

# pip-compile writes === where it resolves, and == where it finds resolved.
.PHONY: lock-check
lock-check: $(VENV)/.test wheels-check ## fail where a lock is not what its requirements say, or a package of the core has no wheel
	@rm -rf build/locks && mkdir -p build/locks && cp -r pyproject.toml README.md LICENSE NOTICE service requirements build/locks
	@$(call compile-locks,build/locks)
	@diff -r -I '^torch==' requirements build/locks/requirements

LOCK_FLAGS := --quiet --generate-hashes --allow-unsafe --strip-extras --no-header --no-emit-index-url \
	--no-emit-trusted-host --no-emit-find-links --no-emit-options

.PHONY: release-check
release-check: lock-check $(VENV)/.test install-deploy ## what is to hold before a release, which it leaves in dist
	@BIN=$(BIN) DEPLOY_BIN=$(DEPLOY_BIN) VERSION=$(VERSION) deploy/release-check

.PHONY: docs
docs: install-docs ## the documentation as a site, in build/site; fails for a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict

.PHONY: clean
clean: ## remove environments and caches
	rm -rf $(VENV) .venv-3.* $(TORCH_VENV) $(DEPLOY_VENV) $(DOCS_VENV) $(CLIENTS_VENV) $(RAY_VENV) $(NODE)/node_modules tests/page/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage build dist
