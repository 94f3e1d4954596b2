"""The gradient equals the sum over turns, added up by hand in float64, for every cut of trajectories into samples."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from skyrl_mega.algorithms.losses import LossInputs, find
from skyrl_mega.batch.make_batch import Batch
from skyrl_mega.batch.samples import common_tokens, samples_of
from skyrl_mega.config.schema import AlgorithmConfig, EnvironmentConfig, OverlongConfig, RolloutConfig
from skyrl_mega.config.schema.losses import GspoConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.megatron.packing import pack
from skyrl_mega.megatron.shared_prefixes import common_with_previous
from skyrl_mega.models.char_tokenizer import EOS, VOCABULARY
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trajectories.sequences import Sequences
from skyrl_mega.trajectories.trajectory import Group, Kind, Status
from tests.support.batches import make_batch, mini_batches, token_advantages
from tests.support.scripted import Scripted, play

USER = EnvironmentConfig(
    classes={name: f"tests.rollout.user_envs:{name.capitalize()}" for name in ("talk", "rewriting")}
)
TURNS = 5
GROUPS, SAMPLES = 3, 4
MICRO = 5
"""Trajectories per group of `loss_mean=micro_batches`; the last group has two."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sets one torch thread: for tiny products, threads only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Played:
    """Trajectories by group, and each trajectory's turns as seen by the policy."""

    groups: list[Group]
    turns: list[list[tuple[Request, Completion]]]


def played(chat: Renderer, env: str) -> Played:
    """Plays random lines with random rewards; one trajectory is truncated, one failed."""
    rng = random.Random(env)
    letters = [c for c in VOCABULARY if len(c) == 1 and c.isascii()]
    policies, scripts = [], []
    for place in range(GROUPS * SAMPLES):
        lines = ["".join(rng.choices(letters, k=rng.randint(1, 9))) + EOS for _ in range(TURNS)]
        policies.append(Scripted(chat, lines))
        prompt = Prompt(place // SAMPLES, [{"role": "user", "content": "hello"}], env, {"extra_info": {}})
        scripts.append((prompt, policies[-1]))
    # Half of the trajectories have fewer turns.
    whole = play(chat, USER, scripts[::2], turns=TURNS, rewrites=True)
    short = play(chat, USER, scripts[1::2], turns=2, rewrites=True)
    trajectories = [t for pair in zip(whole, short, strict=True) for t in pair]
    for t in trajectories:
        t.status, t.reward = Status.COMPLETED, rng.choice([0.0, 0.25, 1.0, 3.0])
    trajectories[5].status, trajectories[8].status = Status.TRUNCATED_TIME, Status.ERROR_ENV
    by_prompt = [trajectories[g * SAMPLES : (g + 1) * SAMPLES] for g in range(GROUPS)]
    groups = [Group(samples[0].prompt, samples) for samples in by_prompt]
    return Played(groups, [policy.turns for policy in policies])


def batch_of(groups: list[Group], algorithm: AlgorithmConfig, step_wise: str) -> Batch:
    """Returns a batch with advantages; no response is near the limit."""
    rollout = RolloutConfig(max_response_tokens=1000, step_wise=step_wise)
    batch = make_batch(groups, algorithm, rollout)
    batch.tokens["advantages"] = token_advantages(batch, algorithm)
    return batch


def small_model(seed: int) -> LlamaForCausalLM:
    """Returns a random model in float64."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.4,
        use_cache=False,
    )
    return LlamaForCausalLM(config).double()


def token_logprobs(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Returns the log-prob of each token given the previous tokens, [T]; 0 for the first token."""
    given = torch.tensor([tokens])
    logits = model(given).logits[0, :-1].log_softmax(-1)
    return torch.cat([torch.zeros(1).double(), logits.gather(1, given[0, 1:, None])[:, 0]])


def gradient_of(model: LlamaForCausalLM, loss: torch.Tensor) -> torch.Tensor:
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in gradients])


