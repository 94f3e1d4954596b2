"""Dense search: inner products of unit vectors, with FAISS."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import numpy.typing as npt

from skyrl_mega.common.errors import UserError

TRAIN_VECTORS = 200_000
"""Maximum number of vectors, from the beginning, to train an index on (IVF, PQ, SQ)."""

Vectors = npt.NDArray[np.float32]
"""float32 [N, dimension], unit vectors."""


class DenseBuilder:
    """Builder of a FAISS index in memory, from chunks of vectors.

    Args:
        dimension: Length of a vector.
        factory: FAISS's description of an index: `Flat` is exact; `HNSW32` and `IVF4096,SQ8` find fewer of the best
            passages, but need less time or memory.

    Raises:
        UserError: FAISS does not know this index.
    """

    def __init__(self, dimension: int, factory: str = "Flat") -> None:
        try:
            self.index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(
                f"FAISS refuses it ({reason}); allowed: Flat, HNSW32, IVF64,Flat …", key="--faiss", value=factory
            ) from error
        self.factory = factory
        self._held: list[Vectors] = []

    def add(self, vectors: Vectors) -> None:
        """Adds the next vectors [N, dimension]. An index that needs training keeps the vectors until `TRAIN_VECTORS`
        have arrived, or until `save`, and then trains on these.

        Raises:
            UserError: Training failed.
        """
        if self.index.is_trained:
            self.index.add(vectors)
            return
        self._held.append(vectors)
        if sum(map(len, self._held)) >= TRAIN_VECTORS:
            self._train()

    def save(self, file: Path) -> None:
        """Writes the index to `file`, after training it if `add` has not.

        Raises:
            UserError: There are too few vectors to train the index.
            RuntimeError: The file cannot be written.
        """
        self._train()
        faiss.write_index(self.index, str(file))

    def _train(self) -> None:
        if self.index.is_trained:
            return
        held = np.concatenate(self._held) if self._held else np.empty((0, self.index.d), np.float32)
        try:
            self.index.train(held)
        except RuntimeError as error:
            raise UserError(
                f"{len(held)} passages are too few for it to learn from",
                key="--faiss",
                value=self.factory,
                fix="use Flat",
            ) from error
        self.index.add(held)
        self._held = []


class DenseIndex:
    """A FAISS index opened for searches.

    Args:
        file: Written by `DenseBuilder.save`.
        parameters: FAISS's search parameters, `efSearch=128` or `nprobe=32`; "" keeps the defaults.
        threads: CPU threads of FAISS in this process; None keeps FAISS's default.

    Raises:
        UserError: The parameters do not fit this index.
        RuntimeError: The file is unreadable.
    """

    def __init__(self, file: Path, parameters: str = "", threads: int | None = None) -> None:
        if threads:
            faiss.omp_set_num_threads(threads)
        self.index = faiss.read_index(str(file))
        if parameters:
            try:
                faiss.ParameterSpace().set_index_parameters(self.index, parameters)  # type: ignore[arg-type]
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[-1]
                raise UserError(f"this index refuses it ({reason})", key="--faiss-search", value=parameters) from error

    def search(self, queries: Vectors, topk: int) -> tuple[Vectors, npt.NDArray[np.int64]]:
        """Returns scores (inner products) and passage rows, both [len(queries), topk], best first; row -1 marks a place
        without a result."""
        return self.index.search(queries, topk)
