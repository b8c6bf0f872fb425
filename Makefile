# make quickstart: train a small GPT on this machine, with or without a GPU.  make test: the test suite.
# make help: all targets. Everything is installed into .venv, where the targets run.

# Settings that may be given on the command line, as in: make install PYTHON=python3.12
PYTHON ?= $(eval PYTHON := $(FIND_PYTHON))$(PYTHON)
# Three tests at a time; a worker that has none left takes some from another.
PYTEST_ARGS ?= -n 3 --dist worksteal
# More flags of train_gpt2.py, for make quickstart.
TRAIN_ARGS ?=
PY := .venv/bin/python
# PyTorch's own index has a part for each of its builds: cpu, cu126 (CUDA 12.6), ...
TORCH_INDEX ?= https://download.pytorch.org/whl
TORCH_CPU_INDEX ?= $(TORCH_INDEX)/cpu
# make install TORCH_BUILD=cu126: torch built for an older CUDA than the usual build, for an older driver. Later installs
# into this .venv keep it.
TORCH_BUILD ?= $(shell cat .venv/.torch-build 2>/dev/null)

# Not empty if torch should be installed with CUDA: this machine has an NVIDIA driver (the second path is that of the
# Windows Subsystem for Linux), or it is the login node of a Slurm cluster, whose GPUs are in other machines.
CUDA = $(wildcard /dev/nvidia* /usr/lib/wsl/lib/nvidia-smi)$(shell command -v nvidia-smi || command -v sbatch)

# Install with uv if it is on PATH, because it is faster; but with pip if the user has told pip where to find packages,
# in the environment or in pip's configuration, which uv does not read. `make install UV=` always takes pip.
# (eval: pip is asked at the first use of $(UV), and only once.)
UV ?= $(eval UV := $(shell { env; $(PYTHON) -m pip config list; } 2>/dev/null | \
  grep -qiE '^(pip_|global|install|:env:).*(index|find.links)' || command -v uv))$(UV)

# The first Python here that is new enough; python3 if none is, for the message. (eval, as for UV.)
FIND_PYTHON = $(or $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done),python3)

# Show progress bars on a terminal only, not in a log.
QUIET = $(shell [ -t 2 ] || echo --quiet)

# Without PIP_CONSTRAINT: NVIDIA's containers set it, and its versions would conflict with those pinned here.
PIP = env -u PIP_CONSTRAINT $(PY) -m pip install --disable-pip-version-check $(QUIET)
INSTALL = $(if $(UV),$(UV) pip install --python $(PY) $(QUIET),$(PIP))

.PHONY: help install quickstart test lint torture gpu-report clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s%s\n", $$1, $$2}' Makefile

install: .venv/.installed ## create .venv with the pinned packages (SYSTEM_TORCH=1: use the torch that this machine has)

# Install again if TORCH_BUILD names another build of torch than the one in .venv: a phony target, which is never up to
# date, then stands before .venv/.installed.
ANOTHER_BUILD = $(if $(filter-out $(shell cat .venv/.torch-build 2>/dev/null),$(TORCH_BUILD)),another-build)
.PHONY: another-build

# The steps: is this Python new enough; make .venv; torch in the build that this machine needs; all other packages. The
# file .venv/.installed is written last, so that an interrupted install starts again.
#
# SYSTEM_TORCH=1 is for a machine whose image brings a torch built for its driver. The .venv then sees the system's
# packages, and torch is left out of what is installed. The .venv gets a torchrun of its own: the system's torchrun
# would start the system's Python, which lacks the other packages.
.venv/.installed: requirements.txt constraints.txt $(ANOTHER_BUILD)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 or newer is needed: install one (with uv: uv python" \
	    "install 3.11), then: make install PYTHON=python3.12, or PYTHON=\"\$$(uv python find --system 3.11)\""; exit 1; }
ifeq ($(SYSTEM_TORCH),1)
	@$(PYTHON) -c 'import sys, torch; v = torch.__version__.split("+")[0]; print("using the installed torch:", torch.__version__); \
	  sys.exit(tuple(map(int, v.split(".")[:2])) < (2, 11))' || { \
	  echo "error: SYSTEM_TORCH=1 needs torch 2.11 or newer in $(PYTHON); to install a torch instead: make install"; exit 1; }
	$(PYTHON) -m venv --system-site-packages .venv
	grep -v '^torch==' requirements.txt > .venv/requirements.txt
	$(PIP) -r .venv/requirements.txt
	printf '#!/bin/sh\nexec "$$(dirname "$$0")/python" -m torch.distributed.run "$$@"\n' > .venv/bin/torchrun
	chmod +x .venv/bin/torchrun
