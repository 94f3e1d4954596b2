"""Safe reading: every reader rejects irregular files without waiting."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.records import records
from skyrl_mega.config.compose import compose
from skyrl_mega.config.sandboxes import row_count
from skyrl_mega.config.schema import BuildConfig, EnvironmentConfig
from skyrl_mega.data.rows import check_files
from skyrl_mega.hf_checkpoint.index import read_config, read_header
from skyrl_mega.models.tiny import build
from skyrl_mega.report import rows
from skyrl_mega.retriever.embedder import Embedder
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trajectories.parquet import read_steps

READERS: dict[str, Callable[[Path], object]] = {
    "it.json": lambda file: safe_read.read_json(file, "write it again"),
    "it.jsonl": lambda file: list(records(file)),
    "list.json": lambda file: list(records(file)),
    "it.parquet": lambda file: list(records(file)),
    "prompts.parquet": lambda file: check_files([file], EnvironmentConfig()),
    "step_000001.parquet": rows.read,
    "step_000002.parquet": rows.tokens,
    "step_000003.parquet": read_steps,
    "model.safetensors": read_header,
    "run.yaml": lambda file: safe_read.read(file, "give a .yaml file"),
    "group/it.yaml": lambda file: compose(_with_group(file)),
    "config.json": lambda file: read_config(file.parent),
    "tokenizer.json": lambda file: Renderer(str(file.parent)),
    "chat_template.jinja": lambda file: Renderer(str(file.parent)),
    "tokenizer_config.json": lambda file: Embedder(file.parent, device="cpu"),
    "1_Pooling/config.json": lambda file: Embedder(file.parents[1], device="cpu"),
}


def _with_group(file: Path) -> Path:
    main = file.parents[1] / "main.yaml"
    main.write_text("defaults: [group: it]\n")
    return main


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a Hugging Face directory with a tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    build(BuildConfig(), folder)
    return folder


def put(kind: str, file: Path) -> socket.socket | None:
    """Puts an irregular file in a file's place."""
    file.parent.mkdir(exist_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        bound = socket.socket(socket.AF_UNIX)
        os.chdir(file.parent)  # a socket's address is limited to 108 bytes
        bound.bind(file.name)
        return bound
    return None


@pytest.mark.parametrize("kind", ["fifo", "device", "socket"])
@pytest.mark.parametrize("name", READERS)
def test_it_is_refused_with_its_path(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "it"
    shutil.copytree(tiny_model, folder)
    (folder / name).unlink(missing_ok=True)
    bound = put(kind, folder / name)
    raised: list[Exception] = []

    def read() -> None:
        try:
            READERS[name](folder / name)
        except (UserError, OSError) as error:
            raised.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(60)  # the old readers waited or read forever
    assert not reading.is_alive() and raised
    words = {"fifo": "it is a FIFO", "device": "it is a device", "socket": "No such device|it is a socket"}[kind]
    assert any(word in str(raised[0]) for word in words.split("|")) and str(folder / name) in str(raised[0])
    if bound:
        bound.close()


def test_folders_links_and_counts(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(UserError, match=r"a\.json: cannot be read \(Is a directory\)"):
        safe_read.read(tmp_path / "a.json", "write it again")
    (tmp_path / "b.json").symlink_to("absent")
    safe_read.check_folder(tmp_path, "fetch it again")  # a broken link is named by the reader of the file
    (tmp_path / "c.json").write_text(json.dumps({}))
    (tmp_path / "d.json").symlink_to("c.json")
    assert safe_read.read_json(tmp_path / "d.json", "") == {}
    os.mkfifo(tmp_path / "e.parquet")
    assert row_count(str(tmp_path / "e.parquet")) is None


def test_a_small_file_of_a_model_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(safe_read.MOST_BYTES + 1)
    with pytest.raises(UserError, match=r"tokenizer\.json: it has more than 268435456 bytes; fetch it again"):
        safe_read.check_folder(tmp_path, "fetch it again")
