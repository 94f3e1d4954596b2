"""Comparison of log-probs by the engine, the policy and transformers for the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from skyrl_mega.batch.make_batch import make_batch
from skyrl_mega.cli.weights_check import opened
from skyrl_mega.config.derived import cutoff_note
from skyrl_mega.trainer.health.mismatch import threshold
from skyrl_mega.trainer.health.step_view import quoted
from skyrl_mega.trainer.rollout_source import RolloutSource
from skyrl_mega.trajectories.sequences import Sequences

if TYPE_CHECKING:
    from skyrl_mega.trainer.run import Run

ENGINE, AGAIN, POLICY, TRANSFORMERS = "engine", "engine again", "policy", "transformers"
APART = 3.0
"""A source is the odd one out if the other two are this many times nearer to each other."""
BEFORE = 16
"""Number of preceding tokens shown with a token."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Differences of two sources of log-probs, in nats, over tokens present in both."""

    first: str
    """Name of the first source, such as `engine`."""
    second: str
    """Name of the second source."""
    tokens: int
    """Number of compared tokens."""
    mean: float
    """Mean absolute difference."""
    p99: float
    """99th percentile of the absolute difference."""
    most: float
    """Maximum absolute difference."""
    signed: float
    """Mean of first minus second."""


@dataclass(frozen=True)
class Worst:
    """A token with one of the largest differences between engine and policy."""

    sample: int
    """Index of the sample in the batch."""
    position: int
    """Position of the token in its sequence, prompt included."""
    text: str
    """The token and the text before it."""
    logprobs: dict[str, float]
    """Source → log-prob of the token; NaN if the source has none."""


@dataclass(frozen=True)
class LogprobComparison:
    """Differences of log-probs, and the verdict."""

    pairs: list[Difference]
    """Differences by pair of sources."""
    worst: list[Worst]
    """Tokens with the largest difference between engine and policy, largest first."""
    verdict: str
    """Sentence for the user: agreement, or the likely source of the difference."""
    agree: bool
    """True if the mean difference of engine and policy is below the run's alarm (`health.mismatch.alarm_mean`)."""


def compare(
    file: str,
    overrides: Sequence[str],
    *,
    prompts: int,
    samples: int,
    worst: int,
    transformers: bool = True,
    as_json: bool = False,
) -> LogprobComparison:
    """Starts policy and engines like the run of a configuration file, answers prompts, and compares log-probs.

    Prompts are answered twice with the same seeds, with a sync in between. Differences between the two answers come
    from neither weights nor settings, but from the engine's order of computation or from a cache surviving a sync.

    Args:
        file, overrides: Configuration file and `group.key=value` settings, as for the launcher.
        prompts, samples: Number of training prompts, from the first and at most all, and of answers per prompt.
        worst: Maximum number of tokens in `worst` of the result.
        transformers: True to also load the model in float32 into this process.
        as_json: True to print nothing on standard output.

    Raises:
        UserError: The settings are wrong.
        ActorFailed: An actor died, raised or did not answer.
        ClusterError: Ray did not start, or lacks the GPUs.
        InfrastructureFault, pyarrow.ArrowException: `data.prepare`, run for absent data, failed.
    """
    with opened(file, overrides, as_json=as_json) as run:
        batch = _sample(run, prompts, samples)
        run.policy.hold([batch])
        logprobs = {ENGINE: batch["rollout_logprobs"].double(), POLICY: _policy(run)}
        with run.console.phase("second sync"):
            run.sync_engines()
        logprobs[AGAIN] = aligned(batch, _sample(run, prompts, samples))
        if transformers:
            with run.console.phase("transformers"):
                logprobs[TRANSFORMERS] = _transformers(batch, Path(run.config.model.path), run.temperature)
        counts = batch["mask"] != 0
        if "drawn" in batch.columns:
            counts &= batch["drawn"].bool()
        pairs = pairs_of({name: values[counts].numpy() for name, values in logprobs.items()})
        alarm = threshold(run.config, "alarm", "mean")
        verdict, agree = verdict_of(pairs, alarm, cutoff_note(run.config))
        decode = _source(run).generator.chat.text
        return LogprobComparison(pairs, worst_of(batch, logprobs, counts, worst, decode), verdict, agree)


def pairs_of(logprobs: dict[str, np.ndarray]) -> list[Difference]:
    """Returns the differences for pairs of sources: engine, policy and transformers, and the engine with itself again.
    Pairs of an absent source are left out; a pair without a common token has differences of 0, and `tokens` 0.

    Args:
        logprobs: Source → log-probs, float [T], of the same tokens; NaN marks a missing log-prob.
    """
    names = [(ENGINE, POLICY), (ENGINE, TRANSFORMERS), (POLICY, TRANSFORMERS), (ENGINE, AGAIN)]
    pairs = []
    for first, second in names:
        if first in logprobs and second in logprobs:
            difference = logprobs[first] - logprobs[second]
            difference = difference[~np.isnan(difference)]
            distance = np.abs(difference) if len(difference) else np.zeros(1)
            pairs.append(
                Difference(
                    first=first,
                    second=second,
                    tokens=len(difference),
                    mean=float(distance.mean()),
                    p99=float(np.quantile(distance, 0.99, method="inverted_cdf")),
                    most=float(distance.max()),
                    signed=float(difference.mean()) if len(difference) else 0.0,
                )
            )
    return pairs


