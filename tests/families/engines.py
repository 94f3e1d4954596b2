"""The engine sweep: Megatron's ranks and a vLLM engine go through all families, in one process each.

vLLM's offline class runs the engine inside the process of the test's rank: an actor would import vLLM for every family.
Engine arguments, worker extension and weight transfer are the project's own.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from skyrl_mega.cluster.run_placement import plan_placement
from skyrl_mega.config.residency import ENGINE
from skyrl_mega.config.schema import Config, ModelConfig, RolloutConfig, WeightsConfig
from skyrl_mega.engines.vllm.spec import EngineSpec, arguments, environment
from skyrl_mega.weights.connection import Connection
from skyrl_mega.weights.plan.sync_plan import SyncInputs
from tests.families.models import CORRECTION_BIAS, DECAY, read_hf, transformers_model
from tests.megatron.layouts import CPU, join_ranks, layout, load_model, policy_config
from tests.support.compared import tensors_of
from tests.support.shards import cut

POLICY = layout(2, tensor=2, expert=2)
"""Layout of the policy, the source of every sync."""
ROLLOUT = RolloutConfig(kv_cache_gib=0.02, concurrency=4)
PROMPTS = ([5, 20, 40, 60, 7, 11, 98, 33], [3, 77, 8, 9, 51])
NEW_TOKENS = 8
SYNCS = (1, 0, 0)
"""Seeds of the weights in each sync; the engine sleeps before the last."""
Answers = list[tuple[list[int], list[float]]]
"""Tokens of each prompt and answer, and the log-prob of every token but the first."""


@dataclass
class EngineResults:
    """Results of an engine with a model."""

    differences: dict[str, float] = field(default_factory=dict)
    """Occasion → largest difference of a log-prob from transformers'."""
    stale: dict[str, list[str]] = field(default_factory=dict)
    """Occasion → names of tensors unlike a fresh load's."""
    compared: int = 0
    """Number of tensors compared with a fresh load's."""
    check: list[str] = field(default_factory=list)
    """Names of the parameters that the engine's own check finds different."""
    biases: dict[str, Tensor] = field(default_factory=dict)
    """Correction biases after a sync."""
    rounding: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Occasion → median errors of the log-probs of a bfloat16 engine, and of transformers in bfloat16, relative to
    float32 with the same weights."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Tensor of a fresh engine → type."""


def sweep(rank: int, address: str, folder: Path, port: int, cases: list[tuple[str, str]]) -> dict[str, EngineResults]:
    """Runs a policy rank, or the engine as the last rank; returns the engine's results by model and dtype.

    Args:
        rank: The rank.
        address: Address of the policy's store.
        folder: Folder of the models.
        port: Port of the store for weight transfers.
        cases: Models by name, with the dtype of policy and engine.
    """
    if rank == POLICY.ranks:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
        os.environ |= environment(_spec(folder, "float32"))
        return {f"{name} {dtype}": _engine(folder, store.port, name, dtype) for name, dtype in cases}
    join_ranks(rank, address, POLICY)
    for name, dtype in cases:
        _send(rank, folder, port, name, dtype)
    return {}


def folder_of(folder: Path, name: str, dtype: str, seed: int) -> Path:
    """Returns the directory of a model whose weights have the type `dtype`."""
    return folder / (f"{name}-{seed}" if dtype == "float32" else f"{name}-{seed}-{dtype}")


def _connection(folder: Path, port: int, name: str, dtype: str) -> Connection:
    """Returns the connection between policy and engine, the same in every process."""
    config = Config(model=ModelConfig(dtype=dtype), rollout=ROLLOUT, weights=WeightsConfig(timeout_s=120))
    config = cut(config, POLICY)
    inputs = SyncInputs.of(config, read_hf(folder_of(folder, name, dtype, 0)), plan_placement(config))
    return Connection("127.0.0.1", port, f"{name}-{dtype}", asdict(inputs), 1 << 16, 120, str(folder / "plans"))


def _send(rank: int, folder: Path, port: int, name: str, dtype: str) -> None:
    """Sends the weights of every sync, and the last ones again for the engine's check."""
    policy = policy_config()
    worker = load_model(folder_of(folder, name, dtype, SYNCS[0]), POLICY, policy, getattr(torch, dtype))
    exchange = _connection(folder, port, name, dtype).join(CPU, source=rank)
    for seed in (*SYNCS, SYNCS[-1]):
        worker.load(folder_of(folder, name, dtype, seed))
        exchange.run(source=worker.weights(), checksums=True)
    exchange.close()


def _spec(path: Path, dtype: str, **more: Any) -> EngineSpec:
    extension = {"worker_extension_cls": "tests.support.sleeping.GarbageAfterWake"}
    return EngineSpec(
        path=str(path),
        dtype=dtype,
        device="cpu",
        rollout=ROLLOUT,
        max_length=64,
        sleeps=ENGINE,
        extra=extension,
        **more,
    )


