"""The comparison that a server outside of the run must pass after each weight sync: its log-probs with the policy's.

A server states the version of its weights, and may be wrong: a load that failed silently, another model, a cache of old
prefixes. Each such server continues a few fixed prompts. The policy computes the log-probs of these tokens in a forward
pass of some dozen tokens, with the weights just sent. Until then the server's completions are held back, so no token
of wrong weights reaches a trajectory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from skyrl_mega.cluster.calls import settle
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.config.derived import engine_precision, length_limit
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.endpoints import entries
from skyrl_mega.engines.base import Completion, Request, Sampling
from skyrl_mega.megatron.group import TrainGroup
from skyrl_mega.telemetry.events import Event
from skyrl_mega.trainer.health.mismatch import ALARM_MEAN
from skyrl_mega.trajectories.sequences import Sequences

PROMPTS, PROMPT, TOKENS = 4, 8, 12
"""Number of probes, their length, and the tokens that a server continues each with."""
NOISE = 1e-6
"""Smallest numerical difference of log-probs assumed between a server and the policy, in nats."""
BEYOND = 4.0
"""Smallest change of the policy's log-probs, in multiples of the numerical difference, that can tell new weights from
old. With up to this numerical difference in both comparisons, a server with new weights follows at least half of the
change, and a server with old weights none."""
STILL = 1e-3
"""Change of the policy's log-probs, in nats, from which a server with new weights cannot repeat all log-probs, even if
they are rounded to BF16."""
FOLLOWS = 0.5
"""Smallest share of the policy's change that a server with new weights shows."""
TRUST_S = 30.0
"""Seconds for a server's actor to release completions."""
TWICE = 2
"""Failed comparisons in a row after which a server is left out for good."""


@dataclass(frozen=True)
class Change:
    """The change of log-probs between two comparisons of a server."""

    moved: float
    """Root mean square of the change of the policy's log-probs, in nats."""
    share: float
    """Share of this change in the server's: 1 for a server with the new weights, 0 for a server with the old."""
    noise: float
    """Root mean square of the numerical difference between server and policy in the earlier comparison, in nats."""
    still: bool = False
    """True if every log-prob of the server is the same, bit for bit."""

    @property
    def tells(self) -> bool:
        """True if the change is large enough to tell new weights from old."""
        return self.moved > (min(STILL, BEYOND * self.noise) if self.still else BEYOND * self.noise)