def by_hand(
    play: Played, model: LlamaForCausalLM, old: LlamaForCausalLM, algorithm: AlgorithmConfig
) -> tuple[float, torch.Tensor]:
    """Returns loss and gradient computed turn by turn from the policy's requests and answers; GRPO, clip and cap as in
    the papers."""
    flat = [t for group in play.groups for t in group.trajectories]
    advantage = {}
    for group in play.groups:
        judged = [t for t in group.trajectories if t.status is not Status.ERROR_ENV]
        rewards = torch.tensor([t.reward for t in judged]).double()
        for t in judged:
            spread = rewards.std() + 1e-6 if rewards.std() > 0 else 1.0
            advantage[id(t)] = float((t.reward - rewards.mean()) / spread)
    counts = [t.status is Status.COMPLETED for t in flat]
    tokens = [sum(len(completion.tokens) for _, completion in turns) for turns in play.turns]
    loss = torch.zeros(()).double()
    for place, (t, turns, counted, token_count) in enumerate(zip(flat, play.turns, counts, tokens, strict=True)):
        if not counted:
            continue
        weight = 1 / (sum(counts) * token_count)
        if algorithm.loss_mean == "tokens":
            weight = 1 / sum(n for n, c in zip(tokens, counts, strict=True) if c)
        if algorithm.loss_mean == "micro_batches":
            first = place // MICRO * MICRO
            together = zip(tokens[first : first + MICRO], counts[first : first + MICRO], strict=True)
            weight = 1 / (math.ceil(len(flat) / MICRO) * sum(n for n, c in together if c))
        for request, completion in turns:
            whole = [*request.tokens, *completion.tokens]
            now = token_logprobs(model, whole)[len(request.tokens) :]
            before = token_logprobs(old, whole)[len(request.tokens) :].detach()
            ratio = (now - before).exp()
            low, high = 0.8, 1.2
            if algorithm.loss == "gspo":
                ratio, low, high = (now - before).mean().exp().expand(len(now)), 0.99, 1.02
            gain = torch.minimum(ratio * advantage[id(t)], ratio.clamp(low, high) * advantage[id(t)])
            cap = (before - torch.tensor(completion.logprobs).double()).exp().clamp(max=2.0)
            loss = loss - weight * (cap * gain).sum()
    return loss.item(), gradient_of(model, loss)


def by_batch(
    mini: Sequences, model: LlamaForCausalLM, old: LlamaForCausalLM, algorithm: AlgorithmConfig, micros: int
) -> tuple[float, torch.Tensor]:
    """Returns the project's loss and gradient, added up over `micros` micro-batches of the mini-batch's samples."""
    rows = np.random.default_rng(micros).permutation(len(mini))
    total, gradient = 0.0, torch.zeros(())
    for part in np.array_split(rows, micros):
        micro = torch.zeros(()).double()
        for row in part:
            one = mini.take([row])
            packed = pack(one, context=1, context_rank=0, tensor=1)
            by_token = torch.zeros(len(one.tokens), dtype=torch.int64)
            by_token[packed.source[packed.source >= 0]] = packed.answer[packed.source >= 0]
            inputs = LossInputs(
                logprobs_L=token_logprobs(model, one.tokens.tolist()),
                old_L=token_logprobs(old, one.tokens.tolist()).detach(),
                advantages_L=one["advantages"].double(),
                weights_L=one["weights"].double(),
                rollout_L=one["rollout_logprobs"].double(),
                sequence_L=by_token,
                sequences=packed.answers,
            )
            loss, _ = find(algorithm.loss)(inputs, algorithm)
            micro = micro + loss
        total += micro.item()
        gradient = gradient + gradient_of(model, micro)
    return total, gradient


@pytest.mark.parametrize(
    "loss, loss_mean", [("ppo", "tokens"), ("ppo", "sequences"), ("ppo", "micro_batches"), ("gspo", "sequences")]
)
@pytest.mark.parametrize("env, cuts", [("talk", ["off", "turns", "merged"]), ("rewriting", ["turns", "merged"])])
def test_the_gradient_is_that_of_every_turn(
    characters_chat: Renderer, env: str, cuts: list[str], loss: str, loss_mean: str
) -> None:
    """Compares gradients: purely growing trajectories are tested cut and uncut, rewritten ones cut; means over tokens,
    trajectories and groups of trajectories."""
    run = played(characters_chat, env)
    model = small_model(1)
    old = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in old.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    algorithm = AlgorithmConfig(
        loss=loss,
        gspo=GspoConfig(clip_low=0.01, clip_high=0.02),
        loss_mean=loss_mean,
        loss_mean_samples=MICRO,
        importance_cap=2.0,
        overlong=OverlongConfig(filter=True),
    )
    expected, gradient = by_hand(run, model, old, algorithm)
    assert gradient.norm() > 1e-3
    for cut in cuts:
        batch = batch_of(run.groups, algorithm, cut)
        (mini,) = mini_batches(batch, GROUPS, algorithm)
        for micros in (1, 4):
            value, its_gradient = by_batch(mini, model, old, algorithm, micros)
            # Weights and advantages are float32, with errors near 1e-6.
            assert value == pytest.approx(expected, rel=1e-6, abs=1e-9), (cut, micros)
            assert (its_gradient - gradient).norm() < 1e-6 * gradient.norm(), (cut, micros)


