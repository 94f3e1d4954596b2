# Every target does its own set-up into .venv/. PYTHON chooses the interpreter that .venv is made from.
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help quickstart test check lock clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(READY): requirements/cpu.lock requirements/install.sh requirements/verify.py pyproject.toml
	@requirements/install.sh $(PYTHON)
	@touch $@

quickstart: $(READY)  ## trains a small mixture-of-experts policy with RL, on this machine's CPU (ARGS="run.seed=1" adds settings)
	$(PY) -m skyrl_mega.launch --config configs/quickstart.yaml $(ARGS)

test: $(READY)  ## every test, at most 25 minutes on 2 cores (ARGS="tests/config" picks)
	$(PY) -m pytest $(ARGS)

check: $(READY)  ## formatter, linter, type checker
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

lock:  ## requirements/*.lock from pyproject.toml
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@command -v uv >/dev/null || test -x .venv/bin/uv || $(PY) -m pip install --quiet uv
	@PATH="$$PATH:$(CURDIR)/.venv/bin" $(PY) requirements/lock.py

clean:  ## removes .venv/ and caches, keeps runs/ and data/
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
