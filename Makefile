# Every target does its own set-up into .venv/. PYTHON chooses the interpreter that .venv is made from.
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready

# Where it is set, each of a run's many processes would compile thousands of modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# Where GSM8K's questions come from: a folder with train.jsonl and test.jsonl; empty is the Hugging Face hub.
GSM8K ?= $(wildcard ../shared/data/gsm8k)

.PHONY: help quickstart multiply-cpu gsm8k-cpu searchr1-cpu sql-cpu dapo-cpu test check lock clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(READY): requirements/cpu.lock requirements/install.sh requirements/verify.py pyproject.toml
	@requirements/install.sh $(PYTHON)
	@touch $@

quickstart: $(READY)  ## trains a small mixture-of-experts policy with RL, on this machine's CPU (ARGS="run.seed=1" adds settings)
	$(PY) -m skyrl_mega.launch --config configs/quickstart.yaml $(ARGS)

multiply-cpu: $(READY)  ## RL over several turns: a small policy learns not to forget carries, on this machine's CPU
	$(PY) -m skyrl_mega.launch --config configs/multiply_cpu.yaml $(ARGS)

runs/models/smollm2-135m: | $(READY)
	$(PY) -m skyrl_mega.models.smollm2 --output $@

runs/data/gsm8k/train.parquet: | $(READY)
	$(PY) -m skyrl_mega.data gsm8k --output $(@D) --shots 2 $(if $(GSM8K),--source "$(GSM8K)")

gsm8k-cpu: $(READY) runs/models/smollm2-135m runs/data/gsm8k/train.parquet  ## RL on GSM8K with SmolLM2-135M, on this machine's CPU (GSM8K=FOLDER has the data)
	$(PY) -m skyrl_mega.launch --config configs/gsm8k_cpu.yaml $(ARGS)

searchr1-cpu: $(READY) runs/models/smollm2-135m  ## RL on questions that need a search, with a retrieval service of the run; SmolLM2-135M, on this machine's CPU
	$(PY) -m skyrl_mega.launch --config configs/searchr1_cpu.yaml $(ARGS)

sql-cpu: $(READY) runs/models/smollm2-135m  ## RL on questions to SQLite databases; SmolLM2-135M, on this machine's CPU
	$(PY) -m skyrl_mega.launch --config configs/sql_cpu.yaml $(ARGS)

dapo-cpu: $(READY) runs/models/smollm2-135m  ## RL on mathematics, with DAPO; SmolLM2-135M, on this machine's CPU
	$(PY) -m skyrl_mega.launch --config configs/dapo_cpu.yaml $(ARGS)

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
