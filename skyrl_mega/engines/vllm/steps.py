"""What an engine worker's steps were: how many, of how many tokens each."""

from __future__ import annotations

from collections import Counter
from typing import Any


class StepCounter:
    """Counts the steps of vLLM's model runner by their tokens: while it decodes, one for each sequence that runs.

    Args:
        runner: Whose steps are counted from now on.
    """

    def __init__(self, runner: Any) -> None:
        self.steps: Counter[int] = Counter()
        """Tokens → steps with so many."""
        self.execute = runner.execute_model
        runner.execute_model = self._execute

    def _execute(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if tokens := scheduled.total_num_scheduled_tokens:
            self.steps[tokens] += 1
        return self.execute(scheduled, *args, **kwargs)

    def take(self) -> dict[int, int]:
        """Those since the last time."""
        taken, self.steps = dict(self.steps), Counter()
        return taken
