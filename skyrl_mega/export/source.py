"""The choice of checkpoint and model to export, and the check of the output folder. Needs no torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl_mega.cluster.atomic_output import refuse_folder
from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.hf_checkpoint.box_header import refuse_old
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.telemetry.run_dir import checkpoints_in
from skyrl_mega.trainer.checkpoints import check_saved_together


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint to export."""

    folder: Path
    """Folder of the policy's files."""
    model: Path
    """Hugging Face directory with the configuration and the tokenizer."""
    hf: dict[str, Any]
    """The model's config.json."""


def find(path: Path, step: int | None, model: Path | None) -> CheckpointSource:
    """Returns the checkpoint chosen on the command line.

    Args:
        path: A run's folder, one of its checkpoints, or the policy's folder in a checkpoint.
        step: Step of a run's checkpoint; None means the newest. Only for a run's folder.
        model: A Hugging Face directory; None means the `model.path` of the run that contains `path`.

    Raises:
        UserError: The checkpoint is missing, incomplete or of an earlier version; the model or, without `model`, the
            run's config.yaml is missing; or `step` is given for another folder than a run's.
    """
    if not path.is_dir():
        raise UserError("no such folder", key=path, fix="give a run's folder or one of its checkpoints")
    run: Path | None = None
    if _is_run(path):
        run, folder = path, _run_checkpoint(path, step)
    elif step is not None:
        raise UserError(
            f"{path} is no run's folder", key="--step", value=step, fix="leave --step out, or give the run's folder"
        )
    elif re.fullmatch(r"step_\d+(\.partial)?", path.resolve().name) or (path / "policy").is_dir():
        run, folder = path.resolve().parents[1], _complete_checkpoint(path)
    else:
        folder = path
        if path.resolve().name == "policy":
            run = path.resolve().parents[2]
    refuse_old(folder)
    check_saved_together(folder)
    model_folder = model or _model_of(run, path)
    return CheckpointSource(folder, model_folder, read_config(model_folder))


def check_output(output: Path) -> None:
    """Raises UserError if the output is a file, a folder with entries, or in a place where this user may not write. A
    missing or empty folder is allowed, and nothing is created."""
    refuse_folder(output, f"--output {output}")
    parent = disk_of(output)
    if not os.access(parent, os.W_OK):
        raise UserError(f"{parent} may not be written to", key="--output", value=output, fix="choose another place")


def disk_of(output: Path) -> Path:
    """Returns an existing folder on the disk of the export: the output itself, with links followed, or the nearest
    existing parent."""
    target = Path(os.path.realpath(output))
    return next(path for path in (target, *target.parents) if path.is_dir())


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir() or (path / "config.yaml").is_file()


def _run_checkpoint(run: Path, step: int | None) -> Path:
    complete = checkpoints_in(run / "checkpoints")
    if not complete:
        raise UserError(
            "has no whole checkpoint",
            key=run,
            fix="give another run, or continue this one until it saves one, every checkpoint.every steps",
        )
    if step is not None and step not in complete:
        raise UserError(
            f"{run} has no checkpoint of that step; allowed are {_listed(complete)}", key="--step", value=step
        )
    return complete[max(complete) if step is None else step] / "policy"


def _listed(steps: Any) -> str:
    return ", ".join(str(step) for step in sorted(steps))


def _complete_checkpoint(step: Path) -> Path:
    if step.resolve().name.endswith(".partial") or not (step / "state.json").is_file():
        raise UserError("the save of this checkpoint was interrupted", key=step, fix="take another checkpoint")
    return step / "policy"


def _model_of(run: Path | None, path: Path) -> Path:
    """Returns `model.path` of the run; a relative path starts where the run was started.

    Raises:
        UserError: The run's settings or the model are missing.
    """
    if run is None or not (run / "config.yaml").is_file():
        raise UserError(
            f"{path} has no config.yaml of a run beside it", key="--model", fix="give --model, a Hugging Face directory"
        )
    try:
        config = OmegaConf.create(yaml.safe_load(safe_read.read(run / "config.yaml", "give --model")))
        named, directory = Path(config["model"]["path"]), Path(config["run"]["directory"])
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError, KeyError, TypeError) as error:
        raise UserError(f"has no model.path ({error})", key=run / "config.yaml", fix="give --model") from error
    places = [named]
    if not named.is_absolute() and not directory.is_absolute():
        places.insert(0, run.resolve().parents[len(directory.parts)] / named)
    for place in places:
        if place.is_dir():
            return place
    raise UserError(f"{named} of {run / 'config.yaml'} is not there any more; give --model", key="model.path")
