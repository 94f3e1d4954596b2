# Every target does its own set-up into .venv/. PYTHON chooses the interpreter that .venv is made from.
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready
# … and PYTHON_CUDA .venv-cuda, for GPUs: Python 3.12, on the path or of pyenv.
PYTHON_CUDA ?= $(firstword $(wildcard $(shell command -v pyenv >/dev/null && pyenv root)/versions/3.12*/bin/python3.12) python3.12)
CUDA_READY := .venv-cuda/.ready

# Where it is set, each of a run's many processes would compile thousands of modules again.
unexport PYTHONDONTWRITEBYTECODE

# Three lanes on two cores, since many tests wait; each with processes, a network and temporary folders of its own. Without root: one file after the other.
define tests
@shared=$$(mktemp -d /tmp/lanes.XXXXXX); trap 'rm -rf "$$shared"' EXIT; \
if tests/lane --possible; then lanes="--tx 3*popen//python=tests/lane --dist loadfile --no-loadscope-reorder"; else lanes="-n 0"; fi; \
LANE_SHARED=$$shared $(PY) -m pytest $$lanes --basetemp $$shared/t -m "$(1)" $(ARGS)
endef

.DEFAULT_GOAL := help
# Real data for the *-cpu recipes, a folder each. GSM8K: train.jsonl and test.jsonl; empty is the Hugging Face hub.
GSM8K ?=
# HotpotQA's and 2Wiki's questions with a corpus; Spider; MATH's and AIME 2024's problems. Empty: what the project makes itself.
SEARCH ?=
SPIDER ?=
MATH ?=

.PHONY: help setup quickstart multiply-cpu gsm8k-cpu searchr1-cpu sql-cpu dapo-cpu gpu test test-ci test-all check cuda cuda-check fuzz lock clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(READY): requirements/cpu.lock requirements/install.sh requirements/verify.py pyproject.toml
	@requirements/install.sh $(PYTHON)
	@touch $@

setup: $(READY)  ## the environment in .venv, with `python` in .venv/bin

quickstart: $(READY)  ## trains a small mixture-of-experts policy with RL, on this machine's CPU (ARGS="run.seed=1" adds settings)
	$(PY) -m skyrl_mega.launch --config configs/quickstart.yaml $(ARGS)

multiply-cpu: $(READY)  ## RL over several turns: a small policy learns not to forget carries, on this machine's CPU
	$(PY) -m skyrl_mega.launch --config configs/multiply_cpu.yaml $(ARGS)

runs/models/smollm2-135m: | $(READY)
	$(PY) -m skyrl_mega.models.smollm2 --output $@

runs/data/gsm8k/train.parquet: | $(READY)
	$(PY) -m skyrl_mega.data gsm8k --output $(@D) --shots 2 $(if $(GSM8K),--source "$(GSM8K)")

runs/data/hotpotqa/train.parquet: | $(READY)
	$(PY) -m skyrl_mega.data search --output $(@D) --source "$(SEARCH)/hotpotqa_train_500_with_context.jsonl" \
		--held-out "$(SEARCH)/2wiki_dev_354_gold.jsonl" --corpus "$(SEARCH)/corpus.jsonl" --limit 200 --passages 1000 --shots 2

runs/data/spider/train.parquet: | $(READY)
	$(PY) -m skyrl_mega.data text2sql --output $(@D) --source "$(SPIDER)" --longest 500 --turns 3 --shots 1

runs/data/math/train.parquet: | $(READY)
	$(PY) -m skyrl_mega.data math --output $(@D) --env aime --train-file "$(MATH)/rllm_train_math.json" \
		--test-file "$(MATH)/aime24.json" --longest 60 --shots 2

CPU := $(READY) runs/models/smollm2-135m
RUN := $(PY) -m skyrl_mega.launch --config

gsm8k-cpu: $(CPU) runs/data/gsm8k/train.parquet  ## RL on GSM8K with SmolLM2-135M, on this machine's CPU (GSM8K=FOLDER has the data)
	$(RUN) configs/gsm8k_cpu.yaml $(ARGS)

searchr1-cpu: $(CPU) $(if $(SEARCH),runs/data/hotpotqa/train.parquet)  ## RL on two-hop questions with a search service of the run (SEARCH=FOLDER: HotpotQA, 2Wiki)
	$(RUN) configs/searchr1_cpu.yaml $(if $(SEARCH),data.folder=runs/data/hotpotqa) $(ARGS)

sql-cpu: $(CPU) $(if $(SPIDER),runs/data/spider/train.parquet)  ## RL on questions to SQLite databases (SPIDER=FOLDER: Spider's)
	$(RUN) configs/sql_cpu.yaml $(if $(SPIDER),data.folder=runs/data/spider \
		environment.options.text2sql.db_path="$(SPIDER)/database") $(ARGS)

dapo-cpu: $(CPU) $(if $(MATH),runs/data/math/train.parquet)  ## RL on mathematics, with DAPO (MATH=FOLDER: MATH, evaluated on AIME 2024)
	$(RUN) configs/dapo_cpu.yaml $(if $(MATH),data.folder=runs/data/math) $(ARGS)

gpu:  ## what one GPU can prove, kept in benchmarks/results/gpu; needs Python 3.12, torch, and megatron-core in WHEELS=FOLDER
	$(PYTHON) -m benchmarks.gpu $(if $(WHEELS),--wheels "$(WHEELS)") $(ARGS)

test: $(READY)  ## every test that takes less than 20 seconds, at most 25 minutes on 2 cores (ARGS="tests/config" picks)
	$(call tests,not slow)

test-ci: $(READY)  ## what every change must pass: all but the nightly ones
	$(call tests,not nightly)

test-all: export HYPOTHESIS_PROFILE ?= night
test-all: $(READY)  ## these and the slow ones: whole runs, faults, a Slurm cluster; about two hours on 2 cores
	$(call tests,)

fuzz: $(READY)  ## hostile settings, files, replies, texts, programs and SQL, for an hour (ARGS="--seconds 60 --seed 7" adds options)
	$(PY) -m tests.fuzz --seconds 3600 $(ARGS)

check: $(READY)  ## formatter, linter, type checker
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

$(CUDA_READY): requirements/cuda.lock requirements/cuda.sh pyproject.toml
	@requirements/cuda.sh $(PYTHON_CUDA) .venv-cuda
	@touch $@

cuda: $(CUDA_READY)  ## the environment for GPUs in .venv-cuda, on a machine with or without one (10 GB, 20 minutes on 2 cores)

cuda-check: $(CUDA_READY)  ## its packages, and the models that Transformer Engine and vLLM build there against this project's
	.venv-cuda/bin/python requirements/cuda_check.py

lock:  ## requirements/*.lock from pyproject.toml
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@command -v uv >/dev/null || test -x .venv/bin/uv || $(PY) -m pip install --quiet uv
	@PATH="$$PATH:$(CURDIR)/.venv/bin" $(PY) requirements/lock.py

clean:  ## removes .venv/, .venv-cuda/ and caches, keeps runs/ and data/
	rm -rf .venv .venv-cuda .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
