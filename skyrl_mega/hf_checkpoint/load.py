"""Reading and writing of Hugging Face directories: safetensors ↔ the local tensors of a layout."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from skyrl_mega.cluster.atomic_output import atomic_folder
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.groups import groups
from skyrl_mega.hf_checkpoint.companion_files import write_companion_files
from skyrl_mega.hf_checkpoint.copied import Copied, copies, write_copy
from skyrl_mega.hf_checkpoint.index import SINGLE, check_model_tensors, names_in, read_config
from skyrl_mega.hf_checkpoint.on_all_ranks import on_all_ranks
from skyrl_mega.hf_checkpoint.row_reader import read_rows
from skyrl_mega.hf_checkpoint.tensor_reader import TensorReader
from skyrl_mega.models.disk_form import DiskForm
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Box, Layout, Piece, Shard
from skyrl_mega.weights.exchange.exchange import Exchange, Staging, local_view
from skyrl_mega.weights.fp8.format import Wire
from skyrl_mega.weights.plan.plan import plan
from skyrl_mega.weights.plan.topology import Links, Topology
from skyrl_mega.weights.transports.group import default_group

BUCKET_BYTES = 64 << 20
"""Size of a message; a rank holds at most three."""
_EXPORTED = ".exported.json"
"""File with the name and size of every file written by `save`, so a later call may replace the directory."""


def load(
    path: Path,
    shard: Shard,
    params: Mapping[str, Tensor],
    optional: Mapping[str, tuple[int, ...]] | None = None,
    written: Callable[[str], None] = lambda param: None,
) -> None:
    """Fills `params` (the local tensors of `shard`) from the safetensors files of `path`, converting to their dtype.

    Reads only the shard's boxes, which are index ranges of tensors (`parallel.box`), and whole experts of tensors with
    another order of axes on disk (`row_reader`). Block FP8 and MXFP4 are dequantised. Padding stays unchanged.

    Args:
        path: The directory.
        shard: This rank's shard.
        params: The shard's local tensors.
        optional: Name → shape of tensors outside the model of config.json: read if present in the files, otherwise left
            unchanged; None for no such tensors.
        written: Called with the name of each local tensor once the tensor is filled; not for a tensor left unchanged.

    Raises:
        UserError: The shard has a tensor unknown to the model, a tensor is missing or misshapen, or config.json, an
            index or a header cannot be read, or a file is cut off; described in one line. Tensors may then be filled
            already.
        OSError: A file can no longer be opened or read after its header was read.
        ValueError: A tensor of `params` is not of the shard's shape.
    """
    hf = read_config(path)
    shapes, optional = architecture(hf).tensors(hf), optional or {}
    present = names_in(path) if optional else set()
    pieces = [piece for piece in shard.pieces if piece.tensor not in optional or piece.tensor in present]
    wanted = dict.fromkeys(piece.tensor for piece in pieces)
    shapes |= {tensor: shape for tensor, shape in optional.items() if tensor in wanted}
    for tensor in wanted:
        if tensor not in shapes:
            raise UserError(
                f"the model described here has no tensor {tensor}",
                key=path / "config.json",
                fix="give a directory with the same model as model.path",
            )
    entries = check_model_tensors(path, hf, {tensor: shapes[tensor] for tensor in wanted})
    reader, forms = TensorReader(), architecture(hf).describe(hf).disk_forms
    by_param: dict[str, dict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for piece in pieces:
        by_param[piece.param][piece.tensor].append(piece)
    with torch.no_grad():
        for param, by_tensor in by_param.items():
            local = shard.shaped(param, params[param])
            for name, of_tensor in by_tensor.items():
                parts = [(p.box, local_view(local, p.offset, p.box)) for p in of_tensor]
                if name in forms:
                    read_rows(reader, name, entries[name], forms[name], shapes[name], parts)
                else:
                    reader.read(name, entries[name], parts)
            written(param)


def save(
    path: Path,
    source: Path,
    layout: Layout,
    params: Mapping[str, Tensor],
    *,
    writers: Sequence[int] = (0,),
    file_bytes: int = 4 << 30,
    timeout_s: float = 600.0,
) -> None:
    """Writes the weights of all ranks of torch's default group as a Hugging Face directory. A collective of all ranks.
    The directory appears when every file is written, before any rank returns, and replaces an older directory written
    by `save` (`exported`). Tensors of `source` unknown to the model are copied.

    Args:
        path: The directory to write.
        source: Directory of the configuration, tokenizer, and tensors to copy; only rank 0 reads it.
        layout: The shards of all ranks in the group.
        params: This rank's local tensors; their dtype is the files' type.
        writers: Ranks that write the files in turn, file 0 by the first. Several writers need a shared file system.
        file_bytes: Maximum size of a file (at least one tensor); a writer needs up to twice as much host memory.
        timeout_s: Time limit in seconds of one exchange, in which every writer receives the tensors of a file.

    Raises:
        UserError: The directory contains anything not written by an export, or `source` cannot be read.
        RuntimeError: A rank could not write; names the rank and the reason.
        TransportError: A rank left, or an exchange took too long.
    """
    rank = dist.get_rank()
    with ExitStack() as stack:
        copied: list[Copied] = []

        def begin() -> tuple[Path, int, dict[str, Any]]:
            hf = read_config(source)
            copied.extend(copies(source, file_bytes))
            place = atomic_folder(path, f"export: {path}", exported, last=_EXPORTED)
            return stack.enter_context(place), len(copied), hf

        folder, copied_files, hf = on_all_ranks(lambda: begin() if rank == 0 else (path, 0, {}))[0]
        wire, forms = _types(hf, params)
        sizes = {tensor: prod(shape) * wire.itemsize(tensor) for tensor, shape in layout.tensors.items()}
        files = list(groups(sizes, sizes.__getitem__, file_bytes))
        names = file_names(len(files) + copied_files)
        gathered = _gathered(
            layout, params, wire, files, writers, bucket_bytes=min(file_bytes, BUCKET_BYTES), timeout_s=timeout_s
        )
        _write_files(folder, names, gathered, forms)

        def finish() -> None:
            for name, tensors in zip(names[len(files) :], copied, strict=True):
                write_copy(tensors, folder / name)
            _finish(folder, source, wire.dtype)
            stack.pop_all().close()

        on_all_ranks(lambda: finish() if rank == 0 else None)


def _types(hf: Mapping[str, Any], params: Mapping[str, Tensor]) -> tuple[Wire, Mapping[str, DiskForm]]:
    """Returns the types of the exported tensors (the parameters' dtype, float32 where the architecture says so), and
    the tensors with another order of axes on disk."""
    decoder = architecture(hf).describe(hf)
    return Wire(next(iter(params.values())).dtype, float32=decoder.float32_tensors), decoder.disk_forms


def exported(folder: Path, names: set[str]) -> bool:
    """Returns True if a folder contains exactly the files written by `save`, with unchanged sizes, and may be replaced;
    False also if their list cannot be read.

    Args:
        folder: The folder.
        names: Names of all its entries.
    """
    try:
        sizes = json.loads((folder / _EXPORTED).read_text(encoding="utf-8"))
        return names == {*sizes, _EXPORTED} and all((folder / n).stat().st_size == sizes[n] for n in sizes)
    except (OSError, ValueError, TypeError):
        return False


def _write_files(
    folder: Path,
    names: Sequence[str],
    gathered: Iterator[tuple[int | None, dict[str, Tensor]]],
    forms: Mapping[str, DiskForm],
) -> None:
    """Writes every safetensors file of the directory. A collective."""
    for own_file, tensors in gathered:
        on_all_ranks(partial(_write, tensors, None if own_file is None else folder / names[own_file], forms))
        del tensors  # before the next file's tensors are allocated


def _gathered(
    layout: Layout,
    params: Mapping[str, Tensor],
    wire: Wire,
    files: Sequence[Sequence[str]],
    writers: Sequence[int],
    *,
    bucket_bytes: int,
    timeout_s: float,
) -> Iterator[tuple[int | None, dict[str, Tensor]]]:
    """Yields, for as many files at a time as there are writers, the index of this rank's file (or None) and the full
    tensors.

    A collective. Allocates buffers and stream only once.
    """
    rank, first = dist.get_rank(), next(iter(params.values()))
    transport = default_group(timeout_s, first.device)
    topology = Topology.shared(transport.size, transport.size, Links(gpus_per_node=transport.size, nics_per_node=1))
    staging, exchanges = Staging(transport), []
    for start in range(0, len(files), len(writers)):
        batch = dict(zip(writers, range(start, len(files)), strict=False))
        shards = [_whole(layout, files[batch[r]]) if r in batch else Shard({}, ()) for r in range(transport.size)]
        wanted = Layout(layout.tensors, tuple(shards))
        exchange = Exchange(
            plan(layout, wanted, topology, wire.itemsize),
            transport,
            wire,
            source=rank,
            source_layout=layout,
            target=rank,
            target_layout=wanted,
            bucket_bytes=bucket_bytes,
            staging=staging,
        )
        exchanges.append((exchange, batch.get(rank), shards[rank].params))
    try:
        while exchanges:
            exchange, own_file, shapes = exchanges.pop(0)
            tensors = {name: torch.empty(shape, dtype=wire.type_of(name)) for name, shape in shapes.items()}
            exchange.run(params, tensors)
            yield own_file, tensors
            del tensors
    finally:
        staging.close()


def file_names(count: int) -> list[str]:
    """Returns the names of the `count` safetensors files of a directory: model.safetensors for a single file, else
    model-00001-of-00003.safetensors to model-00003-of-00003.safetensors; [] for 0."""
    return [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _whole(layout: Layout, names: Sequence[str]) -> Shard:
    """Returns a shard with each of `names` in full, under the tensor's own name."""
    shapes = {name: layout.tensors[name] for name in names}
    pieces = (Piece(name, Box((0,) * len(s), s), name, (0,) * len(s)) for name, s in shapes.items())
    return Shard(shapes, tuple(pieces))


def _write(tensors: dict[str, Tensor], file: Path | None, forms: Mapping[str, DiskForm]) -> None:
    """Writes the tensors, in their order of axes on disk; nothing without a file. Raises OSError if the file cannot be
    written."""
    if file is None:
        return
    for name in tensors.keys() & forms.keys():
        tensors[name] = forms[name].to_disk(tensors[name])
    try:
        save_file(tensors, str(file), metadata={"format": "pt"})
    except SafetensorError as error:  # no OSError, even for a full disk
        raise OSError(f"{file} cannot be written: {error}") from error
    with open(file, "rb") as written:
        os.fsync(written.fileno())


def _finish(partial: Path, source: Path, dtype: torch.dtype) -> None:
    """Writes index, configuration, tokenizer, and the list of all files."""
    write_companion_files(partial, source, dtype)
    sizes = {file.name: file.stat().st_size for file in partial.iterdir() if file.name != _EXPORTED}
    (partial / _EXPORTED).write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")
