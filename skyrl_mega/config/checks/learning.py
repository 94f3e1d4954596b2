"""Rules between algorithm, data, reference, critic and asynchrony."""

from __future__ import annotations

from dataclasses import fields

from skyrl_mega.config.derived import has_critic, response_limit
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import AlgorithmConfig, Config, CriticConfig
from skyrl_mega.config.schema.critic import GaeConfig
from skyrl_mega.config.schema.fields import Refusal, Refusals

CORRECTION = "algorithm.importance_cap=2"
"""Usual correction for training on tokens of older weights."""
DEFAULT_STALENESS = 1
"""Default of `asynchrony.max_staleness`."""
MOST_SIMULATED = 16
"""Largest staleness simulated by `--simulate`, above the best values of all modes; the cost of a simulation grows with
each step."""


@raising
def check_samples(c: Config) -> Refusals:
    """Raises a UserError if samples to compare are fewer than 2 or cannot differ (temperature 0), a reference is unused
    or would be the model before its warm-up, or the length penalty exceeds a response."""
    a, samples, compares = c.algorithm, c.data.samples_per_prompt, c.algorithm.advantage_traits.compares
    if samples < 2 and (compares or a.dynamic_sampling.enabled):
        why = f"algorithm.advantage={a.advantage}" if compares else "algorithm.dynamic_sampling"
        alternatives = ["algorithm.advantage=reinforce"] if compares else []
        alternatives += ["algorithm.dynamic_sampling.enabled=false"] if a.dynamic_sampling.enabled else []
        why += " compares the samples of a prompt and needs at least 2"
        yield "data.samples_per_prompt", why, f"or give {' and '.join(alternatives)}"
    if samples > 1 and c.rollout.sampling.temperature == 0:
        why = f"the {samples} samples of a prompt would all be the same; allowed for training is a number above 0"
        yield "rollout.sampling.temperature", why
    if not a.kl.coefficient:
        for name in ("path", "layout", "ranks"):
            if getattr(c.reference, name) is not None:
                why = f"reference.{name} is set: it needs algorithm.kl.coefficient above 0"
                yield "", why, f"give a coefficient above 0, or reference.{name}=null"
    elif c.warmup.steps and c.reference.path is None:
        yield (
            "algorithm.kl.coefficient",
            f"the reference would be the model before its warm-up (warmup.steps = {c.warmup.steps}); give "
            "reference.path, a coefficient of 0, or warmup.steps=0",
        )
    if c.reference.ranks is not None and c.reference.layout is None:
        yield "reference.ranks", "it needs reference.layout; without one the policy's ranks are shared"
    if a.overlong.buffer > response_limit(c.rollout):
        why = f"allowed is at most the {response_limit(c.rollout)} tokens of a response (rollout.max_response_tokens)"
        yield Refusal("algorithm.overlong.buffer", why, settings=("rollout.max_response_tokens",))


@raising
def check_algorithm(c: Config) -> Refusals:
    """Raises a UserError for advantages or a loss without effect (`whiten=group` with one sample, remax at temperature
    0, kl_cov with a single optimizer step), or for `loss_mean=constant` without a length."""
    a, limit = c.algorithm, response_limit(c.rollout)
    if a.whiten == "group" and c.data.samples_per_prompt < 2:
        yield (
            "data.samples_per_prompt",
            "algorithm.whiten=group would bring the only sample of each prompt to 0; give at least 2, or "
            "algorithm.whiten=batch",
        )
    if a.advantage_traits.greedy and c.rollout.sampling.temperature == 0:
        why = f"algorithm.advantage={a.advantage} would compare greedy answers with themselves"
        yield "rollout.sampling.temperature", f"{why}; give a number above 0"
    if a.loss_mean == "constant" and a.loss_mean_length is None:
        yield (
            "algorithm.loss_mean",
            "it needs algorithm.loss_mean_length, what the sum of a sequence's tokens is divided by; give it, such as "
            f"the {limit} tokens of the longest response",
        )
    if a.loss == "kl_cov" and c.data.one_update and a.old_logprobs == "policy":
        yield Refusal(
            "algorithm.loss",
            "the only optimizer step of an RL step would punish nothing, as no token has moved yet; give "
            "data.mini_batch_prompts, data.epochs_per_step of at least 2, or algorithm.loss=clip_cov",
            settings=("data.mini_batch_prompts",),
        )


