"""A worker's download of weight files in the background, while the engine computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

from torch import Tensor

from skyrl_mega.parallel.box import Shard
from skyrl_mega.weights.exchange.executor import ExchangeReport
from skyrl_mega.weights.files.fetch import FetchReport, Reader
from skyrl_mega.weights.files.source import Source


class Download:
    """The reader of an engine worker, in a thread.

    Args:
        shard: The worker's shard, without scales.
        tensors: Shapes of the model's tensors by name.
        index: Number of the worker in its engine, the name of its file in the cache.
    """

    def __init__(self, shard: Shard, tensors: dict[str, tuple[int, ...]], index: int) -> None:
        self._reader, self._index = Reader(shard, tensors), index
        self._thread = ThreadPoolExecutor(1, "download")
        self._running: Future[FetchReport] | None = None
        self._source: Source | None = None
        self._stopped = Event()
        """Set to end the last fetch."""

    def start(self, source: Source) -> None:
        """Starts to fetch a publication in the background and returns. An earlier fetch ends first, at its next range,
        or does not begin. `source.cache` names the folder of the image's file; "" keeps the image in host memory."""
        self._stopped.set()
        self._stopped = Event()
        file = Path(source.cache) / f"worker-{self._index}.image" if source.cache else None
        self._source, self._running = source, self._thread.submit(self._reader.fetch, source, file, self._stopped)

    @property
    def ended(self) -> bool:
        """True if the fetch has ended; `start` must have been called. Raises the error of a failed fetch, as
        `Reader.fetch`."""
        assert self._running is not None
        if not self._running.done():
            return False
        self._running.result()
        return True

    def install(self, params: Mapping[str, Tensor], written: Callable[[str], None]) -> ExchangeReport:
        """Copies the fetched weights into a worker's parameters; see `Image.install`. Returns a report with the bytes
        read from the store as received, and the bytes of the image as extra.

        Args:
            params: Name → local tensor of the worker.
            written: Called with the name of each tensor once the tensor is filled.

        Raises:
            RuntimeError: The fetch has not started or not ended.
            StoreError, DamagedFiles, Incomplete, UserError: The fetch failed, as in `Reader.fetch`.
        """
        image, report = self._reader.image, ExchangeReport()
        if self._running is None or self._source is None or not self.ended or image is None:
            raise RuntimeError("weights cannot be installed yet; call fetch_weights before")
        if image.name != self._source.name:
            raise RuntimeError(f"the image has publication {image.name or 'none'}, not {self._source.name}")
        with report.timed("load_s"):
            image.install(params, written)
        report.received, report.extra_bytes = self._running.result().read, image.nbytes
        return report
