# `make` alone lists the targets.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3.11
LOCK := tools/environment/cpu-py311.lock
VENV := .venv
DONE := $(VENV)/.installed
VERIFIERS := tools/environment/verifiers.lock
VERIFIERS_DONE := $(VENV)/verifiers/.installed
CONTAINER := launch/container/gpu-py312.lock
ENGINE_DONE := $(VENV)/transformer-engine/.installed
SOURCES := tools/environment/gpu-sources.lock
SOURCES_DONE := $(VENV)/gpu-sources/.installed
TRACKERS := tools/environment/trackers.lock
TRACKERS_DONE := $(VENV)/trackers/.installed
OCR := tools/environment/ocr.lock
OCR_DONE := $(VENV)/ocr/.installed
DOCS := tools/environment/docs.lock
DOCS_DONE := $(VENV)/docs/.installed
RUN := $(VENV)/bin/python
GPU_PYTHON ?= python
SLOWEST := --durations=10
# Assign files to processes in the order of collection. By default, files with few tests run last, and some of these
# tests take a minute, during which the other processes would be idle.
BY_FILE := --dist=loadfile --no-loadscope-reorder
# Runs one of 16 parts of the tests. Which one depends on the day (UTC) on which HEAD was committed.
TODAY = $(shell expr $$(git show --no-patch --format=%ct) / 86400 % 16)/16
SHARE = $(addprefix --part=,$(PART:today=$(TODAY)))
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary=:all:
CLUSTER_PACKAGES := tools/environment/system.sh ip:iproute2 unshare:util-linux ps:procps munged:munge \
	slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client
# Lower the priority of compute-bound tests, because the runs that other tests start at the same time have deadlines.
BEHIND := nice -n 10

.PHONY: help env quickstart test test-all test-runs test-ranks test-units test-fast test-learn test-exhaustive exhaustive-runs \
	exhaustive-ranks test-sandbox test-cluster test-browser test-gpu soak resolve-gpu docs lint types clean

help:
	@echo "make env         build $(VENV) from $(LOCK) (a second call builds nothing)"
	@echo "make quickstart  train SmolLM2-135M with GRPO on this machine's CPU"
	@echo "make test        lint, then test-runs, test-ranks and test-units in parallel (15 minutes on 2 cores)"
	@echo "make test-all    all tests that need no GPU and have not passed yet, for a clean tree; writes .ci/verified"
	@echo "make test-runs   end-to-end runs, which start Ray and engines"
	@echo "make test-ranks  distributed tests in one process tree"
	@echo "make test-units  unit tests"
	@echo "make test-fast   fast unit tests, for the inner loop (3 minutes)"
	@echo "make test-learn  the quickstart, all estimators and all objectives improve the reward (15 minutes);"
	@echo "                 RECORD=1 writes the results into the documentation"
	@echo "make test-exhaustive  layouts of up to 1,024 ranks, refits of all families, more end-to-end runs (an hour or more)"
	@echo "                 for test-learn and test-exhaustive, PART=0/8 runs every eighth test,"
	@echo "                 starting with the first, and PART=today runs the same sixteenth as .ci/run"
	@echo "make test-sandbox  escape attempts from bubblewrap sandboxes; installs bubblewrap (1 minute)"
	@echo "make test-cluster  multi-node runs in network namespaces, and Slurm jobs; installs packages (15 minutes)"
	@echo "make test-browser  report pages in Chromium; installs it (1 minute)"
	@echo "make soak        more cluster tests: lost nodes, and jobs with 20 and 51 seeded faults (over an hour)"
	@echo "make resolve-gpu  check that pip can resolve the packages of the H100 container (1 minute)"
	@echo "make test-gpu    tests for one, two and eight GPUs, limited to the available ones; fails without a GPU"
	@echo "make docs        build the documentation site in build/docs, with all links checked (1 minute)"
	@echo "make lint        ruff and shellcheck"
	@echo "make types       pyright in standard mode on megarl/ (2 minutes)"

env: $(DONE)

$(DONE): $(LOCK) pyproject.toml tools/environment/build.sh
	tools/environment/build.sh $(PYTHON) $(VENV) $(LOCK)
	@touch $(DONE)

quickstart: $(DONE)
	$(VENV)/bin/megarl train configs/quickstart.yaml

# Run the three parts in parallel, because many of their tests only wait for processes or timeouts.
# Compile megarl first, because hundreds of processes would each do so if PYTHONDONTWRITEBYTECODE is set.
test: lint
	@$(RUN) -m compileall -q megarl
	@$(MAKE) --no-print-directory --jobs=3 test-runs test-ranks test-units

# Each part that passes writes its line to .ci/verified. .ci/run then skips the part until its paths change. Commit that
# file.
test-all:
	@.ci/run all

test-runs: $(DONE)
	@$(RUN) -m pytest tests/e2e -m "not learn and not exhaustive" $(SLOWEST) | sed --unbuffered 's/^/runs | /'

test-ranks: $(DONE) $(ENGINE_DONE)
	@$(BEHIND) $(RUN) -m pytest tests/distributed -m "not exhaustive" $(SLOWEST) | sed --unbuffered 's/^/ranks | /'

test-units: $(DONE) $(ENGINE_DONE) $(SOURCES_DONE) $(VERIFIERS_DONE) $(TRACKERS_DONE) $(OCR_DONE)
	@$(BEHIND) $(RUN) -m pytest tests/unit tests/gpu -m "not exhaustive" --numprocesses=2 $(BY_FILE) $(SLOWEST) | sed --unbuffered 's/^/units | /'