@dataclass(frozen=True)
class Answers:
    """A server's completions of the probes, beside the policy's log-probs of the same tokens."""

    completions: list[Completion]
    policy: list[np.ndarray]
    """Log-probs of each completion's tokens."""

    @property
    def difference(self) -> float:
        """Mean absolute difference over all tokens, in nats; infinite without tokens."""
        pairs = zip(self.completions, self.policy, strict=True)
        differences = np.concatenate([np.abs(np.asarray(c.logprobs) - p) for c, p in pairs] or [np.zeros(0)])
        return float(differences.mean()) if len(differences) else math.inf

    def since(self, earlier: Answers) -> Change | None:
        """Returns the change since an earlier answer, over the tokens that both have in common from the beginning of
        each completion; None if no token, or fewer than half of the earlier tokens, are in common, as after a large
        change or without seeded sampling."""
        policy, server, noise, total = [], [], [], 0
        for now, then, a, b in zip(self.completions, earlier.completions, self.policy, earlier.policy, strict=True):
            pairs = zip(now.tokens, then.tokens, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            total += len(then.tokens)
            policy.append(a[:same] - b[:same])
            server.append(np.subtract(now.logprobs[:same], then.logprobs[:same]))
            noise.append(np.subtract(then.logprobs[:same], b[:same]))
        moved, followed, before = (np.concatenate(parts).astype(float) for parts in (policy, server, noise))
        if 2 * len(moved) < total or not len(moved):
            return None
        size = float(moved @ moved)
        share = float(followed @ moved) / size if size else 1.0
        difference = math.sqrt(float(before @ before) / len(moved))
        return Change(math.sqrt(size / len(moved)), share, max(NOISE, difference), still=not followed.any())


class Trust:
    """The comparisons of all servers outside of a run (`rollout.endpoints`).

    Args:
        config: The settings.
        policy: The policy, with the parameters on the devices when `verify` is called.
        fleet: The engines.
        vocab: Number of token ids.
        say: Prints a message for the user.
    """

    def __init__(
        self, config: Config, policy: TrainGroup, fleet: Fleet, vocab: int, say: Callable[[str], None]
    ) -> None:
        self.config, self.policy, self.fleet, self.say = config, policy, fleet, say
        self.requests = probes(vocab, length_limit(config.rollout))
        self.sampling = Sampling(temperature=config.rollout.sampling.temperature or 1.0)
        self.earlier: dict[int, Answers] = {}
        """Engine rank → earlier answers to compare with: of the first comparison, then of the latest that showed new
        weights. Small changes of several syncs thus add up until the sum is large enough to judge."""
        self.failures: dict[int, int] = {}
        """Engine rank → failed comparisons in a row."""

    def verify(self, ranks: list[int], version: int) -> list[int]:
        """Compares the log-probs of all servers outside of the run with the policy's, and returns the ranks, in the
        given order, that may serve `version`: all engines of the run, and the servers without a difference, which then
        release their completions. Other servers are retired, or left out for good after `TWICE` failures in a row, with
        a message.

        Args:
            ranks: Ranks of the engines and servers with new weights.
            version: Version of the weights just sent.

        Raises:
            ActorFailed: A policy rank failed, or no restart is left.
        """
        foreign = [rank for rank in ranks if getattr(self.fleet.facts[rank], "foreign", False)]
        if not foreign:
            return ranks
        limit = self.config.rollout.request_timeout_s  # a server may have to end a request first
        answered = self.fleet.call_or_retire(foreign, "sample_probes", limit, self.requests, self.sampling)
        wrong = {
            rank: problem
            for rank, answers in self._scored(answered).items()
            if (problem := self._problem(rank, answers, version))
        }
        for rank, problem in wrong.items():
            self._leave_out(rank, problem, version)
        trusted = [rank for rank in foreign if rank in answered and rank not in wrong]
        settle(self.fleet.submit(trusted, "trust"), TRUST_S, TRUST_S)
        return [rank for rank in ranks if rank not in foreign or rank in trusted]

    def _scored(self, answered: dict[int, list[Completion]]) -> dict[int, Answers]:
        """Returns each server's answers with the policy's log-probs, from a single forward pass."""
        prompts = {request.id: list(request.tokens) for request in self.requests}
        completions = [completion for each in answered.values() for completion in each]
        if not completions:
            return {}
        batch = Sequences.of([[*prompts[c.id], *c.tokens] for c in completions])
        counts = [np.r_[np.zeros(len(prompts[c.id])), np.ones(len(c.tokens))] for c in completions]
        batch["weights"] = torch.from_numpy(np.concatenate(counts).astype(np.float32))
        self.policy.hold([batch])
        logprobs = self.policy.logprobs(temperature=self.sampling.temperature)[0].numpy()
        ends = np.cumsum([len(part) for part in counts])
        scored = iter([logprobs[end - len(c.tokens) : end] for end, c in zip(ends, completions, strict=True)])
        return {rank: Answers(each, [next(scored) for _ in each]) for rank, each in answered.items()}

    def _problem(self, rank: int, answers: Answers, version: int) -> str:
        """Returns the reason why a server cannot have the weights of `version`, a phrase to follow "it"; "" if nothing
        speaks against these weights."""
        stated = {each for completion in answers.completions for each, _ in completion.versions}
        if stated != {version}:
            return f"states version {', '.join(map(str, sorted(stated)))}"
        allowed = self._allowed(rank)
        if not answers.difference <= allowed:
            return f"differs from the policy by {answers.difference:.3g} nats a token (allowed are {allowed:g})"
        change = answers.since(self.earlier[rank]) if rank in self.earlier else None
        if change is not None and not change.tells:
            return ""
        if change is not None and change.share < FOLLOWS:
            return f"keeps old weights: the policy's log-probs moved by {change.moved:.3g} nats, and its own did not"
        self.earlier[rank] = answers
        self.failures[rank] = 0
        return ""

    def _allowed(self, rank: int) -> float:
        alarm = self.config.health.mismatch.alarm_mean
        default = ALARM_MEAN[engine_precision(self.config)] if alarm is None else alarm or math.inf
        listed = dict(enumerate(entries(self.config.rollout.endpoints), self.config.rollout.engines))
        entry = listed.get(rank)  # a server that joined later has no entry
        return default if entry is None or entry.max_difference is None else entry.max_difference

    def _leave_out(self, rank: int, problem: str, version: int) -> None:
        self.failures[rank] = self.failures.get(rank, 0) + 1
        name = f"{self.fleet.group.name}-{rank}"
        facts = {"actor": name, "rank": rank, "version": version, "problem": problem}
        text = f"{name} does not serve version {version}: it {problem}; none of its tokens of this version are used"
        self.say(Event("engine_differs", text, **facts))
        if self.failures[rank] < TWICE:
            self.fleet.retire(rank, f"it {problem}")
        else:
            self.fleet.leave(rank, f"it {problem}, for the second time", 0.0)


def probes(vocab: int, longest: int) -> list[Request]:
    """Returns `PROMPTS` requests: a prompt of random tokens, at most `TOKENS` new tokens, and a fixed seed each. Equal
    arguments give equal requests.

    Args:
        vocab: Number of token ids.
        longest: Maximum length of prompt and completion together, at least 2.
    """
    draw = random.Random(vocab)
    prompt = max(1, min(PROMPT, longest // 2))
    tokens: Sequence[Sequence[int]] = [[draw.randrange(vocab) for _ in range(prompt)] for _ in range(PROMPTS)]
    new = max(1, min(TOKENS, longest - prompt))
    return [Request(f"probe-{i}", each, new, seed=i) for i, each in enumerate(tokens)]
