"""Plans on disk: computed once for a pair of layouts, and read by every other process and later run.

A file is a numpy `.npz` without pickle: arrays and a JSON header. The file name is a digest of all inputs of the plan,
and the header is checked against the inputs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_mega.cluster.temporary_files import partial_file
from skyrl_mega.weights.plan.assign import Route
from skyrl_mega.weights.plan.intersect import TransferClasses, TransferTable
from skyrl_mega.weights.plan.plan import Plan
from skyrl_mega.weights.plan.topology import Topology

VERSION = 4
"""Version of the planning algorithm and file format; to be raised with any change of either."""

log = logging.getLogger(__name__)


def cached_plan(folder: Path, key: object, make: Callable[[], Plan], digest: str | None = None) -> Plan:
    """Returns the plan for `key`: read from a file in `folder`, or computed by `make` and written there.

    A damaged file, or a file of another version, key or digest, is logged and replaced. An unwritable folder is logged
    too, and the plan is returned all the same. Errors of `make` are passed on.

    Args:
        folder: Folder of cached plans; created if missing.
        key: All inputs of the plan (settings of both layouts, topology, wire), as JSON types.
        make: Computes the plan.
        digest: The plan's digest; None if unknown: any plan in the file counts. A file from an older version of this
            code may contain another plan.

    Raises:
        OSError: A file with another digest cannot be removed and would mislead other processes.
    """
    key_text = json.dumps([VERSION, key], sort_keys=True)
    path = folder / f"plan-{hashlib.sha256(key_text.encode()).hexdigest()[:24]}.npz"
    cached = None
    try:
        cached = _read(path, key_text)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        log.warning("%s is no plan for these settings (%s); the plan is computed again", path, error)
    if cached is not None:
        if digest in (None, cached.digest):
            return cached
        log.warning(
            "%s has plan %s, but these settings give plan %s; the file is replaced", path, cached.digest, digest
        )
        path.unlink()  # otherwise other processes would use it
    plan = make()
    try:
        _write(path, key_text, plan)
    except OSError as error:
        log.warning("the transfer plan cannot be stored, so every process computes it: %s", error)
    return plan


def _write(path: Path, key_text: str, plan: Plan) -> None:
    demand, parts, routes = plan.demand, plan.parts, plan.routes
    header = {
        "key": key_text,
        "tensors": {name: list(shape) for name, shape in parts.tensors.items()},
        "topology": asdict(plan.topology),
    }
    arrays: dict[str, Any] = {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        "tensor": parts.tensor,
        "start": parts.start,
        "shape": parts.shape,
        "nbytes": parts.nbytes,
        "kind": demand.kind,
        "holders": demand.holders,
        "takers": demand.takers,
        "route_source": np.array([r.source for r in routes], np.int64),
        "route_receivers": _joined([r.receivers for r in routes]),
        "route_receivers_count": np.array([len(r.receivers) for r in routes], np.int64),
        "route_parts": _joined([r.parts for r in routes]),
        "route_parts_count": np.array([len(r.parts) for r in routes], np.int64),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial_file(path) as partial:
        with partial.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


def _read(path: Path, key_text: str) -> Plan:
    with np.load(path, allow_pickle=False) as file:
        a = {name: file[name] for name in file.files}
    header = json.loads(a["header"].tobytes())
    if header["key"] != key_text:
        raise ValueError("it is for other settings")
    tensors = {name: tuple(shape) for name, shape in header["tensors"].items()}
    parts = TransferTable(tensors, a["tensor"], a["start"], a["shape"], a["nbytes"])
    receivers = _parted(a["route_receivers"], a["route_receivers_count"])
    routed = _parted(a["route_parts"], a["route_parts_count"])
    rows = zip(a["route_source"].tolist(), receivers, routed, strict=True)
    routes = tuple(Route(source, tuple(to.tolist()), which) for source, to, which in rows)
    demand = TransferClasses(parts, a["kind"], a["holders"], a["takers"])
    return Plan(demand, routes, Topology.of(header["topology"]))


def _joined(rows: list[Any]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(np.asarray(row, np.int64) for row in rows)])


def _parted(flat: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    if counts.sum() != len(flat):
        raise ValueError("its routes are incomplete")
    return np.split(flat, np.cumsum(counts)[:-1]) if len(counts) else []
