"""Who holds what: one row per policy rank, and one per engine worker."""

from __future__ import annotations

from typing import Any

from skyrl_mega.config.derived import engine_ranks, expert_parallel
from skyrl_mega.config.schema import Config
from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models.decoder import Decoder


def seats(parallel: Parallel, d: Decoder) -> list[dict[str, Any]]:
    """One row per rank: its coordinates, and the layers, heads and experts that it holds (`0-7`, inclusive)."""
    rows = []
    for rank in range(parallel.ranks):
        at = parallel.coordinates(rank)
        chunks = [parallel.stage_layers(d.layers, at.pp, chunk) for chunk in range(parallel.virtual_pipeline)]
        row = {"rank": rank, **at._asdict(), "layers": " ".join(f"{c.start}-{c.stop - 1}" for c in chunks)}
        row |= {"heads": share(d.heads, parallel.tensor, at.tp), "kv": share(d.kv_heads, parallel.tensor, at.tp)}
        if d.experts:
            row["experts"] = share(d.experts.count, parallel.expert, at.ep)
            row["columns"] = share(d.experts.width, parallel.expert_tensor, at.etp)
        rows.append(row)
    return rows


def workers(config: Config, d: Decoder) -> list[dict[str, Any]]:
    """One row per worker of one engine; all engines are alike."""
    tensor, count = config.rollout.tensor, engine_ranks(config.rollout)
    rows = []
    for worker in range(count):
        at = worker % tensor
        kv = share(d.kv_heads, tensor, at) if d.kv_heads >= tensor else str(at * d.kv_heads // tensor)
        row = {"worker": worker, "layers": f"0-{d.layers - 1}", "heads": share(d.heads, tensor, at), "kv": kv}
        if d.experts and expert_parallel(config.rollout):
            base, more = divmod(d.experts.count, count)
            first = worker * base + min(worker, more)
            row |= {"experts": f"{first}-{first + base + (worker < more) - 1}", "columns": share(d.experts.width, 1, 0)}
        elif d.experts:
            row |= {"experts": share(d.experts.count, 1, 0), "columns": share(d.experts.width, count, worker)}
        rows.append(row)
    return rows


def share(total: int, parts: int, index: int) -> str:
    """The `index`-th of equal parts of `total` things, as `first-last`."""
    size = total // parts
    first = index * size
    return f"{first}-{first + size - 1}" if size > 1 else str(first)
