"""The driver's view of a Megatron model: batches in, log-probs or values and metrics out, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_mega.algorithms.losses import Figures
from skyrl_mega.batch.samples import Samples, read_local
from skyrl_mega.cluster.calls import PendingCall, Waiting
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.config.derived import micro_tokens, shares_prefixes
from skyrl_mega.config.schema import AlgorithmConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.megatron.micro_batches import Split, split_apart
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences, ragged_arange


class TrainGroup:
    """All ranks of a policy, of a critic, or of a reference with a separate layout.

    `hold` splits the mini-batches of an RL step once. The ranks keep the micro-batches, with all computed columns,
    until the next `hold`. Every wait is bounded by `timeout_s`; after an error of a rank the group is ended. Paths are
    sent as absolute paths, because ranks may run in another working directory.

    Args:
        group: The actors of the ranks, already connected (`MegatronActor.join`).
        parallel: The model's grid of ranks.
        config: Settings of layers, optimizer and micro-batches.
        timeout_s: Seconds until a rank must answer.
    """

    def __init__(self, group: ActorGroup, parallel: ParallelDims, config: PolicyConfig, timeout_s: float) -> None:
        self.group, self.parallel, self.config, self.timeout_s = group, parallel, config, timeout_s
        self._lengths: list[Tensor] = []
        self._splits: list[Split] = []

    def load(self, path: Path, waiting: Waiting | None = None) -> None:
        """Loads the weights of a Hugging Face directory into all ranks, and waits for the end.

        Args:
            path: The directory.
            waiting: Called, during the wait, with the names of the ranks still loading; None: nothing is called.

        Raises:
            UserError: A tensor is missing or has another shape, or a file is damaged.
            ActorFailed: A rank failed or did not answer within `timeout_s` seconds. After any error the group is ended.
        """
        self._call("load", str(path.absolute()), waiting=waiting)

    def keep_reference(self, path: Path, waiting: Waiting | None = None) -> None:
        """Makes every rank keep the weights of a Hugging Face directory in host memory as reference, next to the
        policy's.

        Args:
            path: The directory.
            waiting: Called, during the wait, with the names of the ranks still loading; None: nothing is called.

        Raises:
            UserError: A tensor is missing or has another shape, or a file is damaged.
            ActorFailed: A rank failed or did not answer within `timeout_s`. After any error the group is ended.
        """
        self._call("keep_reference", str(path.absolute()), waiting=waiting)

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Replaces the optimizer and the learning-rate schedule of all ranks by new objects with these settings and
        zero moments. No weight changes; an offloaded optimizer stays offloaded.

        Raises:
            UserError: megatron-core refuses `options` of the settings.
            ActorFailed: A rank failed or did not answer within `timeout_s`. After any error the group is ended.
        """
        self._call("reset_optimizer", optimizer)

    def set_algorithm(self, algorithm: AlgorithmConfig) -> None:
        """Sets the loss settings of all ranks, for callers that train several times with the same actors.

        Raises:
            ActorFailed: A rank failed or did not answer within `timeout_s`; the group is ended.
        """
        self._call("set_algorithm", algorithm)

    def hold(self, minis: Sequence[Samples | Sequences], silent: Sequence[Tensor] | None = None) -> None:
        """Splits the mini-batches of an RL step into micro-batches and sends the micro-batches to the ranks, which
        store them in place of the previous step's. The ranks read the tokens of samples in the object store; the group
        keeps only the lengths.

        Args:
            minis: The mini-batches.
            silent: bool [S] for each mini-batch: True for samples with a gradient of exactly 0, for which `train` may
                leave out the backward pass. None: no sample.

        Raises:
            ActorFailed: A rank failed, for example because trajectories are lost; the group is ended.
            ValueError: `silent` has another length than `minis`.
        """
        tokens = micro_tokens(self.config) * self.parallel.context
        of_minis: Sequence[Tensor | None] = silent or [None] * len(minis)
        self._lengths = [mini.lengths for mini in minis]
        share = shares_prefixes(self.config, self.parallel.context)
        self._splits = [
            split_apart(mini, of_mini, self.parallel, tokens, share=share)
            for mini, of_mini in zip(minis, of_minis, strict=True)
        ]
        self._send("hold", lambda mini, rows: read_local(minis[mini].take(rows)))

    def forward_only(self, mini: int) -> Tensor:
        """Returns the indices, int64, of the sequences of stored mini-batch `mini` (index in the latest `hold`) for
        which `train` computes metrics, but no backward pass; empty if all take a backward pass."""
        return self._splits[mini].forward_only_sequences

    def left_out(self, mini: int) -> Tensor:
        """Returns int64 [S]: the number of first tokens of each sequence of stored mini-batch `mini` that the ranks
        compute with another sequence (`policy.share_prefixes`), as far as the driver knows common tokens."""
        return self._splits[mini].left_out

    def add(self, name: str, values: Sequence[Tensor], *, per_sample: bool = False) -> None:
        """Adds a column to the micro-batches stored on the ranks, or replaces it.

        Args:
            name: Name of the column.
            values: For each mini-batch of the latest `hold`, in order, a value per token, [T]. Surplus values, and
                surplus mini-batches, are ignored.
            per_sample: True if `values` hold a value per sequence, [S], which the ranks repeat for all tokens.

        Raises:
            IndexError: Values of a mini-batch, a token or a sequence are missing. Nothing was sent, and the group
                continues.
            ActorFailed: A rank failed or did not answer within `timeout_s`; the group is ended.
        """

        def cut(mini: int, rows: Tensor) -> Any:
            return values[mini][rows if per_sample else self._index(mini, rows)].numpy()

        self._send("add", cut, name, per_sample)

    def keep_logprobs(
        self,
        name: str,
        *,
        temperature: float,
        reference: bool = False,
        entropy: str | None = None,
        squares: str | None = None,
    ) -> None:
        """Makes the ranks compute log-probs of the stored mini-batches and add a column with the result, [T] float32 in
        nats, in place of a column of the same name; returns nothing (`column` does). Tokens without a weight in the
        loss get 0, in all columns. The parameters must be on the device.

        Args:
            name: Name of the column.
            temperature: Divides the logits.
            reference: True to use the weights of `keep_reference`, which must have been called.
            entropy: Name of a further column for the entropy of each token's distribution, in nats; None adds none.
            squares: Name of a further column for the sum of the squared probabilities of each token's distribution;
                None adds none.

        Raises:
            ActorFailed: A rank failed or did not answer within `timeout_s`; the group is ended.
        """
        self._call("keep_logprobs", name, temperature, reference, entropy, squares)

    def logprobs(self, *, temperature: float) -> list[Tensor]:
        """Has the ranks compute the log-prob of every stored token given the previous tokens, and returns float32 [T]
        in nats for each mini-batch, in the order of `hold`.

        Tokens without a weight in the loss get 0 (`ModelWorker.logprobs`). Adds no column. The parameters must be on
        the device.

        Args:
            temperature: Divides the logits.

        Raises:
            ActorFailed: A rank failed or did not answer within `timeout_s`; the group is ended.
        """
        return self._collected(self._call("logprobs", temperature))

    def values(self, name: str) -> list[Tensor]:
        """Returns a critic's value of the state before every stored token; the ranks also add the values as a column.
        The parameters must be on the device.

        Args:
            name: Name of the column.

        Returns:
            Float32 [T] for each mini-batch; 0 for tokens without a weight in the loss.

        Raises:
            ActorFailed: A rank failed or did not answer within `timeout_s`; the group is ended.
        """
        self._call("keep_values", name)
        return self.column(name)

    def column(self, name: str) -> list[Tensor]:
        """Returns a column computed by the ranks, such as the result of `keep_logprobs`: [T] for each mini-batch, in
        the order of `hold`.

        Args:
            name: Name of the column.

        Raises:
            ValueError: No rank has the column; the group still works.
            ActorFailed: A rank failed or did not answer within `timeout_s`; the group is ended.
        """
        return self._collected(self._call("column", name))

    def _collected(self, answers: list[Any]) -> list[Tensor]:
        """Joins the ranks' values of micro-batches to [T] for each mini-batch; ranks without values answer None."""
        joined = [torch.zeros(int(lengths.sum())) for lengths in self._lengths]
        if all(answer is None for answer in answers):
            raise ValueError("no rank has these values; compute them first (keep_logprobs, values)")
        for rank, answer in enumerate(answers):
            at = self.parallel.coordinates(rank)
            if answer is None or at.tp or at.cp:
                continue
            micros = iter(answer)
            for mini, (values, split) in enumerate(zip(joined, self._splits, strict=True)):
                for micro in split.rows[at.dp]:
                    values[self._index(mini, micro)] = torch.tensor(next(micros))
        return joined

    def _index(self, mini: int, rows: Tensor) -> Tensor:
        """Returns the positions of these sequences' tokens in a mini-batch."""
        lengths = self._lengths[mini]
        return ragged_arange((lengths.cumsum(0) - lengths)[rows], lengths[rows])

    def train(
        self, mini: int = 0, *, temperature: float = 1.0, loss: str, figures: Figures | None = None
    ) -> dict[str, float]:
        """Takes one optimizer step on a stored mini-batch, and returns name → metric over all ranks: `grad_norm` before
        clipping, `lr`, and the loss's metrics: sums over the mini-batch, weighted like the loss (maxima for names with
        `_max`).

        The mini-batch needs the columns of the loss, such as weights and advantages; parameters, gradients and
        optimizer must be on the device. A gradient of exactly 0 is not an error: no weight moves, and `grad_norm` is 0.

        Args:
            mini: Index of the mini-batch in the latest `hold`.
            temperature: Divides the logits; unused by a critic.
            loss: `algorithm.loss`, "supervised", or `objectives.VALUE` for a critic.
            figures: Figures of the run for the loss; None takes the defaults.

        Raises:
            ActorFailed: A rank failed, for example because the gradient is NaN or infinite; the group is ended.
        """
        metrics_by_rank = self._call("train", mini, temperature, loss, figures, self._splits[mini].forward_only)
        return max(metrics_by_rank, key=len)  # only the last pipeline stage returns the loss's metrics

    def measure(
        self, mini: int = 0, *, temperature: float, loss: str, figures: Figures | None = None
    ) -> dict[str, float]:
        """Returns the metrics of `train` available without an optimizer step, for mini-batches without a learning
        signal: name → metric of the loss, without `grad_norm`, `lr` and `expert_balance`. Changes no weight and adds no
        column. Only the parameters must be on the device. A loss of NaN is not an error.

        Args:
            mini: Index of the mini-batch in the latest `hold`.
            temperature: Divides the logits; unused by a critic.
            loss: `algorithm.loss`, "supervised", or `objectives.VALUE` for a critic.
            figures: Figures of the run for the loss; None takes the defaults.

        Raises:
            ActorFailed: A rank failed or did not answer within `timeout_s`; the group is ended.
        """
        return max(self._call("measure", mini, temperature, loss, figures), key=len)

    def offload(self, parts: Sequence[str]) -> list[PendingCall]:
        """Starts moving parts of the state off the devices of all ranks, and returns a pending call per rank, by rank.
        Gradients are dropped, not copied.

        `cluster.calls.gather` waits for the calls and raises their errors. The result of a call is the number of bytes
        copied to host memory; parts already off the device stay.

        Args:
            parts: "parameters", "gradients", "optimizer"; "critic" means all three of a critic.
        """
        return self.group.submit_all("offload", list(parts))

    def onload(self, parts: Sequence[str]) -> list[PendingCall]:
        """Starts moving parts of the state back to the devices of all ranks, and returns a pending call per rank, by
        rank.

        `cluster.calls.gather` waits for the calls and raises their errors. The result of a call is the number of bytes
        copied to the device; parts on the device stay, gradients return as zeros.

        Args:
            parts: "parameters", "gradients", "optimizer"; "critic" means all three of a critic.
        """
        return self.group.submit_all("onload", list(parts))

    def save(self, folder: Path) -> None:
        """Writes a checkpoint (weights, optimizer, schedule) into an existing, empty directory, seen by all ranks; each
        rank writes one file. Returns after the checkpoint is complete.

        Raises:
            ActorFailed: A rank failed, for example because it could not write; the group is ended.
        """
        self._call("save", str(folder.absolute()))

    def restore(self, folder: Path) -> None:
        """Reads a checkpoint (weights, optimizer, schedule) saved in any layout into all ranks. Offloaded parts are
        offloaded again.

        Raises:
            UserError: The checkpoint belongs to another model, or is damaged (`Damaged`); the group is ended.
            ActorFailed: A rank failed or did not answer within `timeout_s`; the group is ended.
        """
        self._call("restore", str(folder.absolute()))

    def export(self, path: Path, source: Path) -> None:
        """Writes the weights as a Hugging Face directory `path`, with configuration and tokenizer from the directory
        `source`. An earlier export at `path` is replaced; missing parent folders are created.

        Raises:
            UserError: `path` contains anything not written by an export, or `source` cannot be read.
            ActorFailed: A rank failed, for example because it could not write. After any error the group is ended.
        """
        self._call("export", str(path.absolute()), str(source.absolute()))

    def _call(
        self, method: str, *args: Any, per_rank: list[Any] | None = None, waiting: Waiting | None = None
    ) -> list[Any]:
        return self.group.call_all(method, *args, per_rank=per_rank, timeout=self.timeout_s, waiting=waiting)

    def _send(self, method: str, cut: Callable[[int, Tensor], Any], *args: Any) -> None:
        """Calls `method` on all ranks with `cut(mini-batch, rows)` for each of the rank's micro-batches, then `args`.

        Ranks with the same tokens share one object, stored once per node.
        """
        import ray

        stored = [
            ray.put([[cut(mini, micro) for micro in split.rows[data]] for mini, split in enumerate(self._splits)])
            for data in range(self.parallel.data)
        ]
        per_rank = [stored[self.parallel.coordinates(rank).dp] for rank in range(self.parallel.ranks)]
        self._call(method, per_rank=[(micros, *args) for micros in per_rank])
