"""The policy as the driver sees it: batches in, log-probs and metrics out, however many ranks there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ray

from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.config.schema import OptimizerConfig, PolicyConfig
from skyrl_mega.megatron.sequences import Sequences
from skyrl_mega.parallel.balance import balance
from skyrl_mega.parallel.dims import ParallelDims


class TrainGroup:
    """All ranks of a policy (or of a reference in a layout of its own).

    Ranks may work in another folder than the driver, so paths travel whole.
    """

    def __init__(self, group: ActorGroup, parallel: ParallelDims, config: PolicyConfig, timeout_s: float) -> None:
        self.group, self.parallel, self.config, self.timeout_s = group, parallel, config, timeout_s

    def load(self, path: Path) -> None:
        """Loads a Hugging Face directory into all ranks."""
        self._call("load", str(path.absolute()))

    def keep_reference(self, path: Path) -> None:
        """Keeps a frozen copy of these weights beside the policy's."""
        self._call("keep_reference", str(path.absolute()))

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Starts the optimizer and its schedule afresh."""
        self._call("reset_optimizer", optimizer)

    def logprobs(
        self, batch: Sequences, *, temperature: float, reference: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-prob and entropy of every token given those before it: float32 [T] each, aligned with `batch.tokens`.

        0 outside the field `mask`, where the batch has one.
        """
        rows, micros = self._deal(batch)
        answers = self._call("logprobs", per_rank=[(m, temperature, reference) for m in micros])
        logprobs = np.zeros(len(batch.tokens), np.float32)
        entropy = np.zeros(len(batch.tokens), np.float32)
        for rank, answer in enumerate(answers):
            at = self.parallel.coordinates(rank)
            if answer is None or at.tp or at.cp:
                continue
            for micro, (values, entropies) in zip(rows[at.dp], answer, strict=True):
                where = batch.index(micro)
                logprobs[where], entropy[where] = values, entropies
        return logprobs, entropy

    def train(self, batch: Sequences, *, temperature: float, loss: str) -> dict[str, float]:
        """One optimizer step on the whole batch; its fields must hold final token weights.

        `loss`: `algorithm.loss`, or supervised.
        """
        _, micros = self._deal(batch)
        answers = self._call("train", per_rank=[(m, temperature, loss) for m in micros])
        return max(answers, key=len)  # only the last pipeline stage has the loss's metrics

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

    def _deal(self, batch: Sequences) -> tuple[list[list[np.ndarray]], list[Any]]:
        """Sequences → for each data-parallel rank its micro-batches' rows.

        And for each rank a reference to the tokens.
        """
        dealt = balance(
            batch.lengths.tolist(),
            self.parallel.data,
            self.config.micro_tokens * self.parallel.context,
            multiple=self.parallel.pipeline if self.parallel.virtual_pipeline > 1 else 1,
        )
        rows = [[np.asarray(m, dtype=np.int64) for m in micros] for micros in dealt]
        stored = [ray.put([batch.take(m) for m in micros]) for micros in rows]
        return rows, [stored[self.parallel.coordinates(rank).dp] for rank in range(self.parallel.ranks)]