def _engine(folder: Path, port: int, name: str, dtype: str) -> EngineResults:
    """Runs an engine through all syncs, and compares with transformers and with a fresh engine."""
    from vllm import LLM

    results = EngineResults()
    fresh = LLM(**arguments(_spec(folder_of(folder, name, dtype, SYNCS[-1]), dtype, weights="auto")))
    answers = ask(fresh)
    expected = state(fresh)  # after a pass: the first one rounds YaRN's cosines, in float32, to the type of the queries
    llm = LLM(**arguments(_spec(folder_of(folder, name, dtype, 0), dtype)))
    connection = asdict(_connection(folder, port, name, dtype))
    llm.collective_rpc(
        "init_weight_transfer_engine", kwargs={"init_info": {"connection": connection, "engine_index": 0}}
    )
    results.differences["loaded"] = difference(folder / f"{name}-{SYNCS[-1]}", answers)
    results.compared = len(expected)
    results.dtypes = {tensor: value.dtype for tensor, value in expected.items()}
    for number, seed in enumerate(SYNCS):
        occasion = f"sync {number + 1}"
        if number == len(SYNCS) - 1:
            occasion = "sync after sleep"
            llm.collective_rpc("drop", args=(list(ENGINE),))
            llm.collective_rpc("bring_back", args=(list(ENGINE),))
        _update(llm)
        new_answers = ask(llm)
        results.differences[occasion] = difference(folder / f"{name}-{seed}", new_answers)
        if dtype == "bfloat16":
            results.rounding[occasion] = rounding_errors(folder_of(folder, name, dtype, seed), new_answers)
        if seed == SYNCS[-1]:
            results.stale[occasion] = unlike(expected, state(llm))
            results.stale[occasion] += [] if new_answers == answers else ["answers"]
    [check] = llm.collective_rpc("check_weights")
    results.check = check["different"]
    results.stale["check"] = unlike(expected, state(llm))  # a check changes nothing
    results.biases = {tensor: value for tensor, value in state(llm).items() if tensor.endswith(CORRECTION_BIAS)}
    llm.collective_rpc("shutdown_weight_transfer_engine")
    return results


def loaded_answers(path: Path) -> Answers:
    """Returns the answers of a float32 engine with the weights of a directory, in this process."""
    spec = _spec(path, "float32", weights="auto")
    os.environ |= environment(spec)
    from vllm import LLM

    return ask(LLM(**arguments(spec)))


def _update(llm: Any) -> None:
    """Receives weights as the engine's actor does."""
    llm.reset_prefix_cache()
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": {"checksums": True}})
    llm.collective_rpc("finish_weight_update")


def ask(llm: Any) -> Answers:
    """Returns answers to `PROMPTS`."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=1.0, seed=0, prompt_logprobs=0, logprobs=0, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    answers = []
    for output in llm.generate(prompts, parameters, use_tqdm=False):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        answers.append((tokens, [row[token].logprob for row, token in zip(rows, tokens[1:], strict=True)]))
    return answers


@torch.no_grad()
def difference(path: Path, answers: Answers) -> float:
    """Returns the largest difference of the answers' log-probs from transformers'."""
    model, worst = transformers_model(path), 0.0
    for tokens, logprobs in answers:
        ids = torch.tensor(tokens)
        expected = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        errors = (expected - torch.tensor(logprobs)).abs().nan_to_num(nan=float("inf"))
        worst = max(worst, float(errors.max()))
    return worst


@torch.no_grad()
def rounding_errors(path: Path, answers: Answers) -> tuple[float, float]:
    """Returns the median errors of the answers' log-probs, and of transformers in bfloat16 on the same tokens, relative
    to transformers in float32 with the weights of a bfloat16 directory. A token with other experts because of rounding
    has a large error in either, which the median ignores."""
    exact = transformers_model(path)
    rounded = transformers_model(path).bfloat16()
    for name, parameter in rounded.named_parameters():
        if name.endswith(DECAY):
            parameter.data = exact.get_parameter(name).data
    errors: list[tuple[float, float]] = []
    for tokens, logprobs in answers:
        ids = torch.tensor(tokens)
        rows = [
            model(ids[None]).logits[0].float().log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            for model in (exact, rounded)
        ]
        engine = torch.tensor(logprobs)
        errors += zip((engine - rows[0]).abs().tolist(), (rows[1] - rows[0]).abs().tolist(), strict=True)
    ours, theirs = zip(*errors, strict=True)
    return median(ours), median(theirs)


def state(llm: Any) -> dict[str, Tensor]:
    """Returns copies of all tensors of an engine's model (`compared.tensors_of`)."""
    [tensors] = llm.apply_model(tensors_of)
    return dict(tensors)


def unlike(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    """Returns the names of tensors that are not equal bit by bit."""
    return sorted(
        name
        for name in expected.keys() | actual.keys()
        if name not in expected
        or name not in actual
        or expected[name].dtype != actual[name].dtype
        or expected[name].shape != actual[name].shape
        or not torch.equal(_bits(expected[name]), _bits(actual[name]))
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