test-fast: $(DONE) $(ENGINE_DONE) $(SOURCES_DONE) $(VERIFIERS_DONE) $(TRACKERS_DONE) $(OCR_DONE)
	$(RUN) -m pytest tests/unit -m "not slow and not exhaustive" --numprocesses=2 $(BY_FILE) $(SLOWEST)

test-learn: $(DONE) $(VERIFIERS_DONE) $(OCR_DONE)
	@$(RUN) -m pytest tests/e2e -m learn $(SLOWEST) $(SHARE) $(if $(RECORD),--record) | sed --unbuffered 's/^/learn | /'

# These targets run in parallel with --jobs=2.
test-exhaustive: exhaustive-runs exhaustive-ranks

exhaustive-runs: $(DONE)
	@$(RUN) -m pytest tests/e2e -m exhaustive $(SLOWEST) $(SHARE) | sed --unbuffered 's/^/runs | /'

exhaustive-ranks: $(DONE)
	@$(BEHIND) $(RUN) -m pytest --ignore=tests/e2e --ignore=tests/cluster --ignore=tests/sandbox --ignore=tests/browser -m exhaustive $(SLOWEST) $(SHARE) | sed --unbuffered 's/^/ranks | /'

# Transformer Engine's Python sources (1 MB), without the compiled part, which has no wheel. They are kept out of the
# environment, because Megatron would take them for a complete installation.
$(ENGINE_DONE): $(DONE) $(CONTAINER)
	rm -rf $(VENV)/transformer-engine
	$(PIP) --target $(VENV)/transformer-engine --requirement <(grep '^transformer-engine==' $(CONTAINER))
	@touch $(ENGINE_DONE)

# The Python files of vLLM's GPU wheels (60 MB), without the compiled parts. This downloads 660 MB.
$(SOURCES_DONE): $(DONE) $(SOURCES) tools/environment/sources.py
	rm -rf $(VENV)/gpu-sources
	$(RUN) tools/environment/sources.py $(SOURCES) $(VENV)/gpu-sources
	@touch $(SOURCES_DONE)

# verifiers has its own environment, because it needs other package versions than vLLM. pip compiles bytecode, because
# each verifiers process imports 3,000 files.
$(VERIFIERS_DONE): $(DONE) $(VERIFIERS)
	rm -rf $(VENV)/verifiers
	$(PIP) --target $(VENV)/verifiers --requirement $(VERIFIERS)
	@touch $(VERIFIERS_DONE)

# Experiment trackers (150 MB) are kept out of the environment, because runs must work without them.
$(TRACKERS_DONE): $(DONE) $(TRACKERS)
	rm -rf $(VENV)/trackers
	$(PIP) --target $(VENV)/trackers --requirement $(TRACKERS)
	@touch $(TRACKERS_DONE)

# The OCR model and its runtime (90 MB) are kept out of the environment, because only ocr_exact needs them.
$(OCR_DONE): $(DONE) $(OCR)
	rm -rf $(VENV)/ocr
	$(PIP) --target $(VENV)/ocr --requirement $(OCR)
	@touch $(OCR_DONE)

# MkDocs (60 MB) is kept out of the environment, because nothing else needs it.
$(DOCS_DONE): $(DONE) $(DOCS)
	rm -rf $(VENV)/docs
	$(PIP) --target $(VENV)/docs --requirement $(DOCS)
	@touch $(DOCS_DONE)

docs: $(DOCS_DONE)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(VENV)/docs $(RUN) -m mkdocs build --strict --quiet

# Fails if bubblewrap is neither installed nor installable. As root, it also tests sandboxes of an ordinary user.
test-sandbox: $(DONE)
	tools/environment/system.sh bwrap:bubblewrap setpriv:util-linux
	@$(RUN) -m pytest tests/sandbox --numprocesses=2 $(SLOWEST) | sed --unbuffered 's/^/sandbox | /'

# Emulates the machines of a cluster with namespaces and runs Slurm, which requires root. Test files run in parallel,
# because each has its own machines and mostly waits.
test-cluster: $(DONE)
	$(CLUSTER_PACKAGES)
	@$(RUN) -m pytest tests/cluster -m "not exhaustive" --numprocesses=2 $(BY_FILE) --timeout=1500 $(SLOWEST) | sed --unbuffered 's/^/cluster | /'

# Tests pages in a browser. Requires root if Chromium is not installed. SCREENSHOTS=FOLDER saves screenshots.
test-browser: $(DONE)
	tools/environment/system.sh chromium:chromium
	@$(BEHIND) $(RUN) -m pytest tests/browser $(SLOWEST) | sed --unbuffered 's/^/browser | /'

# Tests the loss of nodes, and jobs with 20 and 51 seeded faults. Run it after changes to fault tolerance.
soak: $(DONE)
	$(CLUSTER_PACKAGES)
	@$(RUN) -m pytest tests/cluster -m exhaustive --capture=no

# Resolves the packages of the H100 container for its Python version, without installing them.
resolve-gpu: $(DONE)
	@$(RUN) tools/environment/resolve.py

# For machines with GPUs. GPU_PYTHON is the Python of an environment as in launch/container.
test-gpu:
	@$(GPU_PYTHON) -c 'import sys, torch; found = torch.cuda.device_count(); sys.exit(None if found else "torch finds no GPU")'
	$(GPU_PYTHON) -m pytest tests/gpu --timeout=1800 -rs $(SLOWEST)

lint: $(DONE)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/shellcheck .ci/run tools/environment/*.sh tools/gpu/*.sh launch/*.sbatch

types: $(DONE)
	$(VENV)/bin/pyright

clean:
	rm -rf $(VENV) runs