def test_a_sample_is_what_the_policy_saw_and_said(characters_chat: Renderer) -> None:
    for env in ("talk", "rewriting"):
        run = played(characters_chat, env)
        for t, turns in zip([t for group in run.groups for t in group.trajectories], run.turns, strict=True):
            t.status = Status.COMPLETED  # the mask of a failed trajectory is 0
            cut = batch_of([Group(t.prompt, [t])], AlgorithmConfig(), "turns")
            assert len(cut.tokens) == len(turns)
            for row, (request, completion) in enumerate(turns):
                sample = cut.tokens.take([row])
                assert sample.tokens.tolist() == [*request.tokens, *completion.tokens]
                assert sample["mask"].tolist() == [0] * len(request.tokens) + [1] * len(completion.tokens)
                given = torch.tensor(completion.logprobs)
                assert torch.equal(sample["rollout_logprobs"][-len(completion.tokens) :], given)
            merged = batch_of([Group(t.prompt, [t])], AlgorithmConfig(), "merged")
            assert merged.tokens["mask"].sum() == sum(t.mask)
            assert len(merged.tokens) == sum(step.kind is Kind.PROMPT for step in t.steps)


@pytest.mark.parametrize("step_wise", ["off", "turns", "merged"])
@pytest.mark.parametrize("env", ["talk", "rewriting"])
def test_the_driver_knows_first_tokens_in_common(characters_chat: Renderer, env: str, step_wise: str) -> None:
    """Compares with the tokens, which also have a few letters in common by chance. Between trajectories with rewrites
    the driver knows nothing, because their adjacent samples are of different conversations."""
    batch = batch_of(played(characters_chat, env).groups, AlgorithmConfig(), step_wise)
    (mini,) = mini_batches(batch, GROUPS, AlgorithmConfig())
    known, found = batch.refs.common, common_with_previous(mini)
    assert (known <= found).all() and (env == "rewriting" or known.sum() > 0.8 * found.sum() > 0)
    groups = played(characters_chat, env).groups
    groups[0].trajectories[1].steps[0].end += 1  # a prompt of its own
    changed = common_tokens(groups, [samples_of(t, step_wise) for g in groups for t in g.trajectories])
    assert changed[int(batch.samples[0])] == 0
    some = torch.tensor([0, 1, 3, 4, 2])
    assert batch.refs.take(some).common.tolist() == [0, known[1], 0, known[4], 0]


def test_mini_batches_are_of_whole_trajectories_whatever_their_samples(characters_chat: Renderer) -> None:
    run = played(characters_chat, "talk")
    batch = batch_of(run.groups, AlgorithmConfig(), "turns")
    assert len(batch.tokens) == sum(t.turns for group in run.groups for t in group.trajectories)
    parts = mini_batches(batch, 2, AlgorithmConfig(loss_mean="sequences"))
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in parts]), batch.tokens.tokens)
    for part, groups in zip(parts, (run.groups[:2], run.groups[2:]), strict=True):
        assert part["weights"].sum() == pytest.approx(1, abs=1e-6)
        learned = [t for group in groups for t in group.trajectories if not t.status.failed]
        row = 0
        for t in (t for group in groups for t in group.trajectories):
            weight = sum(part.take([row + i])["weights"].sum() for i in range(t.turns))
            assert weight == pytest.approx(0 if t.status.failed else 1 / len(learned), rel=1e-5)
            row += t.turns


def test_a_trajectory_without_a_response_is_one_sample_that_counts_for_nothing(characters_chat: Renderer) -> None:
    prompt = Prompt(0, [{"role": "user", "content": "hello"}], "talk", {"extra_info": {}})
    (empty,) = play(characters_chat, USER, [(prompt, Scripted(characters_chat, [""], finish="timeout"))])
    batch = batch_of([Group(prompt, [empty])], AlgorithmConfig(), "turns")
    assert batch.tokens.tokens.tolist() == list(empty.tokens) and not batch.tokens["mask"].any()
