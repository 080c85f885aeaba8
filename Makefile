# `make` alone lists the targets.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3.11
LOCK := tools/environment/cpu-py311.lock
NEWEST := tools/environment/newest-megatron.lock
VENV := .venv
DONE := $(VENV)/.installed
NEWEST_DONE := $(VENV)/newest/.installed
VERIFIERS := tools/environment/verifiers.lock
VERIFIERS_DONE := $(VENV)/verifiers/.installed
CONTAINER := launch/container/gpu-py312.lock
ENGINE_DONE := $(VENV)/transformer-engine/.installed
TRACKERS := tools/environment/trackers.lock
TRACKERS_DONE := $(VENV)/trackers/.installed
RUN := $(VENV)/bin/python
GPU_PYTHON ?= python
SLOWEST := --durations=10
# What computes yields to whole runs beside it, which have deadlines.
BEHIND := nice -n 10

.PHONY: help env quickstart test test-all test-runs test-ranks test-fast test-learn test-exhaustive exhaustive-runs \
	exhaustive-ranks test-newest test-sandbox test-cluster test-browser test-gpu soak resolve-gpu lint clean

help:
	@echo "make env         build $(VENV) from $(LOCK) (a second call builds nothing)"
	@echo "make quickstart  train SmolLM2-135M with GRPO on this machine's CPU"
	@echo "make test        everything but the ones below and what needs a GPU (about 15 minutes on 2 cores)"
	@echo "make test-all    everything that needs no GPU; writes .ci/verified if all of it passes on a clean tree"
	@echo "make test-runs   its whole runs: the half of it that starts Ray and engines"
	@echo "make test-ranks  its other half: ranks in one process tree, and the unit tests"
	@echo "make test-fast   the unit tests, for the inner loop (3 minutes)"
	@echo "make test-learn  the quickstart learns what it should, and so does every estimator and objective (15)"
	@echo "make test-exhaustive  every rank of layouts of up to 1,024, every family's refit, more whole runs (15)"
	@echo "                 of both, PART=0/8 runs every eighth test, starting with the first"
	@echo "make test-newest  ranks under the newest megatron-core that is supported (3)"
	@echo "make test-sandbox  programs that try to leave their sandboxes of bubblewrap, which it installs (1)"
	@echo "make test-cluster  runs over machines with networks of their own, and a Slurm of them; installs what it needs (15)"
	@echo "make test-browser  pages in Chromium, which it installs (1)"
	@echo "make soak        test-cluster, and then a job that twenty seeded faults hit (30)"
	@echo "make resolve-gpu  the packages of the container for H100s go together, by pip's resolver (1)"
	@echo "make test-gpu    what needs one, two and eight GPUs, as far as the machine has them; fails without one"
	@echo "make lint        ruff and shellcheck"

env: $(DONE)

$(DONE): $(LOCK) pyproject.toml tools/environment/build.sh
	tools/environment/build.sh $(PYTHON) $(VENV) $(LOCK)
	@touch $(DONE)

quickstart: $(DONE)
	$(VENV)/bin/megarl train configs/quickstart.yaml

# Whole runs mostly wait for processes that start; beside them there is room for the rest.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 test-runs test-ranks

# .ci/run skips parts whose paths have not changed since the commit in .ci/verified: commit that file.
test-all:
	@commit=$$(git rev-parse HEAD) && before=$$(git status --porcelain) && \
	$(MAKE) lint test test-sandbox soak test-learn test-exhaustive test-newest test-browser resolve-gpu && \
	if [ -z "$$before$$(git status --porcelain)" ] && [ "$$commit" = "$$(git rev-parse HEAD)" ]; \
	then echo "$$commit" | tee .ci/verified; else echo "not clean: .ci/verified stays as it was"; fi

test-runs: $(DONE)
	@$(RUN) -m pytest tests/e2e -m "(representative or not learn) and not exhaustive" $(SLOWEST) | sed --unbuffered 's/^/runs | /'

# The unit tests come last and on two cores: the whole runs beside them end first.
test-ranks: $(DONE) $(ENGINE_DONE) $(VERIFIERS_DONE) $(TRACKERS_DONE)
	@$(BEHIND) $(RUN) -m pytest tests/distributed -m "not exhaustive" $(SLOWEST) | sed --unbuffered 's/^/ranks | /'
	@$(BEHIND) $(RUN) -m pytest tests/unit tests/gpu -m "not exhaustive" --numprocesses=2 --dist=loadfile $(SLOWEST) | sed --unbuffered 's/^/units | /'

test-fast: $(DONE) $(ENGINE_DONE) $(VERIFIERS_DONE) $(TRACKERS_DONE)
	$(RUN) -m pytest tests/unit -m "not slow and not exhaustive" --numprocesses=2 --dist=loadfile $(SLOWEST)

test-learn: $(DONE) $(VERIFIERS_DONE)
	@$(RUN) -m pytest tests/e2e -m learn $(SLOWEST) $(PART:%=--part=%) | sed --unbuffered 's/^/learn | /'

