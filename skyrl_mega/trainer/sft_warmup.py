"""The supervised warm-up.

A model without any prior skill first learns from demonstrations, as a named part of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from skyrl_mega.algorithms.token_weights import token_weights
from skyrl_mega.config.schema import Config, EnvironmentConfig, OptimizerConfig
from skyrl_mega.data.rows import Demonstration
from skyrl_mega.envs import registry
from skyrl_mega.envs.base import Message
from skyrl_mega.megatron.group import TrainGroup
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trajectories.sequences import Sequences, flat


def encode(
    demonstrations: list[Demonstration], chat: Renderer, environments: EnvironmentConfig | None = None
) -> Sequences:
    """Tokenizes demonstrations exactly as a rollout would, and returns the sequences in the same order.

    The column `mask` (float32) is 1 on the learned tokens: assistant messages with tool calls and end token; 0 on
    prompts and on environment messages between turns.

    Args:
        demonstrations: The demonstrations.
        chat: Tokenizer and template.
        environments: The environment settings: a prompt lists the environment's tools. None takes the defaults.

    Raises:
        UserError: The chat template rejects a demonstration or does not write its tool calls, a text is too long, or an
            environment's class cannot be used.
    """
    config = environments or EnvironmentConfig()
    names = {d.env_class or config.default_name or "" for d in demonstrations}
    tools = {name: registry.tools(name, config) if name in registry.names(config) else [] for name in names}
    encoded = [_encode(d, chat, tools[d.env_class or config.default_name or ""]) for d in demonstrations]
    batch = Sequences.of([tokens for tokens, _ in encoded])
    batch["mask"] = flat([mask for _, mask in encoded], np.float32)
    return batch


def _encode(demonstration: Demonstration, chat: Renderer, tools: list[dict[str, Any]]) -> tuple[list[int], np.ndarray]:
    """Returns the tokens and the mask of learned tokens (float32)."""
    parts = [(chat.render(demonstration.messages, tools), 0)]
    observations: list[Message] = []
    last = len(demonstration.turns) - 1
    for place, message in enumerate(demonstration.turns):
        if message["role"] != "assistant":
            observations.append(message)
            continue
        if len(parts) > 1:
            parts.append((chat.following(chat.end, observations, tools), 0))
            observations = []
        parts.append((chat.turn(message, ends=place == last or not chat.one_message), 1))
    tokens = [token for part, _ in parts for token in part]
    return tokens, np.repeat(np.array([learned for _, learned in parts], np.float32), [len(part) for part, _ in parts])


def warm_up(policy: TrainGroup, demonstrations: Sequences, config: Config, progress: Callable[[int], None]) -> float:
    """Trains the policy by `warmup.steps` optimizer steps of cross-entropy with the optimizer settings of `warmup`,
    resets the optimizer for RL, and returns the last step's loss in nats per token; NaN with `warmup.steps` 0.

    Args:
        policy: The policy's ranks.
        demonstrations: Result of `encode`.
        config: The settings.
        progress: Called with the number of steps done after each step.

    Raises:
        ActorFailed: A rank failed.
    """
    settings = config.warmup
    optimizer = config.policy.optimizer
    policy.reset_optimizer(
        OptimizerConfig(
            lr=settings.lr,
            schedule="linear",
            warmup_steps=min(10, settings.steps // 2),
            decay_steps=settings.steps,
            beta1=optimizer.beta1,
            beta2=0.95,
            eps=optimizer.eps,
            weight_decay=0.0,
            clip_grad=1.0,
            moments=optimizer.moments,
            streamed=optimizer.streamed,
        )
    )
    rng = np.random.default_rng([config.run.seed, 17])
    loss = float("nan")
    for step in range(settings.steps):
        rows = rng.choice(len(demonstrations), settings.batch, replace=settings.batch > len(demonstrations))
        batch = demonstrations.take(torch.from_numpy(rows))
        batch["weights"] = token_weights(batch.columns.pop("mask").values, batch.lengths, "tokens")
        policy.hold([batch])
        loss = policy.train(temperature=1.0, loss="supervised")["loss"]
        progress(step + 1)
    policy.reset_optimizer(optimizer)
    return loss
