"""External inputs of a run: model, reference and data, looked up on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.models.published import how_to_get, hub_name


def check_present(config: Config) -> None:
    """Checks the existence of the settings' models' folders and data files on this machine, without reading them.
    `model.path` may be missing with `model.build`, and data files with `data.prepare`.

    Raises:
        UserError: Some are missing. One line names all keys and paths, and how to get the files.
    """
    if absent := list(_absent(config)):
        raise UserError("; ".join(absent))


def data_files(config: Config) -> dict[str, list[str]]:
    """Returns setting → parquet files, for data.train, data.eval and, with a warm-up, warmup.files; the list of
    warmup.files is empty without a warm-up. The files need not exist."""
    return {
        "data.train": config.data.train,
        "data.eval": config.data.eval,
        "warmup.files": config.warmup.files if config.warmup.steps else [],
    }


def model_config(config: Config) -> Mapping[str, Any]:
    """Returns the content of config.json in `model.path`; if that folder is missing and `model.build` given, the
    content to be written.

    Raises:
        UserError: There is neither the folder nor `model.build`, or config.json is missing or unreadable.
    """
    path = Path(config.model.path)
    if config.model.build is None or path.exists():
        return read_config(path)
    from skyrl_mega.models.tiny import hf_config

    return hf_config(config.model.build)


def _absent(config: Config) -> Iterator[str]:
    models = {
        "model.path": None if config.model.build else config.model.path,
        "reference.path": config.reference.path,
        "critic.path": config.critic.path,
    }
    for key, name in models.items():
        if name and not Path(name).exists():
            how = how_to_get(name) if hub_name(name) else "give a Hugging Face directory with config.json"
            yield f"{key}: {name} is not there; {how}"
    for key, files in data_files(config).items():
        lacking = [] if config.data.prepare else [file for file in files if not Path(file).exists()]
        if lacking:
            do = "does" if len(lacking) == 1 else "do"
            yield f"{key}: {', '.join(lacking)} {do} not exist; `python -m skyrl_mega.data` makes some"
