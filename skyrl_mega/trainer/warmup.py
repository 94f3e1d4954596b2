"""The supervised warm-up.

A model that starts from nothing first learns from demonstrations, as part of the run and named as such.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from skyrl_mega.algorithms.losses import token_weights
from skyrl_mega.config.schema import Config, OptimizerConfig
from skyrl_mega.data.rows import Demonstration
from skyrl_mega.policy.policy import Policy
from skyrl_mega.policy.sequences import Sequences
from skyrl_mega.rollout.chat import Chat


def encode(demonstrations: list[Demonstration], chat: Chat) -> Sequences:
    """Prompt, response and end token of each demonstration; field `mask` covers response and end token."""
    prompts = [chat.first(d.messages) for d in demonstrations]
    responses = [[*chat.encode(d.response), chat.tokenizer.eos_token_id] for d in demonstrations]
    batch = Sequences.of([p + r for p, r in zip(prompts, responses, strict=True)])
    inside = np.arange(len(batch.tokens)) - batch.per_token(batch.starts)
    batch.fields["mask"] = (inside >= batch.per_token(np.array([len(p) for p in prompts]))).astype(np.float32)
    return batch


def warm_up(policy: Policy, demonstrations: Sequences, config: Config, progress: Callable[[int], None]) -> float:
    """`warmup.steps` optimizer steps of cross-entropy, then a fresh optimizer for RL.

    Returns the last loss, nats per token.
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
        )
    )
    rng = np.random.default_rng([config.run.seed, 17])
    loss = float("nan")
    for step in range(settings.steps):
        rows = rng.choice(len(demonstrations), settings.batch, replace=settings.batch > len(demonstrations))
        batch = demonstrations.take(rows)
        mask, lengths = torch.from_numpy(batch.fields["mask"]), torch.from_numpy(batch.lengths)
        batch.fields = {"weights": token_weights(mask, lengths, "tokens").numpy()}
        loss = policy.train(batch, temperature=1.0, supervised=True)["loss"]
        progress(step + 1)
    policy.reset_optimizer(optimizer)
    return loss
