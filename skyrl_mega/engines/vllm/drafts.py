"""Draft tokens only where they save time: a vLLM scheduler that measures steps with and without drafts. Its messages
also carry the counts of draft tokens.

Checking drafts makes a step longer, and an accepted draft saves a step. Which of both wins depends on the texts and on
the number of running sequences, so the scheduler measures: for each range of batch sizes the seconds per token of each
sequence, with drafts and without. The better way is used for `HOLD` steps, then the other is measured again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import fmean, median
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from skyrl_mega.config.drafts import WEIGHTLESS
from skyrl_mega.engines.vllm.plugin import MAY_HOLD
from skyrl_mega.engines.vllm.spec import ADAPTIVE

SUPPRESSED = "skyrl_mega_suppressed"
"""Attribute of a schedule: True if the drafts proposed in this step will be dropped."""
PROBE = 24
"""Steps measured in a way before it is compared with the other."""
HOLD = 600
"""Steps in the better way before the other is measured again: at most 4 % of the steps are in the worse way."""


class Trial:
    """The comparison of both ways, with drafts (True) and without (False), in a range of batch sizes."""

    def __init__(self) -> None:
        self.drafting = True
        """The way of the next step."""
        self.best = True
        """The better way, as far as known."""
        self.left = PROBE
        """Steps left before the next decision."""
        self.steps: dict[bool, deque[tuple[float, float]]] = {way: deque(maxlen=PROBE) for way in (True, False)}
        """The last measured steps of each way: seconds, and mean tokens of a sequence."""

    def add(self, drafting: bool, seconds: float, tokens: float) -> None:
        """Adds a measured step. After the last of `left` steps chooses the way of the following steps, `drafting`. A
        step of the other way, prepared before the last choice, is measured and does not count in `left`.

        Args:
            drafting: True if the step could check drafts.
            seconds: Seconds of the step.
            tokens: Mean number of tokens that a sequence got.
        """
        self.steps[drafting].append((seconds, tokens))
        if drafting is not self.drafting:  # the step was prepared before the last decision
            return
        self.left -= 1
        if self.left:
            return
        if self.drafting is self.best:  # measures the other way
            self.drafting, self.left = not self.best, PROBE
            return
        self.best = self.seconds(True) <= self.seconds(False)
        self.drafting, self.left = self.best, HOLD

    def seconds(self, drafting: bool) -> float:
        """Returns the measured seconds per token of a sequence, with or without drafts: the median seconds of the last
        `PROBE` steps of this way, which ignores a pause, over their mean number of tokens for a sequence.

        Raises:
            statistics.StatisticsError: No step was measured in this way.
        """
        steps = self.steps[drafting]
        return median(seconds for seconds, _ in steps) / fmean(tokens for _, tokens in steps)


class Trials:
    """A `Trial` for each range of batch sizes, fed with the steps of a scheduler.

    A step counts if it only decodes, and its sequences are among the sequences of the step before: its time is then the
    time since the end of that step.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.by_range: dict[int, Trial] = {}
        """Trials by the number of binary digits of the number of sequences."""
        self.names: frozenset[str] = frozenset()
        """Sequences of the last step, if it only decoded; else none."""
        self.proposing = self.prepared = True
        """True if drafts are proposed in the step under way, and if drafts were proposed for it."""
        self.ended = 0.0
        """Time of the end of the last step."""

    def begin(self, sequences: int) -> bool:
        """Begins a step of this many sequences. Returns True if drafts should be proposed in the step."""
        self.proposing = self._trial(sequences).drafting
        return self.proposing

    def end(self, names: Iterable[str], decodes: bool, tokens: int) -> None:
        """Records the end of a step, and measures the step if it only decoded (see the class).

        Args:
            names: Sequences of the step; at least one.
            decodes: True if no sequence began or returned in this step.
            tokens: Tokens sampled for all sequences.
        """
        now, current = self.clock(), frozenset(names)
        if decodes and current <= self.names and tokens:
            self._trial(len(current)).add(self.prepared, now - self.ended, tokens / len(current))
        self.names, self.ended = (current if decodes else frozenset()), now
        self.prepared = self.proposing

    def _trial(self, sequences: int) -> Trial:
        return self.by_range.setdefault(sequences.bit_length(), Trial())


