"""The number of an engine worker's steps, by tokens per step."""

from __future__ import annotations

from collections import Counter
from typing import Any


class StepCounter:
    """A counter of the steps of vLLM's model runner by tokens: while decoding, a token for each running sequence.

    Args:
        runner: Model runner; steps are counted from now on.
    """

    def __init__(self, runner: Any) -> None:
        self.steps: Counter[int] = Counter()
        """Number of steps, by tokens per step."""
        self.execute = runner.execute_model
        runner.execute_model = self._execute

    def _execute(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if tokens := scheduled.total_num_scheduled_tokens:
            self.steps[tokens] += 1
        return self.execute(scheduled, *args, **kwargs)

    def take(self) -> dict[int, int]:
        """Returns tokens in a step → number of such steps since the previous call ({} without steps), and starts again
        from 0."""
        taken, self.steps = dict(self.steps), Counter()
        return taken