@raising
def check_critic(c: Config) -> Refusals:
    """Raises a UserError for non-default settings of `critic` or `algorithm.gae` without a critic; with a critic, for a
    `critic.value_clip` of 0, and for a critic's warm-up as long as the run."""
    if not has_critic(c):
        for group, settings, defaults in (
            ("critic", c.critic, CriticConfig()),
            ("algorithm.gae", c.algorithm.gae, GaeConfig()),
        ):
            for field in fields(defaults):
                if getattr(settings, field.name) != getattr(defaults, field.name):
                    why = f"{group}.{field.name} is set: algorithm.advantage={c.algorithm.advantage} has no critic"
                    yield "", why, f"give algorithm.advantage=gae, or leave {group}.{field.name} out"
    elif c.critic.value_clip == 0:
        why = "no value could move; allowed is a number above 0 (PPO has 0.2), or null, which does not clip"
        yield "critic.value_clip", why
    elif c.run.steps and c.critic.warmup_steps >= c.run.steps:
        why = f"allowed is less than run.steps = {c.run.steps}, or the policy would never be trained"
        yield "critic.warmup_steps", why


@raising
def check_asynchrony(c: Config) -> Refusals:
    """Raises a UserError for settings incompatible with `asynchrony.mode`.

    With `off`: a non-default `max_staleness` above 0. With `one_step` and `full`: shared GPUs, offloading, and
    staleness without an off-policy correction (`has_correction`). With `one_step`: a `max_staleness` above 1.
    With `full`: `run.deterministic`, greedy answers, and dynamic sampling with another `mode` than filter or with
    `oversample`.
    """
    mode, staleness, corrected = c.asynchrony.mode, c.asynchrony.max_staleness, has_correction(c.algorithm)
    usual = staleness in (0, DEFAULT_STALENESS)
    if mode == "off":
        if not usual:
            why = "asynchrony.mode=off trains on nothing that is older than its weights"
            fix = "give asynchrony.mode=full, or leave asynchrony.max_staleness out"
            yield "asynchrony.max_staleness", why, fix
        return
    if mode == "one_step" and staleness > 1:
        why = "asynchrony.mode=one_step is one step ahead, allowed is 0 or 1"
        yield "asynchrony.max_staleness", why, "give asynchrony.max_staleness=1, or asynchrony.mode=full for more"
    off = "asynchrony.mode=off" + ("" if usual else " and leave out asynchrony.max_staleness")
    needs = f", and {CORRECTION} for what is stale" if staleness and not corrected else ""
    if c.cluster.shared:
        yield Refusal(
            "asynchrony.mode",
            "engines and policy compute at the same time, and cluster.shared gives them the same GPUs; they take turns "
            f"with {off}, and have GPUs of their own with cluster.shared=false, residency.keep=null{needs} (--simulate "
            "compares both)",
            settings=("cluster.shared", "residency.keep"),
        )
    if c.residency.keep is not None:
        why = "engines and policy compute at the same time, so nothing can take turns"
        yield "asynchrony.mode", why, f"give residency.keep=null{needs}, or {off}"
    if staleness and not corrected:
        yield (
            "asynchrony.max_staleness",
            "the loss would treat tokens of older weights as the present policy's own; give a correction, such as "
            f"{CORRECTION}, algorithm.old_logprobs=engine or algorithm.rejection.level=token, or "
            "asynchrony.max_staleness=0",
        )
    if mode == "full":
        yield from _unsupported_ahead(c)


def _unsupported_ahead(c: Config) -> Refusals:
    """Yields settings not supported by `mode=full`."""
    dynamic, least = c.algorithm.dynamic_sampling, min(c.asynchrony.max_staleness, 1)
    fix = f"leave it out, or give asynchrony.mode=one_step with asynchrony.max_staleness={least}"
    for key, unsupported, why in (
        ("run.deterministic", c.run.deterministic, "the clock decides which groups a step has"),
        (
            "algorithm.dynamic_sampling.mode",
            dynamic.enabled and dynamic.mode != "filter",
            "groups without a signal are left out as they come, and others follow",
        ),
        (
            "algorithm.dynamic_sampling.oversample",
            dynamic.enabled and dynamic.oversample != 1,
            "groups are generated ahead anyway",
        ),
        (
            "algorithm.advantage",
            c.algorithm.advantage_traits.greedy,
            "a greedy answer would be of other weights than the samples that are compared with it",
        ),
    ):
        if unsupported:
            yield key, f"with asynchrony.mode=full {why}", fix


def has_correction(a: AlgorithmConfig) -> bool:
    """Returns True if the loss corrects for tokens sampled by other weights, by use of the engine's log-probs.

    A user's own loss counts as corrected.
    """
    user_loss = ":" in a.loss
    return user_loss or a.rejection.level != "off" or a.importance_cap is not None or a.old_logprobs == "engine"
