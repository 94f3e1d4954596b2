"""Settings of the weight sync from policy to engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_mega.config.schema.fields import Refusals, at_least, between, one_of

IN_ONE_PROCESS, READ_ONLY = "memory://", ("http://", "https://")


@dataclass
class FilesConfig:
    """Weight sync by files: place, full images and changes, cache of the engines."""

    folder: str = ""
    """Folder shared by all nodes, or address of fsspec such as s3://bucket/weights, for the weight files of the run, in
    a folder named like the run. Empty: `weight_files` in the run's folder."""
    full_every: int = at_least(1, 20)
    """Interval, in weight syncs, between full images; the syncs in between write only changed elements. 1 always writes
    full images, and needs no copy of the weights in the policy's host memory."""
    keep: int = at_least(1, 2)
    """Number of full images kept, each with the changes up to the next; older files are removed."""
    cache: str = ""
    """Folder on each engine's node where downloaded weights survive a restart of the engine. Empty: host memory of the
    engine's workers."""

    def refusals(self) -> Refusals:
        """Yields a refusal of a `folder` that other processes cannot read (`memory://`), or that fsspec cannot write to
        (`http`)."""
        if self.folder.startswith(IN_ONE_PROCESS):
            yield "weights.files.folder", "only one process can read memory://", "give a shared folder or s3://…"
        if self.folder.startswith(READ_ONLY):
            yield "weights.files.folder", "fsspec cannot write to http", "give a shared folder or s3://…"


@dataclass
class WeightsConfig:
    """Weight sync from policy to engines: way, number format, message size, verification and time limit."""

    transport: str = one_of("group", "files")
    """Way of the weights to the run's engines. group: messages between policy ranks and engine workers (NCCL, gloo,
    CUDA IPC). files: policy ranks write files to `weights.files.folder`, and engines read them, also over slow links;
    engines generate meanwhile."""
    files: FilesConfig = field(default_factory=FilesConfig)
    wire: str = one_of("auto", "fp8")
    """Number format of transferred weights. auto: `model.dtype`. fp8: linear weights are sent as E4M3 with a scale per
    128×128 block, half the bytes; an engine with another storage type converts the received weights, with FP8
    precision."""
    bucket_mib: float = between(0.001, 65536, 64.0)
    """Bucket (message) size in MiB; a process holds at most three buckets."""
    checksum_every: int = at_least(0, 10)
    """Interval, in weight syncs, between syncs that verify every part on arrival; 0 never verifies."""
    timeout_s: float = at_least(1, 300.0)
    """Time limit per sync in seconds; the error then names rank and tensor."""