else
	@echo "installing into .venv takes some minutes, most of them for torch"
	$(if $(UV),$(UV) venv --quiet --seed --allow-existing --python $(PYTHON),$(PYTHON) -m venv) .venv
	$(if $(TORCH_BUILD),$(BUILT_TORCH),$(if $(filter Linux,$(shell uname)),$(if $(CUDA),,$(if $(TORCH_CPU_INDEX),$(CPU_TORCH)))))
	$(INSTALL) -r requirements.txt -c constraints.txt $(if $(TORCH_BUILD),-c .venv/torch.txt)
	@$(if $(TORCH_BUILD),echo $(TORCH_BUILD) > .venv/.torch-build,true)
endif
	@touch $@

# Install the pinned version of torch in the build TORCH_BUILD. In .venv/torch.txt the version ends with the build, as in
# +cu126: an installed torch of another build does not satisfy it, although it would satisfy the version alone.
define BUILT_TORCH
sed -n 's/; sys_platform != .*/+$(TORCH_BUILD)/p' requirements.txt > .venv/torch.txt
UV_INDEX="$$UV_INDEX $(TORCH_INDEX)/$(TORCH_BUILD)" UV_INDEX_STRATEGY=unsafe-best-match \
  $(INSTALL) --no-deps -r .venv/torch.txt $(if $(UV),,--extra-index-url $(TORCH_INDEX)/$(TORCH_BUILD))
endef

# Install the CPU build of torch. PyPI's torch for Linux brings CUDA, which is gigabytes; the CPU build is a tenth of
# that. First look whether PyTorch's own index answers soon and has this version; if not, use the usual index. PyTorch's
# index is added to the user's: it has a version with "+cpu" at its end, which satisfies the pin and which installers
# prefer. Only torch is installed here (--no-deps), because that index has old versions of other packages, too. `page`
# is a line of Python that prints the index's list of torch wheels.
define CPU_TORCH
@torch=$$(sed -n 's/; sys_platform != .*//p' requirements.txt); \
page="import urllib.request as web; print(web.urlopen('$(TORCH_CPU_INDEX)/torch/', timeout=5).read())"; \
timeout 10 $(PY) -c "$$page" 2>/dev/null | grep -q "torch-$${torch#torch==}[^0-9]" && { \
  echo "no NVIDIA GPU here: installing $$torch for CPUs (to install it with CUDA: make clean install TORCH_CPU_INDEX=)"; \
  UV_INDEX="$$UV_INDEX $(TORCH_CPU_INDEX)" UV_INDEX_STRATEGY=unsafe-best-match \
    $(INSTALL) --no-deps $$torch $(if $(UV),,--extra-index-url $(TORCH_CPU_INDEX)); } || \
  echo "no $$torch from $(TORCH_CPU_INDEX): using the usual index, where torch may bring 5 GB of CUDA"
endef

# What the tests need in addition to the requirements above, whose line (-r) is left out.
.venv/.installed-dev: .venv/.installed tests/requirements.txt
	grep -v '^-r' tests/requirements.txt > .venv/requirements-dev.txt
	$(INSTALL) -r .venv/requirements-dev.txt -c constraints.txt
	@touch $@

quickstart: install ## tokens, a few minutes of training, samples, curves; needs no GPU and no download (TRAIN_ARGS='--dtype float32')
	$(PY) fineweb.py --source stdlib --out data/stdlib
	$(PY) train_gpt2.py quickstart --resume auto $(TRAIN_ARGS)
	$(PY) infer.py log/quickstart "def " --num-samples 4 --max-new-tokens 64
	$(PY) plots.py log/quickstart
	@echo
	@echo "Done: samples above, curves in log/quickstart/curves.png. Next, try:"
	@echo "  $(PY) infer.py log/quickstart 'class Node:'          # complete your own beginning"
	@echo "  $(PY) train_gpt2.py quickstart --max-steps 1400 --out-dir log/longer   # 15 min on two cores"
	@echo "  $(PY) train_gpt2.py gpt2-124m --dry-run              # what GPT-2 would take on this machine"

test: .venv/.installed-dev ## the test suite without its slow tests, on the CPU and offline (PYTEST_ARGS=... for pytest)
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

lint: .venv/.installed-dev ## check the code's style with ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

torture: .venv/.installed-dev ## kill runs, fill disks and damage files a hundred times, then run the slow tests
	-$(INSTALL) -r tests/requirements-runtimes.txt -c constraints.txt  # without them, their tests are skipped
	$(PY) tests/faults/torture.py
	$(PY) -m pytest -m slow $(PYTEST_ARGS)

gpu-report: .venv/.installed-dev ## measure this machine's GPU in half an hour, into one file to paste into an issue
	$(PY) -m bench.gpu_report $(REPORT_ARGS)

clean: ## remove .venv and caches, but neither data/ nor log/
	@# A container may have its own .venv mounted here: that can only be emptied.
	rm -rf .venv 2>/dev/null || [ -z "$$(ls -A .venv)" ]
	rm -rf .cache .pytest_cache .ruff_cache .hypothesis __pycache__ */__pycache__ */*/__pycache__
