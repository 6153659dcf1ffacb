# Everything starts from nothing but Python 3.11 or newer, a C++ compiler and this folder; `make` lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
VENV_MIN ?= .venv-min
# Processes for the tests; each one computes with a single thread.
TEST_JOBS ?= 2
# A file's tests stay on one process: what they share is dear to make.
BY_FILE := --dist loadfile --no-loadscope-reorder

# What `make report` draws from, run folders or folders of them, and where to.
RECORDS ?= runs
REPORT ?= runs/report

# Threads that wait without sleeping make every other process on the machine slow.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

STARTED := $(shell date +%s)
SOURCES := setup.cfg pyproject.toml constraints.txt constraints-min.txt
KEY := $(shell cat $(SOURCES) | cksum | cut -d ' ' -f 1)
STAMP := $(VENV)/.ready-$(KEY)
STAMP_MIN := $(VENV_MIN)/.ready-$(KEY)
RUN := $(VENV)/bin/python

# The tests that must also pass on the oldest supported transformers. There shapes in signatures are checked, which takes
# half as long again, so what computes with shapes is among them.
OLDEST := $(addprefix tests/test_,$(addsuffix .py,cache models decode batch decode_types custom_generate \
  contrast verify sampling drafters scorers replay eagle3_head dual_input_head unroll))

.PHONY: help setup test test-newest test-oldest quality demo cross-alpha certify identity speed decoders auto head head-300k contrast \
  report clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-14s %s\n", $$1, $$2 }'

setup: $(STAMP) ## virtual environment with the tested versions

# A stamp is named after the contents of what it depends on: new contents, new stamp, new installation.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is not Python 3.11 or newer; say which to use: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 2; }
	@echo "--- install: budget 2 min"
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -c constraints.txt torch
	$(RUN) -m pip install -c constraints.txt -e '.[dev]'
	touch $@
	@echo "--- install: took $$(( $$(date +%s) - $(STARTED) )) s"

# Shares the packages of the first environment (a path after its own), and has its own transformers.
$(STAMP_MIN): $(STAMP)
	rm -rf $(VENV_MIN)
	$(RUN) -m venv $(VENV_MIN)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(VENV_MIN)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/newest.pth"
	$(VENV_MIN)/bin/python -m pip install -c constraints-min.txt transformers huggingface_hub
	$(VENV_MIN)/bin/python -m pip install --no-deps -e .
	touch $@

test: test-newest test-oldest ## all tests, then shapes, models and generation on the oldest supported transformers

test-newest: $(STAMP)
	DCD_SHAPES=0 $(RUN) -m pytest -q -n $(TEST_JOBS) $(BY_FILE)

test-oldest: $(STAMP_MIN)
	$(VENV_MIN)/bin/python -c 'import transformers; print("transformers", transformers.__version__)'
	$(VENV_MIN)/bin/python -m pytest -q -n $(TEST_JOBS) $(BY_FILE) $(OLDEST)

quality: $(STAMP) ## ruff, and which room may import which
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pytest -q tests/test_layout.py -k "not runs_from_any_folder"

demo: $(STAMP) ## the whole of it on a small real pair, up to runs/demo/report/index.html
	$(RUN) data_prep/pipeline.py --pipeline configs/pipelines/demo.yaml --started $(STARTED)

cross-alpha: $(STAMP) ## should the drafter know about the contrast? the whole experiment on a toy pair (about 3 min)
	$(RUN) data_prep/pipeline.py --pipeline configs/pipelines/cross_alpha_toy.yaml

# These start from a finished demo and leave their results in a folder of their own beside it.
certify: demo ## is decoding lossless, and would the tests have seen it if it were not? one page (about an hour)
	$(RUN) data_prep/pipeline.py --pipeline configs/pipelines/certify.yaml

identity: demo ## does every method write vanilla contrastive decoding's very text? (about 80 min)
	$(RUN) data_prep/pipeline.py --pipeline configs/pipelines/identity.yaml

speed: demo ## speed-up table of the demo's pair in bf16, greedy and sampled (about 25 min on an idle machine)
	$(RUN) data_prep/pipeline.py --pipeline configs/pipelines/speed.yaml

decoders: demo ## every decoder on the demo's pair: trees, hybrid, deferred, batches, overhead (about 80 min, idle)
	$(RUN) data_prep/pipeline.py --pipeline configs/pipelines/decoders.yaml

auto: demo ## is method auto ever slower than vanilla contrastive decoding? by kind of prompt and batch (about 80 min, idle)
	$(RUN) data_prep/pipeline.py --pipeline configs/pipelines/auto.yaml

head: demo ## the best head of one night, and its accepted length on the way (up to 6 hours, resumable)
	$(RUN) data_prep/pipeline.py --pipeline configs/pipelines/head.yaml

head-300k: demo ## a head trained on 300 k tokens, and its accepted length on the way (about 60 min)
	$(RUN) data_prep/pipeline.py --pipeline configs/pipelines/head_300k.yaml

contrast: demo ## should the drafter know about the contrast? the experiment on the demo's pair (hours)
	$(RUN) data_prep/pipeline.py --pipeline configs/pipelines/contrast.yaml

# Redrawn from what is there: nothing is run again, whatever has changed since.
report: $(STAMP) ## redraw one page from the records of finished runs: RECORDS="folder ..." REPORT=folder (a minute)
	@$(RUN) diagnostics/report.py --records $(RECORDS) --output $(REPORT)

clean: ## remove the environments and caches of tools; runs/ stays
	rm -rf $(VENV) $(VENV_MIN) *.egg-info build .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