class CountingScheduler(Scheduler):
    """A scheduler that sends the counts of draft tokens in every step of a request without `MAY_HOLD`.

    vLLM sends the counts in the last step only. A request that the caller ends, by a stop string or a time limit, has
    no last step in vLLM's scheduler.
    """

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Adds a step's sampled tokens to the requests as vLLM does, and returns client → vLLM's messages.

        Each message of a request without `MAY_HOLD` gets the request's counts of draft tokens. A request's last message
        stays unchanged: vLLM adds the counts to that message for every request.
        """
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for message in messages.values():
            for output in message.outputs:
                request = self.requests.get(output.request_id)  # None after the request's last step
                if request is not None and not (request.sampling_params.extra_args or {}).get(MAY_HOLD):
                    output.spec_decode_metrics = request.spec_decode_metrics
        return messages


class AsyncCountingScheduler(CountingScheduler, AsyncScheduler):
    """A `CountingScheduler` that schedules a step before the end of the step before, as vLLM does with the drafts of a
    model or a head on a GPU."""


def draft_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Returns the scheduler of an engine with draft tokens: an `AsyncCountingScheduler` if vLLM schedules
    asynchronously, else an `AdaptiveScheduler`. Called by vLLM in place of a class, with the arguments of vLLM's
    scheduler."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    return (AsyncCountingScheduler if asynchronous else AdaptiveScheduler)(vllm_config=vllm_config, **kwargs)


class AdaptiveScheduler(CountingScheduler):
    """vLLM's scheduler; with `ADAPTIVE` it drops proposed drafts where checking them costs more than it saves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = self.vllm_config.additional_config
        self.trials = Trials() if isinstance(given, dict) and given.get(ADAPTIVE) else None

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Returns vLLM's schedule of the next step. With `ADAPTIVE`, a schedule with tokens gets the attribute
        `SUPPRESSED`: True if the drafts proposed in this step will be dropped."""
        scheduled = super().schedule(throttle_prefills)
        if self.trials is not None and (count := len(scheduled.num_scheduled_tokens)):
            setattr(scheduled, SUPPRESSED, not self.trials.begin(count))
        return scheduled

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Adds a step's sampled tokens to the requests as vLLM does, and returns client → vLLM's messages, with counts
        of draft tokens (`CountingScheduler`).

        With `ADAPTIVE` also reports the end of the step and the number of its tokens to `trials`.
        """
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        if self.trials is not None and scheduler_output.num_scheduled_tokens:
            cached = scheduler_output.scheduled_cached_reqs
            decodes = not scheduler_output.scheduled_new_reqs and not cached.resumed_req_ids
            tokens = sum(map(len, model_runner_output.sampled_token_ids))
            self.trials.end(scheduler_output.num_scheduled_tokens, decodes, tokens)
        return messages

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Gives the proposed drafts to the requests. Gives empty drafts instead after a step marked with
        `SUPPRESSED`."""
        if self.trials is not None and not self.trials.prepared:
            draft_token_ids = DraftTokenIds(draft_token_ids.req_ids, [[] for _ in draft_token_ids.req_ids])
        super().update_draft_token_ids(draft_token_ids)


class Suppressor:
    """The part of `ADAPTIVE` in an engine worker: proposes no drafts in a step marked with `SUPPRESSED`, and counts
    steps.

    Args:
        runner: vLLM's model runner. Its drafter is skipped only if the drafter has no weights: a draft model must read
            every token.
    """

    def __init__(self, runner: Any) -> None:
        self.steps = self.suppressed = 0
        self.skip = False
        """True in a step whose proposals will be dropped."""
        self.execute, runner.execute_model = runner.execute_model, self._execute
        if runner.speculative_config.method in WEIGHTLESS and hasattr(runner, "drafter"):
            self.propose, runner.drafter.propose = runner.drafter.propose, self._propose

    def _execute(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduled.total_num_scheduled_tokens:
            self.skip = getattr(scheduled, SUPPRESSED, False)
            self.steps += 1
            self.suppressed += self.skip
        return self.execute(scheduled, *args, **kwargs)

    def _propose(self, *args: Any, **kwargs: Any) -> Any:
        if self.skip:
            sampled = next(value for value in args if isinstance(value, list))
            return [[] for _ in sampled]
        return self.propose(*args, **kwargs)

    def take(self) -> tuple[int, int]:
        """Returns the number of steps, and the number of these steps marked with `SUPPRESSED`, since the previous call;
        counts from 0 again."""
        taken, self.steps, self.suppressed = (self.steps, self.suppressed), 0, 0
        return taken
