# make quickstart: train a small GPT here, on anything.  make test: the suite.  make help: the rest.
PYTHON ?= python3
PYTEST_ARGS ?= -n 3 --dist worksteal
TRAIN_ARGS ?=
PY := .venv/bin/python
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# What speaks for torch with CUDA: NVIDIA's driver (the second is WSL's), or Slurm, whose GPUs are in other machines.
CUDA = $(wildcard /dev/nvidia* /usr/lib/wsl/lib/nvidia-smi)$(shell command -v nvidia-smi || command -v sbatch)
# uv where it is on PATH, unless pip was told where to find packages, which uv would not know. UV= takes pip.
UV ?= $(shell { env; $(PYTHON) -m pip config list; } 2>/dev/null | \
  grep -qiE '^(pip_|global|install|:env:).*(index|find.links)' || command -v uv)
# Progress is for a terminal.
QUIET = $(shell [ -t 2 ] || echo --quiet)
PIP = $(PY) -m pip install --disable-pip-version-check $(QUIET)
INSTALL = $(if $(UV),$(UV) pip install --python $(PY) $(QUIET),$(PIP))

.PHONY: help install quickstart test lint torture clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "%-14s%s\n", $$1, $$2}' Makefile

install: .venv/.installed ## .venv with the pinned requirements (SYSTEM_TORCH=1: use the torch this machine has)

# The stamp is made last, so that an interrupted install starts again. With SYSTEM_TORCH=1, as on a pod whose image
# brings a torch built for its driver, the venv sees the system's packages and the torch pin is left out; it gets a
# torchrun of its own, because the system's runs the system's Python, which lacks the other packages.
.venv/.installed: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 or newer is needed: make install PYTHON=python3.12"; exit 1; }
ifeq ($(SYSTEM_TORCH),1)
	@$(PYTHON) -c 'import sys, torch; v = torch.__version__.split("+")[0]; print("using the torch here:", torch.__version__); \
	  sys.exit(tuple(map(int, v.split(".")[:2])) < (2, 11))' || { \
	  echo "error: SYSTEM_TORCH=1 needs torch 2.11 or newer in $(PYTHON); without: make install"; exit 1; }
	$(PYTHON) -m venv --system-site-packages .venv
	grep -v '^torch==' requirements.txt > .venv/requirements.txt
	$(PIP) -r .venv/requirements.txt
	printf '#!/bin/sh\nexec "$$(dirname "$$0")/python" -m torch.distributed.run "$$@"\n' > .venv/bin/torchrun
	chmod +x .venv/bin/torchrun
else
	@echo "installing into .venv: some minutes, most of them for torch"
	$(if $(UV),$(UV) venv --quiet --seed --allow-existing --python $(PYTHON),$(PYTHON) -m venv) .venv
	$(if $(filter Linux,$(shell uname)),$(if $(CUDA),,$(if $(TORCH_CPU_INDEX),$(CPU_TORCH))))
	$(INSTALL) -r requirements.txt -c constraints.txt
endif
	@touch $@

# PyPI's torch for Linux brings CUDA, gigabytes; the CPU build is a tenth of it. One try, an index added to the user's:
# 2.13.0+cpu satisfies the pin 2.13.0 and is preferred to it. Alone, because that index has other packages, too.
define CPU_TORCH
@torch=$$(sed -n 's/; sys_platform != .*//p' requirements.txt); \
page="import urllib.request as web; print(web.urlopen('$(TORCH_CPU_INDEX)/torch/', timeout=5).read())"; \
timeout 10 $(PY) -c "$$page" 2>/dev/null | grep -q "torch-$${torch#torch==}[^0-9]" && { \
  echo "no NVIDIA GPU here, so $$torch for CPUs (with GPUs elsewhere: make clean install TORCH_CPU_INDEX=)"; \
  UV_INDEX="$$UV_INDEX $(TORCH_CPU_INDEX)" UV_INDEX_STRATEGY=unsafe-best-match \
    $(INSTALL) --no-deps $$torch $(if $(UV),,--extra-index-url $(TORCH_CPU_INDEX)); } || \
  echo "no $$torch from $(TORCH_CPU_INDEX): going on with the usual index, where it may bring 5 GB of CUDA"
endef

.venv/.installed-dev: .venv/.installed tests/requirements.txt
	grep -v '^-r' tests/requirements.txt > .venv/requirements-dev.txt
	$(INSTALL) -r .venv/requirements-dev.txt -c constraints.txt
	@touch $@

quickstart: install ## tokens, a few minutes of training, samples, curves: no GPU and no download needed (TRAIN_ARGS='--dtype float32')
	$(PY) fineweb.py --source stdlib --out data/stdlib
	$(PY) train_gpt2.py quickstart --resume auto $(TRAIN_ARGS)
	$(PY) infer.py log/quickstart "def " --num-samples 4 --max-new-tokens 64
	$(PY) plots.py log/quickstart
	@echo
	@echo "Done: samples above, curves in log/quickstart/curves.png. Next, try:"
	@echo "  $(PY) infer.py log/quickstart 'class Node:'          # complete your own beginning"
	@echo "  $(PY) train_gpt2.py quickstart --max-steps 160 --out-dir log/longer   # train twice as long"
	@echo "  $(PY) train_gpt2.py gpt2-124m --dry-run              # what GPT-2 would take on this machine"

test: .venv/.installed-dev ## the suite but for its longest tests, CPU and offline (PYTEST_ARGS=... for pytest)
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

lint: .venv/.installed-dev ## ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

torture: .venv/.installed-dev ## hundreds of faults on purpose, a long run, and the slow tests
	$(PY) tests/faults/torture.py
	$(PY) -m pytest -m slow $(PYTEST_ARGS)

clean: ## remove .venv and caches; never data/ or log/
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis __pycache__ */__pycache__ */*/__pycache__
