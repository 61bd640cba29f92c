# `make demo` and `make test` set up everything that they need: on Debian as root, system packages too.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
MODELS := .cache/models
SMOLLM2 := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA := $(MODELS)/gemma-3-270m-q4_k_m.gguf
# of python -m bench: make bench BENCH_FLAGS=--quick
BENCH_FLAGS :=
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

export PIP_ROOT_USER_ACTION := ignore

# $(call need,PACKAGES,TEST): where TEST fails, install Debian packages as root, else say what to install.
define need
if ! { $(2); } >/dev/null 2>&1; then \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing $(1)"; \
		apt-get -qq update; \
		DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install $(1) >/dev/null; \
	else \
		echo "error: please install $(1), for example: sudo apt-get install $(1)" >&2; exit 1; \
	fi; \
fi
endef

.PHONY: help demo test lint format bench shaders models system clean always

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/.installed $(SMOLLM2) ## set everything up and load a real model (98 MB)
	@$(BIN)/ggufstream load --log-format console $(SMOLLM2)

test: system $(VENV)/.dev $(SMOLLM2) $(GEMMA) lint ## set everything up, then lint, type-check and test
	@$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal

lint: $(VENV)/.dev ## ruff, mypy and the import rule
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict -p ggufstream
	@$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev ## let ruff format and fix what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: system $(VENV)/.bench $(GEMMA) ## compare with the hardware's limit and other loaders (BENCH_FLAGS=--quick: 2 min)
	@$(call need,fio,command -v fio)
	@$(BIN)/python -m bench $(BENCH_FLAGS)
	@$(BIN)/pytest bench --timeout=0 --benchmark-columns=median,iqr,rounds --benchmark-max-time=0.5

shaders: ## compile the compute shaders (needs glslc)
	@$(call need,glslc,command -v glslc)
	@$(PYTHON) backends/vulkan/shaders/build.py

models: $(SMOLLM2) $(GEMMA) ## fetch both models (345 MB)

clean: ## remove what make has made, the models excepted
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# Vulkan on the processor (Mesa's llvmpipe), the loader, the validation layer, the shader compiler; a browser for pages.
system:
	@$(call need,libvulkan1 mesa-vulkan-drivers vulkan-validationlayers vulkan-tools glslc, \
		command -v glslc && command -v vulkaninfo \
		&& ls /usr/share/vulkan/icd.d/lvp_icd*.json \
		&& ls /usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json)
	@$(call need,chromium,command -v chromium)

$(BIN)/python:
	@$(call need,python3-venv,$(PYTHON) -c 'import ensurepip; import venv')
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is older than 3.11; give another with PYTHON=" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade 'pip>=25.1'

# The list of modules: an editable install in strict mode links each file from build/, so a new file needs a new install,
# and so does a build/ that somebody has removed.
$(VENV)/.modules: always $(BIN)/python
	@{ find pipeline backends -name '*.py' -o -name '*.html' -o -path '*/shaders/*'; } | sort | cmp -s - $@ \
		|| { find pipeline backends -name '*.py' -o -name '*.html' -o -path '*/shaders/*'; } | sort >$@
	@$(BIN)/python -c 'import ggufstream.cli' 2>/dev/null || touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.modules
	@echo "installing ggufstream"
	@rm -rf build
	@$(PIP) install --editable '.[all]'
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@$(PIP) install --group dev
	@touch $@

# Other loaders, and PyTorch for them: some gigabytes.
$(VENV)/.bench: $(VENV)/.dev
	@$(PIP) install --group bench
	@touch $@

# Order-only: a new Python environment is no reason to fetch a model again.
$(SMOLLM2): | $(BIN)/python
	@$(BIN)/python examples/fetch_model.py smollm2 --into $(MODELS)

$(GEMMA): | $(BIN)/python
	@$(BIN)/python examples/fetch_model.py gemma3 --into $(MODELS)
