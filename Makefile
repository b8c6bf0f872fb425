# make quickstart: train a small GPT here, on anything.  make test: the suite.  make help: the rest.
PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist loadscope --no-loadscope-reorder
PY := .venv/bin/python

.PHONY: help install quickstart test lint torture clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "%-14s%s\n", $$1, $$2}' Makefile

install: .venv/.installed ## .venv with the pinned requirements (SYSTEM_TORCH=1: use the torch this machine has)

# The stamp is made last, so that an interrupted install starts again. With SYSTEM_TORCH=1, as on a pod whose image
# brings a torch built for its driver, the venv sees the system's packages and the torch pin is left out; it gets a
# torchrun of its own, because the system's runs the system's Python, which lacks the other packages.
.venv/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 or newer is needed: make install PYTHON=python3.12"; exit 1; }
ifeq ($(SYSTEM_TORCH),1)
	@$(PYTHON) -c 'import sys, torch; v = torch.__version__.split("+")[0]; print("using the torch here:", torch.__version__); \
	  sys.exit(tuple(map(int, v.split(".")[:2])) < (2, 11))' || { \
	  echo "error: SYSTEM_TORCH=1 needs torch 2.11 or newer in $(PYTHON); without: make install"; exit 1; }
	$(PYTHON) -m venv --system-site-packages .venv
	grep -v '^torch==' requirements.txt > .venv/requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r .venv/requirements.txt
	printf '#!/bin/sh\nexec "$$(dirname "$$0")/python" -m torch.distributed.run "$$@"\n' > .venv/bin/torchrun
	chmod +x .venv/bin/torchrun
else
	@echo "installing into .venv: some minutes, most of them for torch"
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
endif
	@touch $@

.venv/.installed-dev: .venv/.installed requirements-dev.txt
	sed 's|^-r requirements.txt$$||' requirements-dev.txt > .venv/requirements-dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r .venv/requirements-dev.txt
	@touch $@

quickstart: install ## tokens, a few minutes of training, samples, curves: no GPU and no download needed
	$(PY) fineweb.py --source stdlib --out data/stdlib
	$(PY) train_gpt2.py quickstart --resume auto
	$(PY) infer.py log/quickstart "def " --num-samples 4 --max-new-tokens 64
	$(PY) plots.py log/quickstart
	@echo
	@echo "Done: samples above, curves in log/quickstart/curves.png. Next, try:"
	@echo "  $(PY) infer.py log/quickstart 'class Node:'          # complete your own beginning"
	@echo "  $(PY) train_gpt2.py quickstart --max-steps 400 --out-dir log/longer   # train twice as long"
	@echo "  $(PY) train_gpt2.py gpt2-124m --dry-run              # what GPT-2 would take on this machine"

test: .venv/.installed-dev ## the suite but for its longest tests, CPU and offline (PYTEST_ARGS=... for pytest)
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

lint: .venv/.installed-dev ## ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

torture: .venv/.installed-dev ## hundreds of faults on purpose, a long run, and the slow tests
	$(PY) tests/torture.py
	$(PY) -m pytest -m slow $(PYTEST_ARGS)

clean: ## remove .venv and caches; never data/ or log/
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis __pycache__ */__pycache__
