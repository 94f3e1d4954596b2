"""A Megatron model as the driver sees it: batches in, log-probs or values and metrics out, however many ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from skyrl_mega.algorithms.losses import Figures
from skyrl_mega.cluster.group import ActorGroup, Call
from skyrl_mega.config.derived import micro_tokens
from skyrl_mega.config.schema import AlgorithmConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.megatron.parts import Referred
from skyrl_mega.megatron.sequences import TRAJECTORY, Sequences
from skyrl_mega.parallel.balance import balance_together
from skyrl_mega.parallel.dims import ParallelDims

Rows = list[list[Tensor]]
"""For each data-parallel rank the sequences of each of its micro-batches."""


class TrainGroup:
    """All ranks of a policy, of a critic, or of a reference in a layout of its own.

    The mini-batches of an RL step are dealt once, by `hold`; the ranks keep their micro-batches, and what is computed
    for them, until the next `hold`. Ranks may work in another folder than the driver, so paths travel whole.
    """

    def __init__(self, group: ActorGroup, parallel: ParallelDims, config: PolicyConfig, timeout_s: float) -> None:
        self.group, self.parallel, self.config, self.timeout_s = group, parallel, config, timeout_s
        self._minis: Sequence[Sequences | Referred] = ()
        self._rows: list[Rows] = []

    def load(self, path: Path) -> None:
        """Loads a Hugging Face directory into all ranks."""
        self._call("load", str(path.absolute()))

    def keep_reference(self, path: Path) -> None:
        """Keeps a frozen copy of these weights beside the policy's."""
        self._call("keep_reference", str(path.absolute()))

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Starts the optimizer and its schedule afresh."""
        self._call("reset_optimizer", optimizer)

    def set_algorithm(self, algorithm: AlgorithmConfig) -> None:
        """Gives losses other settings, for what trains several times with the same actors."""
        self._call("set_algorithm", algorithm)

    def hold(self, minis: Sequence[Sequences]) -> None:
        """Deals mini-batches into micro-batches, which the ranks keep in the place of those that they held."""
        self._minis, self._rows = minis, [self._deal(mini) for mini in minis]
        self._send("hold", lambda mini, rows: minis[mini].take(rows))

    def hold_parts(self, minis: Sequence[Referred], *, drawn: bool) -> None:
        """As `hold`, of samples that the ranks read where they are stored.

        Args:
            minis: The mini-batches.
            drawn: As `parts.read`.
        """
        self._minis, self._rows = minis, [self._deal(mini) for mini in minis]
        self._send("hold_parts", lambda mini, rows: minis[mini].take(rows), drawn)

    def forget(self) -> None:
        """Lets go of what `hold_parts` was given: the ranks have read it, and it is kept in memory for as long."""
        self._minis, self._rows = (), []

    def add(self, name: str, values: Sequence[Tensor]) -> None:
        """Gives the ranks a further column of what they hold: [T] for each mini-batch."""
        self._send("add", lambda mini, rows: values[mini][tokens_of(self._minis[mini]).index(rows)].numpy(), name)

    def keep_logprobs(
        self,
        name: str,
        *,
        temperature: float,
        reference: bool = False,
        entropy: str | None = None,
        squares: str | None = None,
    ) -> None:
        """Has the ranks compute the log-probs of what they hold and keep them as a column, [T] float32.

        Args:
            name: The column's.
            temperature: Divides the logits.
            reference: With the weights of `keep_reference`.
            entropy: A further column, for the entropy of each token's distribution in nats.
            squares: Another, for the sum of its squared probabilities.
        """
        self._call("keep_logprobs", name, temperature, reference, entropy, squares)

    def logprobs(self, *, temperature: float) -> list[Tensor]:
        """Log-prob of every token that is held, given those before it: float32 [T] for each mini-batch.

        0 for tokens that do not count (`ModelWorker.logprobs`).
        """
        return self._collected(self._call("logprobs", temperature))

    def values(self, name: str) -> list[Tensor]:
        """A critic's value of the state before every token that is held, which the ranks keep as a column, too.

        Args:
            name: The column's.

        Returns:
            Float32 [T] for each mini-batch; 0 for tokens that do not count.
        """
        self._call("keep_values", name)
        return self.column(name)

    def column(self, name: str) -> list[Tensor]:
        """A column of what is held that the ranks have computed (`keep_logprobs`): [T] for each mini-batch."""
        return self._collected(self._call("column", name))

    def _collected(self, answers: list[Any]) -> list[Tensor]:
        """[T] for each mini-batch, from each rank's values of its micro-batches; None from ranks without."""
        if not self._minis:
            raise ValueError("the driver knows of nothing that the ranks hold")
        minis = [tokens_of(mini) for mini in self._minis]
        found = [torch.zeros(len(mini.tokens)) for mini in minis]
        if all(answer is None for answer in answers):
            raise ValueError("no rank has computed what is asked for")
        for rank, answer in enumerate(answers):
            at = self.parallel.coordinates(rank)
            if answer is None or at.tp or at.cp:
                continue
            micros = iter(answer)
            for mini, values, rows in zip(minis, found, self._rows, strict=True):
                for micro in rows[at.dp]:
                    values[mini.index(micro)] = torch.tensor(next(micros))
        return found

    def train(
        self, mini: int = 0, *, temperature: float = 1.0, loss: str, figures: Figures | None = None
    ) -> dict[str, float]:
        """One optimizer step on a whole mini-batch that is held; its columns must have final token weights.

        Args:
            mini: Which.
            temperature: Divides the logits; a critic has none.
            loss: `algorithm.loss`, or supervised; a critic's is `objectives.VALUE`.
            figures: What the loss is told of the run.
        """
        answers = self._call("train", mini, temperature, loss, figures)
        return max(answers, key=len)  # only the last pipeline stage has the loss's metrics

    def measure(
        self, mini: int = 0, *, temperature: float, loss: str, figures: Figures | None = None
    ) -> dict[str, float]:
        """The metrics of `train` that need no optimizer step, on a mini-batch that teaches nothing."""
        return max(self._call("measure", mini, temperature, loss, figures), key=len)

    def offload(self, parts: Sequence[str]) -> list[Call]:
        """Begins to take parts of `config.residency` off all ranks' devices; each answers with the bytes copied."""
        return self.group.submit_all("offload", list(parts))

    def onload(self, parts: Sequence[str]) -> list[Call]:
        """Begins to bring them back, likewise."""
        return self.group.submit_all("onload", list(parts))

    def save(self, folder: Path) -> None:
        """Writes a checkpoint into an empty folder, each rank its own part."""
        self._call("save", str(folder.absolute()))

    def restore(self, folder: Path) -> None:
        """Reads a checkpoint, saved in any layout, each rank its own part."""
        self._call("restore", str(folder.absolute()))

    def export(self, path: Path, source: Path) -> None:
        """Writes a Hugging Face directory, with configuration and tokenizer from `source`."""
        self._call("export", str(path.absolute()), str(source.absolute()))

    def _call(self, method: str, *args: Any, per_rank: list[Any] | None = None) -> list[Any]:
        return self.group.call_all(method, *args, per_rank=per_rank, timeout=self.timeout_s)

    def _send(self, method: str, cut: Callable[[int, Tensor], Any], *args: Any) -> None:
        """Calls all ranks with `cut(mini-batch, its rows)` for each of their micro-batches, and `args`.

        Ranks with the same tokens get the same object, which lies in a node's memory once.
        """
        stored = [
            ray.put([[cut(mini, micro) for micro in rows[data]] for mini, rows in enumerate(self._rows)])
            for data in range(self.parallel.data)
        ]
        mine = [stored[self.parallel.coordinates(rank).dp] for rank in range(self.parallel.ranks)]
        self._call(method, per_rank=[(held, *args) for held in mine])

    def _deal(self, batch: Sequences | Referred) -> Rows:
        """The rows of each data-parallel rank's micro-batches."""
        return dealt(batch, self.parallel, micro_tokens(self.config) * self.parallel.context)


def dealt(batch: Sequences | Referred, parallel: ParallelDims, tokens: int) -> Rows:
    """Deals a mini-batch to the data-parallel ranks, with all samples of a trajectory in one micro-batch where
    `algorithm.sequence_unit` is trajectory.

    Args:
        batch: The mini-batch.
        parallel: The layout.
        tokens: Tokens of one micro-batch at most, over all context ranks; a trajectory may exceed them.
    """
    multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1
    rows = balance_together(batch.lengths.tolist(), _together(batch), parallel.data, tokens, multiple)
    return [[torch.tensor(m, dtype=torch.int64) for m in micros] for micros in rows]


def _together(batch: Sequences | Referred) -> list[int]:
    """Returns a number for each sequence: those that have the same share a micro-batch."""
    if TRAJECTORY not in batch.columns:
        return list(range(len(batch.lengths)))
    if isinstance(batch, Referred):
        return batch.columns[TRAJECTORY].tolist()
    return batch[TRAJECTORY][batch.starts].tolist()


def tokens_of(mini: Sequences | Referred) -> Sequences:
    """A mini-batch whose columns the driver has."""
    assert isinstance(mini, Sequences), "the driver has no column of what is held by reference"
    return mini