test-exhaustive: $(DONE)
	@$(MAKE) --no-print-directory --jobs=2 exhaustive-runs exhaustive-ranks

exhaustive-runs: $(DONE)
	@$(RUN) -m pytest tests/e2e -m exhaustive $(SLOWEST) $(PART:%=--part=%) | sed --unbuffered 's/^/runs | /'

exhaustive-ranks: $(DONE)
	@$(BEHIND) $(RUN) -m pytest --ignore=tests/e2e --ignore=tests/cluster --ignore=tests/sandbox --ignore=tests/browser -m exhaustive $(SLOWEST) $(PART:%=--part=%) | sed --unbuffered 's/^/ranks | /'

# Its wheels are for newer Pythons, but what is used of it runs on this one, too.
$(NEWEST_DONE): $(DONE) $(NEWEST)
	rm -rf $(VENV)/newest
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --target $(VENV)/newest --no-deps --only-binary=:all: \
		--ignore-requires-python --python-version 3.12 --platform manylinux_2_28_x86_64 --requirement $(NEWEST)
	@touch $(NEWEST_DONE)

# Transformer Engine's Python, 1 MB, without its compiled part, which has no wheel. It stays out of the environment, in
# which Megatron would take it for the whole.
$(ENGINE_DONE): $(DONE) $(CONTAINER)
	rm -rf $(VENV)/transformer-engine
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --target $(VENV)/transformer-engine --no-deps --only-binary=:all: \
		$$(grep '^transformer-engine==' $(CONTAINER))
	@touch $(ENGINE_DONE)

# It wants other versions of packages than vLLM. Bytecode is compiled at once: each of its processes imports 3,000 files.
$(VERIFIERS_DONE): $(DONE) $(VERIFIERS)
	rm -rf $(VENV)/verifiers
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --target $(VENV)/verifiers --no-deps --only-binary=:all: \
		--requirement $(VERIFIERS)
	@touch $(VERIFIERS_DONE)

# Trackers of experiments, 150 MB: beside the environment, which a run needs without them.
$(TRACKERS_DONE): $(DONE) $(TRACKERS)
	rm -rf $(VENV)/trackers
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --target $(VENV)/trackers --no-deps --only-binary=:all: \
		--requirement $(TRACKERS)
	@touch $(TRACKERS_DONE)

test-newest: $(NEWEST_DONE) $(ENGINE_DONE)
	@PYTHONPATH=$(VENV)/newest $(RUN) -W ignore -c 'import megatron.core as m; print("megatron-core", m.__version__); \
		assert "megatron-core==" + m.__version__.split("+")[0] in open("$(NEWEST)").read()'
	PYTHONPATH=$(VENV)/newest $(BEHIND) $(RUN) -m pytest tests/distributed tests/unit/megatron \
		tests/unit/resharding/test_megatron_names.py -m newest $(SLOWEST)

# It fails where bubblewrap can be neither found nor installed. As root, it tries an ordinary user's sandboxes, too.
test-sandbox: $(DONE)
	tools/environment/system.sh bwrap:bubblewrap setpriv:util-linux
	@$(RUN) -m pytest tests/sandbox --numprocesses=2 $(SLOWEST) | sed --unbuffered 's/^/sandbox | /'

# Machines of a cluster, made of this one's namespaces, and Slurm: it wants root. Each file has machines of its own, and
# mostly waits.
test-cluster: $(DONE)
	tools/environment/system.sh ip:iproute2 unshare:util-linux ps:procps munged:munge slurmctld:slurmctld \
		slurmd:slurmd sbatch:slurm-client
	@$(RUN) -m pytest tests/cluster -m "not exhaustive" --numprocesses=3 --dist=loadfile --timeout=1500 $(SLOWEST) | sed --unbuffered 's/^/cluster | /'

# Pages as a browser shows them. It wants root where there is no Chromium yet. SCREENSHOTS=FOLDER keeps pictures of them.
test-browser: $(DONE)
	tools/environment/system.sh chromium:chromium
	@$(BEHIND) $(RUN) -m pytest tests/browser $(SLOWEST) | sed --unbuffered 's/^/browser | /'

# A job through twenty seeded faults: for a change of what goes on after them, as it takes a quarter of an hour.
soak: test-cluster
	@$(RUN) -m pytest tests/cluster -m exhaustive --capture=no

# The container for H100s: pip asks for what it would install, for another Python than this one.
resolve-gpu: $(DONE)
	@$(RUN) tools/environment/resolve.py

# On a machine with GPUs, in an environment for them (launch/container): GPU_PYTHON is its Python.
test-gpu:
	@$(GPU_PYTHON) -c 'import sys, torch; found = torch.cuda.device_count(); sys.exit(None if found else "torch finds no GPU")'
	$(GPU_PYTHON) -m pytest tests/gpu --timeout=1800 -rs $(SLOWEST)

lint: $(DONE)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/shellcheck .ci/run tools/environment/*.sh launch/*.sbatch

clean:
	rm -rf $(VENV) runs
