# Everything from a bare machine to a trained model: `make help` lists the targets.
#
# PYTHON           the interpreter of the environment, 3.12; unset: the first that runs, from PATH, pyenv or uv
# LOCK             the lock that is installed: cpu, or cu130 for CUDA 13.0
# TORCH_INDEX      package index that torch comes from, to choose its build
# TORCH_CPU_INDEX  package index of torch's CPU wheels: tried first on a machine without a GPU if TORCH_INDEX is unset
# VENV             where the environment lies

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# pyenv puts programs on PATH that run only where their version is selected, so every candidate has to show that it runs.
ifndef PYTHON
PYTHON := $(shell { for each in python3.12 python3 "$$(pyenv prefix 3.12)/bin/python3.12" "$$(uv python find --system 3.12)"; do \
  "$$each" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' && echo "$$each" && break; done; } 2> /dev/null)
endif
LOCK ?= cpu
TORCH_INDEX ?=
VENV ?= .venv

BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --quiet
STAMP := $(VENV)/.installed-$(LOCK)
OTHER_STAMPS = $(filter-out $(STAMP),$(wildcard $(VENV)/.installed-*))
LIBRARY := slimx/_lib/libslimx_cpu.so
SITE := $(VENV)/.site
REQUIREMENTS := requirements/$(LOCK).txt
INSTALL := slimx/extras/install/packages.py

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
	  printf '  make %-12s %s\n' "$$name" "$$text"; done

.PHONY: venv
venv: $(STAMP) ## create .venv with every package of the lock

# What is installed, in which order and why: $(INSTALL), which `slimx setup` runs too.
$(STAMP): $(REQUIREMENTS) requirements/cpu-cuda.txt $(INSTALL) setup.py pyproject.toml
	@$(if $(PYTHON),,echo "slimx needs Python 3.12, and neither PATH, pyenv nor uv has one that runs: install it (pyenv install 3.12, or uv python install 3.12), or name one: make PYTHON=/path/to/python3.12"; exit 1)
	@$(PYTHON) -c 'import sys; v = sys.version_info; v[:2] == (3, 12) or sys.exit("slimx needs Python 3.12, $(PYTHON) is %d.%d: make PYTHON=/path/to/python3.12" % v[:2])'
	@$(PYTHON) -c 'import ensurepip' 2> /dev/null || { echo "$(PYTHON) cannot make environments: apt-get install python3.12-venv"; exit 1; }
	@set -- $${CXX:-g++}; command -v "$$1" > /dev/null || { echo "slimx needs a C++17 compiler: apt-get install g++, or name one in CXX"; exit 1; }
	@echo "venv: installing $(REQUIREMENTS) into $(VENV): about 2 minutes and 3 GB, 7 GB where torch is a CUDA build"
	@$(PYTHON) -m venv $(if $(OTHER_STAMPS)$(if $(wildcard $(VENV)/lib/python3.12),,another Python),--clear) $(VENV)
	@$(BIN)/python $(INSTALL) --lock $(LOCK) --file $(REQUIREMENTS) --torch-index "$(TORCH_INDEX)" \
	  $(if $(filter undefined,$(origin TORCH_CPU_INDEX)),,--torch-cpu-index "$(TORCH_CPU_INDEX)")
	@touch $@

.PHONY: build
build: $(LIBRARY) ## compile csrc/ into slimx/_lib and install slimx itself, editable

$(LIBRARY): $(STAMP) setup.py pyproject.toml $(wildcard csrc/*)
	@echo "build: compiling csrc/ and installing slimx: about 20 seconds, a minute where nvcc is"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m tools.gpu.library --stamp
	@touch $@

.PHONY: quickstart
quickstart: $(LIBRARY) ## train a tiny MoE by GRPO on this machine: runs/quickstart/report.html
	@rm -rf runs/quickstart-data runs/quickstart-sft runs/quickstart
	$(BIN)/slimx quickstart

# These run on the CPU whatever the machine has, so that they show the same everywhere.
.PHONY: pictures
pictures: export CUDA_VISIBLE_DEVICES =
pictures: $(LIBRARY) ## train a tiny vision-language model by GRPO to read digits: runs/pictures/report.html
	@rm -rf runs/pictures-data runs/pictures-sft runs/pictures
	$(BIN)/python -m examples.pictures.make --out runs/pictures-data
	$(BIN)/slimx train examples/pictures/sft.yaml
	$(BIN)/slimx train examples/pictures/grpo.yaml
	$(BIN)/slimx report runs/pictures-sft runs/pictures --out runs/pictures/report.html --title "slimx pictures"

.PHONY: screens
screens: export CUDA_VISIBLE_DEVICES =
screens: $(LIBRARY) ## train a tiny agent in three stages to use a drawn phone: runs/screens/report.html
	@rm -rf runs/screens-data runs/screens-sft runs/screens-actions runs/screens
	$(BIN)/python -m examples.screens.make --out runs/screens-data
	$(BIN)/slimx train examples/screens/sft.yaml
	$(BIN)/slimx train examples/screens/actions.yaml
	$(BIN)/slimx train examples/screens/tasks.yaml
	$(BIN)/slimx report runs/screens-sft runs/screens-actions runs/screens --out runs/screens/report.html --title "slimx screens"

# Byte code is kept even where the environment says not to: a run starts a dozen processes that import the same modules.
test test-all test-changed: export PYTHONDONTWRITEBYTECODE =

# Their Python alone, outside what the environment imports: what they compute needs a GPU.
ENGINE := $(VENV)/transformer-engine
DEEP_EP := $(VENV)/deep-ep
$(ENGINE) $(DEEP_EP): PACKAGE = $(if $(filter $(ENGINE),$@),transformer-engine,sgl-deep-ep)
$(ENGINE) $(DEEP_EP): $(STAMP) requirements/cu130.txt
	@grep '^$(PACKAGE)==' requirements/cu130.txt > $(VENV)/package-$(@F).txt
	@$(PIP) --no-deps --require-hashes --upgrade --target $@ -r $(VENV)/package-$(@F).txt
	@touch $@

# docs/suite.md explains rings, parts, order and results.
RINGS := $(BIN)/python -m tools.rings

.PHONY: test
test: $(LIBRARY) $(ENGINE) lint ## lint, then all tests that are not slow: ring one (SEED: an order again)
	@$(RINGS) test $(if $(SEED),--seed $(SEED))

.PHONY: test-all
test-all: $(LIBRARY) $(ENGINE) $(DEEP_EP) lint ## the same and the tests marked slow: ring two (PART=3/10: a tenth; SEED)
	@$(RINGS) all $(if $(PART),--part '$(PART)') $(if $(SEED),--seed $(SEED))

.PHONY: test-record
test-record: $(LIBRARY) ## carry the results of both into docs/suite.md
	@$(RINGS) record

.PHONY: test-changed
test-changed: $(LIBRARY) $(SITE) ## tests that this change can reach, slow ones too (BASE=HEAD; ARGS=-x; LIST=1: print them)
	$(BIN)/python -m tools.changed $(if $(BASE),--base $(BASE)) $(if $(LIST),--list) -- -rfEs $(ARGS)

.PHONY: lint
lint: $(LIBRARY) $(SITE) ## style of Python and C++, types, words, and import contracts
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m tools.words
	$(BIN)/lint-imports --no-logo
	$(BIN)/clang-format --dry-run -Werror csrc/*

$(SITE): $(STAMP) requirements/docs.txt
	@$(PIP) --no-deps --require-hashes -r requirements/docs.txt
	@touch $@

# The address of the repository is for links that leave docs/; without one, they lead to copies on the site.
.PHONY: docs
docs: export NO_MKDOCS_2_WARNING = 1
docs: export REPOSITORY ?=
docs: $(SITE) ## the site of docs/ with search: build/site/index.html (REPOSITORY=https://...)
	$(BIN)/python -m mkdocs build --strict --quiet

.PHONY: bench
bench: $(LIBRARY) ## where the time of a step goes, and the parts driven bare beside it
	$(BIN)/python benchmarks/loop.py

# bubblewrap encloses the sandbox; chromium draws the report in a test; shellcheck reads scripts/launch, and Slurm with
# munge runs it.
.PHONY: ci-deps
ci-deps: ## Debian packages that tests use (as root)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap chromium \
	  fish munge shellcheck slurm-client slurmctld slurmd zsh

UV := uv==0.13.9

# After a change of versions; the index of packages is that of UV_DEFAULT_INDEX.
.PHONY: locks
locks: ## write the hashes of the pins in requirements/
	@$(PYTHON) -m venv build/locks
	@PIP_DISABLE_PIP_VERSION_CHECK=1 build/locks/bin/python -m pip install --quiet $(UV) packaging
	@sed 's/ --hash.*//' requirements/cu130.txt requirements/docs.txt | build/locks/bin/uv pip compile --quiet --no-deps --universal \
	  --python-version 3.12 --format pylock.toml --output-file build/pylock.toml - > build/locks/log
	@build/locks/bin/python -m tools.locks build/pylock.toml

# Their packages do not fit the lock, so the servers of tests marked slow run in environments of their own. Later releases
# of nemo-gym want a newer Python than the lock's; verifiers starts its agents' programs by uv. uv also resolves them, in
# seconds where pip looked for versions of verifiers' packages for more than an hour. It has the index of packages from
# UV_DEFAULT_INDEX, not from pip's settings. Byte code is made here: these servers are many short-lived programs.
HUBS := openenv-core==0.3.0 nemo-gym==0.4.0 verifiers==0.4.0,$(UV)
.PHONY: hubs
hubs: ## environments of OpenEnv, NeMo Gym and verifiers, build/hubs, for `make test-all`
	@$(PYTHON) -m venv build/hubs/uv
	@PIP_DISABLE_PIP_VERSION_CHECK=1 build/hubs/uv/bin/python -m pip install --quiet $(UV)
	@for packages in $(HUBS); do place=build/hubs/$${packages%%==*}; echo "hubs: installing $$packages into $$place"; \
	  build/hubs/uv/bin/uv venv --quiet --allow-existing --python $(PYTHON) "$$place"; \
	  build/hubs/uv/bin/uv pip install --quiet --compile-bytecode --python "$$place/bin/python" $${packages//,/ }; done

# The GPU's machine needs an interpreter with torch and pytest, not the rest of slimx: tools/gpu/check.py.
.PHONY: gpu
gpu: ## build, test and measure kernels and trainer on this machine's GPU (PYTHON; QUICK=1: 2 minutes; DRY=1: no GPU)
	$(if $(filter command environment,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON))) \
	  -m tools.gpu.check --out "$${OUT:-build/gpu}" $(if $(QUICK),--quick) $(if $(DRY),--dry-run)

# A trainer and an SGLang server on the same GPU: tools/gpu/loop.py.
.PHONY: gpu-loop
gpu-loop: ## train, publish and sample on this machine's GPU, step by step: build/gpu-loop/loop/loop.md (PYTHON, OUT)
	$(if $(filter command environment,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON))) \
	  -m tools.gpu.check --loop --out "$${OUT:-build/gpu-loop}"

.PHONY: first-hour
first-hour: $(LIBRARY) ## everything that a node of 8 GPUs must show, one table (MODEL: directory of Qwen3-30B-A3B)
	$(BIN)/python -m tools.first_hour.check $(if $(MODEL),--model $(MODEL)) --out "$${OUT:-runs/first-hour}"

# For a GPU machine without a network: carry build/gpu-wheels along. GPU_PYTHON is the version of its interpreter.
.PHONY: gpu-wheels
gpu-wheels: $(STAMP) ## collect into build/gpu-wheels what trainer and engine need there (GPU_PYTHON=3.12)
	$(BIN)/python -m tools.gpu.wheels --python "$${GPU_PYTHON:-3.12}"

.PHONY: clean
clean: ## remove what was built; .venv and runs/ stay
	rm -rf build dist slimx/_lib *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find slimx tools tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
