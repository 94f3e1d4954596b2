"""`asynchrony.mode: full`: groups are generated continuously, and each step trains on finished groups.

With P prompts per step and at most K syncs of staleness, at most (K + 1) · P groups are requested and not yet trained
on when a step begins (AReaL, arXiv:2505.24298, equation 3). A step takes the oldest finished groups, but waits if the
remaining old groups would exceed the capacity of later steps: groups already b syncs old must be taken by this step or
the next K - b steps, P each. No group is ever discarded because of age.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout import journal
from skyrl_mega.rollout.generator import LOOK_EVERY_S
from skyrl_mega.rollout.service import Done, RolloutService, Ticket
from skyrl_mega.telemetry.console import Phase
from skyrl_mega.trainer import saved_rollouts
from skyrl_mega.trainer.dynamic_sampling import with_signal
from skyrl_mega.trainer.health.failures import all_failed
from skyrl_mega.trainer.rollouts_ahead import Rollouts, Versions
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.trajectory import Group, Trajectory


class Asynchronous(Rollouts):
    """Keeps the rollout service supplied with groups and selects the groups for each step.

    Args:
        config: The run's settings.
        prompts: The training prompts.
        stream: The order of the prompts.
        service: Generates the groups.
        look: Raises an exception if the run must end.
        refill: Restarts engines after all engines failed.
    """

    def __init__(
        self,
        config: Config,
        prompts: list[Prompt],
        stream: PromptStream,
        service: RolloutService,
        *,
        look: Callable[[], None],
        refill: Callable[[], object],
    ) -> None:
        self.config, self.prompts, self.stream, self.service = config, prompts, stream, service
        self.look, self.refill = look, refill
        self.versions = Versions(config.asynchrony.max_staleness)
        self.steps = 0
        """Number of steps before the current step."""
        self.requested = 0
        """Number of groups requested over the whole run."""
        self.interrupted: list[Ticket] = []
        """Groups in progress at the end of the interrupted run, to be resumed."""
        self.done: dict[int, Done] = {}
        """Finished groups not yet taken by a step, by number."""
        self.taken: tuple[int, list[Done], list[Done]] = (0, [], [])
        """The newest step's number, groups, and dropped groups."""
        self.left_out: list[Done] = []
        """Groups without a signal since the last step."""

    @property
    def wanted(self) -> int:
        """Number of groups that a step needs: `data.prompts_per_step`."""
        return self.config.data.prompts_per_step

    def next_groups(self, step: Step) -> list[Group]:
        """Waits for the step's groups and returns the groups in request order. Also requests further groups, adds all
        trajectories, of dropped groups too, to `step.trajectories` and records metrics of the step. `synced` must have
        been called before.

        With dynamic sampling groups without a signal are dropped on arrival and replaced by new requests, until
        `max_rounds` times a step's groups were dropped, or only a step's groups if every environment in the dropped
        groups failed. Returns fewer groups than `wanted` (`data.prompts_per_step`), perhaps none, after that, and at
        the end of the data. The wait has no time limit, but `look` can end it.

        Raises:
            UserError: A completed trajectory lacks the reward named by `algorithm.dynamic_sampling.reward`.
            ActorFailed: An engine or a rollout worker failed, and none restarts.
            StaleTooFar: A token is older than allowed.
            Exception: `look` or `refill` raised it.
        """
        self.steps = step.number - 1
        with step.phase("generate", total=self.wanted) as progress:
            while (chosen := self._choose()) is None:
                self._wait(progress)
        number, taken, left_out = self.taken
        before, dropped = (taken, left_out) if number == step.number else ([], [])  # a step may take groups repeatedly
        self.taken = step.number, [*before, *chosen], [*dropped, *self.left_out]
        groups = [finished.group for finished in chosen]
        step.trajectories += [t for finished in (*chosen, *self.left_out) for t in finished.group.trajectories]
        if self.config.algorithm.dynamic_sampling.enabled:
            step.record(self._sampling_metrics(groups))
        self.left_out = []
        step.record(self.versions.measure(t for group in groups for t in group.trajectories))
        step.record(
            {
                "asynchrony/groups_done": float(len(self.done)),
                "asynchrony/groups_under_way": float(len(self.service.under_way)),
            }
        )
        return groups

    def synced(self, version: int) -> None:
        """Records the weight version that engines have received; restarted engines accept requests again."""
        self.versions.add(version)
        self.service.engines_changed()

    def prompts_left(self, done: int) -> int:
        """Returns the number of prompts that no step up to number `done` has taken: prompts left in the data, requested
        groups not yet taken, and groups taken by a later step."""
        number, taken, _ = self.taken
        return self.stream.remaining + self._waiting + (len(taken) if number > done else 0)

    def save(self, folder: Path, done: int) -> None:
        """Saves finished groups and, for unfinished groups, the finished samples and the turns played so far.

        Args:
            folder: The checkpoint's folder for rollouts.
            done: Number of the last completed step. Groups taken by a later step are saved too.

        Raises:
            ActorFailed: A rollout worker could not write its turns.
            ClusterError: The arrays of finished trajectories are lost, or writing took too long.
            OSError: A file could not be written, also because `folder` does not exist.
        """
        journal.write(
            journal.file_of(folder, "again"), [turn for ticket in self.interrupted for turn in ticket.recorded]
        )
        self.service.write_turns(folder)  # first: a trajectory that ends in the meantime is then saved as finished
        number, taken, left_out = self.taken
        left_out = [*(left_out if number > done else ()), *self.left_out]
        failed = [finished for finished in left_out if _failed(finished)]
        left_out = [finished for finished in left_out if not _failed(finished)]
        saved = [*(taken if number > done else ()), *self.done.values(), *left_out]
        # A run that ended because of failed environments must not restore the failures, or it would end again.
        to_repeat = [replace(finished.ticket, played={}, recorded=()) for finished in failed]
        under_way = [*self.interrupted, *self.service.so_far(), *to_repeat]
        rows = [t for finished in saved for t in finished.group.trajectories]
        groups = saved_rollouts.group_indices([finished.group for finished in saved], rows)
        unfinished = [_unfinished_entry(ticket, rows) for ticket in under_way]
        state = {
            "stream": self.stream.state(),
            "prompts": [*(finished.ticket.index for finished in saved), *(ticket.index for ticket in under_way)],
            "asked": self.requested,
            "named": -(-self.requested // self.wanted),
            "versions": self.versions.recent,
            "done": [[finished.ticket.number, finished.ticket.index, finished.ticket.version] for finished in saved],
            "groups": groups,
            "left_out": [finished.ticket.number for finished in left_out],
            "under_way": unfinished,
        }
        saved_rollouts.write(folder, self.config, state, rows)

    def restore(self, folder: Path) -> str:
        """Restores what `save` wrote: finished groups, and finished samples and recorded turns of unfinished groups.

        Restores only the position in the data if the saved groups are discarded, and nothing if none were saved.

        Returns a line about the restored or discarded groups; empty if there were none.

        Args:
            folder: The checkpoint's folder for rollouts.

        Raises:
            UserError: `rollouts.json` cannot be read, or the number of data rows, the seed or the shuffling differs
                from the saved run's.
            OSError, pyarrow.ArrowException, TypeError, ValueError: `rollouts.parquet` cannot be read.
        """
        saved = saved_rollouts.read(folder, self.config, self.stream, self.prompts)
        if not isinstance(saved, tuple):
            if saved is not None:  # groups already trained on used these names and random streams: never reuse them
                self.requested = saved.named_steps * self.wanted
            return str(saved or "")
        state, rows = saved
        turns_by_name = journal.read_all(folder)
        self.requested, self.versions.recent = state["asked"], state["versions"]
        for number, index, version, samples in state["under_way"]:
            ticket = self._ticket(number, index, version)
            finished_samples = {sample: rows[row] for sample, row in samples}
            missing = [name for sample, name in enumerate(ticket.names) if sample not in finished_samples]
            turns = [turn for name in missing for turn in turns_by_name.get(name, ())]
            self.interrupted.append(replace(ticket, played=finished_samples, recorded=turns))
        groups = saved_rollouts.rebuild_groups(state["groups"], rows)
        for (number, index, version), group in zip(state["done"], groups, strict=True):
            finished = Done(self._ticket(number, index, version), group)
            if number in state.get("left_out", ()):
                self.left_out.append(finished)
            else:
                self.done[number] = finished
        return self._restored_line(len(groups))

    def _restored_line(self, finished_groups: int) -> str:
        """Describes the restored groups, finished and unfinished, in a line for the console."""
        interrupted = self.interrupted
        if not finished_groups and not interrupted:
            return ""
        trajectories, turns = (
            sum(len(each) for each in of) for of in ([t.played for t in interrupted], [t.recorded for t in interrupted])
        )
        return (
            f"restored {saved_rollouts.count_groups(finished_groups)} generated ahead, and {len(interrupted):,} "
            f"unfinished ones ({trajectories:,} finished trajectories, {turns:,} recorded turns)"
        )

    @property
    def _waiting(self) -> int:
        """Groups requested and not yet taken."""
        return len(self.done) + len(self.service.under_way) + len(self.interrupted)

    def _request(self) -> None:
        """Requests as many groups as the staleness bound allows, interrupted groups first."""
        steps, limit = self.versions.max_staleness + 1, self.config.run.steps
        ahead = steps if limit is None else min(steps, limit - self.steps)
        # All at once: their age is unchanged, and a step waits for the oldest.
        interrupted, self.interrupted = self.interrupted, []
        free = max(0, ahead * self.wanted - len(self.done) - len(self.service.under_way) - len(interrupted))
        free = 0 if self._gave_up else free
        self.requested = max(self.requested, self.steps * self.wanted)  # a synchronous run used these names before
        newest = self.versions.newest
        tickets = [
            ticket if ticket.played or ticket.recorded else replace(ticket, version=newest) for ticket in interrupted
        ]
        fresh = self.stream.take(max(0, min(free, self.stream.remaining)))
        tickets += [self._ticket(self.requested + i, index, newest) for i, index in enumerate(fresh)]
        self.requested += len(fresh)
        self.service.submit(tickets, [self.prompts[ticket.index] for ticket in tickets])

    def _ticket(self, number: int, index: int, version: int) -> Ticket:
        """Returns a request with the sample names, and thus the seeds, of a synchronous run."""
        step, place = divmod(number, self.wanted)
        samples = self.config.data.samples_per_prompt
        seed = f"{self.config.run.seed}/{step + 1}/0"
        return Ticket(number, index, version, tuple(f"{seed}/{place * samples + s}" for s in range(samples)))

    def _choose(self) -> list[Done] | None:
        """Returns the groups for the step, or None if the step must wait."""
        self._request()
        chosen = sorted(self.done.values(), key=_age)[: self.wanted]
        exhausted = not self.service.under_way and self.stream.remaining <= 0 and not self.interrupted
        if self._leaves_too_many(chosen) or (len(chosen) < self.wanted and not exhausted and not self._gave_up):
            return None
        for finished in chosen:
            del self.done[finished.ticket.number]
        return sorted(chosen, key=_number)

    def _leaves_too_many(self, chosen: list[Done]) -> bool:
        """Returns True if a group not chosen would become too old before a later step could take it."""
        taken = {finished.ticket.number for finished in chosen}
        waiting = [*(finished.ticket for finished in self.done.values()), *self.service.under_way.values()]
        left = [self.versions.syncs_since(ticket.version) for ticket in waiting if ticket.number not in taken]
        limit = self.versions.max_staleness
        return any(sum(b >= syncs for b in left) > (limit - syncs) * self.wanted for syncs in range(limit + 1))

    def _wait(self, progress: Phase) -> None:
        self.look()
        if not self.service.served:
            self.refill()
        self.collect(LOOK_EVERY_S)
        progress.update(min(len(self.done), self.wanted))

    def collect(self, wait_s: float) -> None:
        """Moves finished groups of the service to `done`; waits up to `wait_s` seconds for the first. With dynamic
        sampling, groups without differing rewards go to `left_out` instead.

        Raises:
            UserError: A completed trajectory lacks the reward named by `algorithm.dynamic_sampling.reward`.
            ActorFailed: An engine refused a request, or no engine is left and none restarts.
        """
        for finished in self.service.done(wait_s):
            algorithm = self.config.algorithm
            if not algorithm.dynamic_sampling.enabled or with_signal([finished.group], algorithm):
                self.done[finished.ticket.number] = finished
            else:
                self.left_out.append(finished)

    @property
    def _gave_up(self) -> bool:
        """True if so many groups lacked a signal that the step proceeds with fewer groups."""
        limit = self.config.algorithm.dynamic_sampling.max_rounds * self.wanted
        dropped: list[Trajectory] = [t for finished in self.left_out for t in finished.group.trajectories]
        return len(self.left_out) >= limit or (len(self.left_out) >= self.wanted and all_failed(dropped))

    def _sampling_metrics(self, groups: list[Group]) -> dict[str, float]:
        max_rounds = self.config.algorithm.dynamic_sampling.max_rounds
        rounds = -(-(len(groups) + len(self.left_out)) // self.wanted)
        return {
            "rollout/rounds": float(max_rounds if self._gave_up else min(rounds, max_rounds)),
            "rollout/groups_left_out": float(len(self.left_out)),
            "rollout/groups_missing": float(self.wanted - len(groups)),
        }


def _unfinished_entry(ticket: Ticket, rows: list[Trajectory]) -> tuple[int, int, int, list[tuple[int, int]]]:
    """Returns the checkpoint entry of an unfinished group and appends the group's finished samples to `rows`."""
    places = [(sample, len(rows) + i) for i, sample in enumerate(ticket.played)]
    rows += ticket.played.values()
    return ticket.number, ticket.index, ticket.version, places


def _failed(finished: Done) -> bool:
    """Returns True if the environment of any sample failed."""
    return any(t.status.failed for t in finished.group.trajectories)


def _age(finished: Done) -> tuple[int, int]:
    return finished.ticket.version, finished.ticket.number


def _number(finished: Done) -> int:
    return finished.ticket.number
