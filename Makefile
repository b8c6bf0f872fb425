# make help lists the targets, which run in .venv. Settings: make install PYTHON=python3.12 TORCH_BUILD=cu126 SYSTEM_TORCH=1
IS_NEW = -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(or $(shell for p in python3 python3.13 python3.12 python3.11; do $$p $(IS_NEW) 2>&- && echo $$p && break; done),python3)
PYTEST_ARGS ?= -n 3 --dist worksteal
PY := .venv/bin/python
# PyTorch's build: cpu (no GPU here), cu126 (an older driver), empty (PyPI's, CUDA 13); a change needs make clean install.
TORCH_BUILD ?= $(if $(wildcard /dev/nvidia* /usr/lib/wsl/lib/nvidia-smi)$(shell which sbatch 2>&-),,$(if $(filter Linux,$(shell uname)),cpu))
# pip where it is told about packages, which uv does not read. NVIDIA's containers pin their own by PIP_CONSTRAINT.
UV ?= $(if $(PIP_INDEX_URL)$(PIP_EXTRA_INDEX_URL)$(PIP_FIND_LINKS),,$(shell which uv 2>&-))
INSTALL = $(if $(UV),$(UV) pip install --python $(PY),env -u PIP_CONSTRAINT $(PY) -m pip install --disable-pip-version-check)
WITH_BUILD = $(if $(UV),--torch-backend $(TORCH_BUILD),--retries 1 --extra-index-url https://download.pytorch.org/whl/$(TORCH_BUILD))
.PHONY: help install quickstart test lint torture gpu-report clean
help: ## print this list of targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s%s\n", $$1, $$2}' Makefile
install: .venv/.installed ## make .venv with the pinned packages, in some minutes
.venv/.installed: requirements.txt constraints.txt
	@$(PYTHON) $(IS_NEW) || { echo "error: $$($(PYTHON) --version 2>&1) is too old; Python 3.11 or newer: make install PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(if $(SYSTEM_TORCH),--system-site-packages) .venv && grep -v $(if $(SYSTEM_TORCH),'^torch==','^#') requirements.txt > .venv/requirements.txt
	$(if $(TORCH_BUILD),$(if $(SYSTEM_TORCH),,-$(INSTALL) $(WITH_BUILD) --no-deps '$(shell grep '^torch.*!=' requirements.txt)'))
	$(INSTALL) -r .venv/requirements.txt -c constraints.txt
	@$(if $(SYSTEM_TORCH),printf '#!/bin/sh\nexec "$$(dirname "$$0")/python" -m torch.distributed.run "$$@"\n' > .venv/bin/torchrun && chmod +x .venv/bin/torchrun &&) touch $@
.venv/.installed-dev: .venv/.installed tests/requirements.txt
	$(INSTALL) -r tests/requirements.txt -c constraints.txt && touch $@
quickstart: install ## tokens, minutes of training, samples, curves; no GPU, no download (TRAIN_ARGS='--dtype float32')
	$(PY) fineweb.py --source stdlib --out data/stdlib
	$(PY) train_gpt2.py quickstart --resume auto $(TRAIN_ARGS)
	$(PY) infer.py log/quickstart "def " --num-samples 4 --max-new-tokens 64
	$(PY) plots.py log/quickstart
test: .venv/.installed-dev ## the test suite without its slow tests, on the CPU and offline (PYTEST_ARGS=... for pytest)
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)
lint: .venv/.installed-dev ## check the code's style with ruff
	$(PY) -m ruff check . && $(PY) -m ruff format --check .
torture: .venv/.installed-dev ## inject hundreds of faults, train a long run, then run the slow tests
	-$(INSTALL) -r tests/requirements-runtimes.txt -c constraints.txt
	$(PY) tests/faults/torture.py && $(PY) -m pytest -m slow $(PYTEST_ARGS)
gpu-report: .venv/.installed-dev ## measure this machine's GPU in half an hour, to paste into an issue
	bench/gpu.sh
clean: ## remove .venv (a mounted one is emptied) and caches, but neither data/ nor log/
	rm -rf .cache .pytest_cache .ruff_cache .hypothesis build *.egg-info __pycache__ */__pycache__ */*/__pycache__
	rm -rf .venv 2>&- || [ -z "$$(ls -A .venv)" ]
