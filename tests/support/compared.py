"""A vLLM worker that compares its weights with files, cut by this project's boxes."""

from __future__ import annotations

from pathlib import Path

from skyrl_mega.engines.vllm.transfer import WorkerExtension
from skyrl_mega.hf_checkpoint.load import load


class FileComparison(WorkerExtension):
    """The project's extension of workers, with a comparison."""

    def unlike_files(self, path: str) -> list[str]:
        """Returns the names of the load-time parameters unlike this worker's part of a Hugging Face directory; changes
        nothing."""
        engine = self.weight_transfer_engine
        parameters, shard = engine.parameters, engine.own_shard()
        parameters.open(check=True)
        load(Path(path), shard, parameters, written=parameters.mark_written)
        return list(parameters.close())