def verdict_of(pairs: list[Difference], alarm: float, cut: str | None) -> tuple[str, bool]:
    """Returns the verdict as text, and True if the mean difference of engine and policy is below `alarm`.

    Args:
        pairs: Result of `pairs_of`; without a pair of engine and policy raises KeyError.
        alarm: Threshold of the mean difference, in nats per token.
        cut: Note about samples from a truncated distribution; None without truncation.
    """
    mean = {(pair.first, pair.second): pair.mean for pair in pairs}
    distance = mean[ENGINE, POLICY]
    repeats = mean.get((ENGINE, AGAIN), 0.0)
    noise = f"; playing again moves the engine itself by {repeats:.1e} nats" if repeats else ""
    if distance < alarm:
        return f"engine and policy agree: {distance:.1e} nats a token, alarm from {alarm:g}{noise}", True
    why = f"; {cut}" if cut else ""
    text = f"engine and policy differ by {distance:.3f} nats a token, alarm from {alarm:g}"
    if (POLICY, TRANSFORMERS) in mean:
        engine, policy = mean[ENGINE, TRANSFORMERS], mean[POLICY, TRANSFORMERS]
        if policy * APART < engine:
            text += ", and the engine is the odd one out: its weights, its kernels or its sampling"
        elif engine * APART < policy:
            text += ", and the policy is the odd one out: its weights, or how it reads config.json"
        else:
            text += ", and both differ from transformers in float32: their precision"
    return text + why + noise, False


def worst_of(
    batch: Sequences,
    logprobs: dict[str, torch.Tensor],
    counts: torch.Tensor,
    most: int,
    decode: Callable[[list[int]], str],
) -> list[Worst]:
    """Returns the tokens with the largest difference between engine and policy, largest first; [] if no token is
    compared.

    Args:
        batch: The answered samples.
        logprobs: Source → log-probs, float [T]; includes engine and policy.
        counts: bool [T]: True for the tokens to compare.
        most: Maximum number of tokens to return.
        decode: Returns the text of tokens.
    """
    distance = torch.where(counts, (logprobs[ENGINE] - logprobs[POLICY]).abs(), -1.0)
    starts = np.concatenate([[0], np.cumsum(batch.lengths.numpy())])
    chosen = []
    for at in distance.topk(min(most, int(counts.sum()))).indices.tolist():
        sample = int(np.searchsorted(starts, at, side="right")) - 1
        begin = max(int(starts[sample]), at - BEFORE)
        text = quoted(decode(batch.tokens[begin : at + 1].tolist()))
        values = {name: float(values[at]) for name, values in logprobs.items()}
        chosen.append(Worst(sample, at - int(starts[sample]), text, values))
    return chosen


def table(comparison: LogprobComparison) -> str:
    """Returns the comparison as text: a table of pairs, a table of the worst tokens, and the verdict."""
    lines = [f"{'':28} {'tokens':>7} {'mean':>9} {'p99':>9} {'max':>9} {'signed':>10}"]
    for p in comparison.pairs:
        name = f"{p.first} – {p.second}"
        lines.append(f"{name:28} {p.tokens:7} {p.mean:9.2e} {p.p99:9.2e} {p.most:9.2e} {p.signed:+10.2e}")
    if comparison.worst:
        names = list(comparison.worst[0].logprobs)
        lines += [
            "",
            f"{'sample':>6} {'at':>5} " + " ".join(f"{name:>12}" for name in names) + "  text, up to the token",
        ]
        for w in comparison.worst:
            values = " ".join(f"{'·' if math.isnan(v) else format(v, '.4f'):>12}" for v in w.logprobs.values())
            lines.append(f"{w.sample:6} {w.position:5} {values}  {w.text}")
    return "\n".join([*lines, "", comparison.verdict])


def _source(run: Run) -> RolloutSource:
    """Returns the source of rollouts, as runs from `opened` never generate ahead."""
    assert isinstance(run.rollouts, RolloutSource)
    return run.rollouts


def _sample(run: Run, prompts: int, samples: int) -> Sequences:
    config = run.config
    chosen = _source(run).prompts[:prompts]
    run.residency.enter("generate")
    with run.console.phase("generate"):
        seed = f"{config.run.seed}/logprobs"
        groups = _source(run).generator.generate(chosen, samples, config.rollout.sampling, seed=seed)
    batch = make_batch(groups, config.algorithm, config.rollout)
    batch.read_tokens()
    batch.tokens["mask"] = batch.trained_here.float()  # include answers left out of a run's loss
    return batch.tokens


def _policy(run: Run) -> torch.Tensor:
    run.residency.enter("logprobs")
    with run.console.phase("policy"):
        return run.policy.logprobs(temperature=run.temperature)[0].double()


def aligned(batch: Sequences, again: Sequences) -> torch.Tensor:
    """Returns the engine's log-probs of the second answers at the tokens of the first answers, float64 [T].

    From the first token of a sample that differs between both answers on, the values are NaN.

    Args:
        batch: The first answers, with T tokens.
        again: Second answers to the same prompts, in the same order.
    """
    values = torch.full((len(batch.tokens),), math.nan, dtype=torch.float64)
    start = second = 0
    for length, other in zip(batch.lengths.tolist(), again.lengths.tolist(), strict=False):
        common = min(length, other)
        same = batch.tokens[start : start + common] == again.tokens[second : second + common]
        common = int(same.long().cumprod(0).sum())
        values[start : start + common] = again["rollout_logprobs"][second : second + common].double()
        start, second = start + length, second + other
    return values


def _transformers(batch: Sequences, path: Path, temperature: float) -> torch.Tensor:
    """Returns log-probs of the float32 model, float64 [T]; 0 for first tokens."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    values, start = torch.zeros(len(batch.tokens), dtype=torch.float64), 0
    with torch.no_grad():
        for length in batch.lengths.tolist():
            tokens = batch.tokens[start : start + length].long()
            logits = model(tokens[None]).logits[0, :-1].double() / temperature
            values[start + 1 : start + length] = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            start += length
    return values
