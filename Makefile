# All packages are installed in .venv of this clone. Override variables with e.g. `make run PYTHON=python3.12 ARGS="--log-level debug"`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check
# PyTorch is pinned. On Linux its default build carries CUDA; TORCH_ARGS takes pip's options for a CPU-only index.
TORCH  := torch==2.13.0
TORCH_ARGS ?=
CONFIG ?= sluice.yaml
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help run test test-fast test-env lint format bench gpu-check clients clean check audit lock sbom pin-images

help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; this is %d.%d. Try: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV) || { echo "The venv module is missing: on Debian or Ubuntu, apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

$(VENV)/.torch: | $(BIN)/python
	@echo "Installing PyTorch (once)…"
	@$(PIP) install --quiet $(TORCH_ARGS) $(TORCH)
	@touch $@

$(VENV)/.run: pyproject.toml | $(VENV)/.torch
	@echo "Installing Sluice…"
	@$(PIP) install --quiet --editable '.[embedded,replay]'
	@touch $@

# After .run, not in parallel (make -j): two pips at once break an environment.
$(VENV)/.test: pyproject.toml scripts/test-env | $(VENV)/.run
	@PIP='$(PIP)' sh scripts/test-env
	@touch $@

# Keys are required when SLUICE_ADMIN_KEY is set; without it the gateway serves this machine only, without keys.
run: export SLUICE_AUTH__ENABLED ?= $(if $(SLUICE_ADMIN_KEY),true,false)
run: $(VENV)/.run ## Start the gateway on 127.0.0.1:8000 with the demo model
	@exec $(BIN)/sluice serve --config $(CONFIG) $(ARGS)

test-env: $(VENV)/.test ## Install everything that the tests need

test: $(VENV)/.test ## Run the whole suite: linters, types, import rules, tests
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/test $(ARGS)

test-fast: $(VENV)/.test ## Only the tests without processes, engines and servers: a minute on two cores
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/test --fast $(ARGS)

check: test ## The same as test: what CI runs

lint: $(VENV)/.test ## Linters, types and import rules only
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/check

format: $(VENV)/.test ## Format the code
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

bench: $(VENV)/.test ## Run the benchmarks (minutes)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/bench

# Without .venv, $(PYTHON) must have PyTorch: nothing is installed, so no network is needed.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-check: ## Check and measure the engine on a GPU, in 10 minutes; ARGS=--dry on the CPU
	@$(GPU_PYTHON) -m benchmarks.gpu_check $(ARGS)

# A separate environment: the clients need other versions of packages that the tests use. Node is optional.
clients: ## Let other projects' clients run loops of tools against a gateway; needs a network
	@$(PYTHON) -m venv .venv-clients
	@.venv-clients/bin/pip --disable-pip-version-check install --quiet $(TORCH_ARGS) $(TORCH) uv
	@VIRTUAL_ENV=.venv-clients .venv-clients/bin/uv pip install --quiet --editable '.[clients,embedded]'
	@if command -v npm > /dev/null; then npm install --silent --prefix tests/clients/node; fi
	@.venv-clients/bin/python -m pytest -n0 -q -rs tests/clients $(ARGS)

audit: $(VENV)/.test ## Known vulnerabilities of the dependencies; needs a network and pip-audit
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/audit

lock: $(VENV)/.test ## Write constraints/ from the versions in .venv; needs a network
	@$(PIP) install --quiet uv
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/lock

sbom: $(VENV)/.run ## Write sbom.json: what an installed gateway consists of, in CycloneDX; ARGS: other extras
	@$(BIN)/python scripts/sbom $(or $(ARGS),embedded replay) > sbom.json && echo sbom.json

pin-images: ## Write deploy/docker/pinned.env: the base images by digest; needs docker and the registry
	@sh deploy/docker/pin-images > deploy/docker/pinned.env && echo deploy/docker/pinned.env

clean: ## Remove the environment and what was built
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis state
