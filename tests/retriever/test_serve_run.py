"""`python -m skyrl_mega.retriever run`: the service of a run on another node."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyrl_mega.cli import serve_retriever, train
from skyrl_mega.cli.serve_retriever import main
from skyrl_mega.common.errors import UserError
from skyrl_mega.retriever.client import TOKEN_VARIABLE, SearchClient
from tests.retriever.services import ROOT

RECIPE = str(ROOT / "configs" / "searchr1_cpu.yaml")


def test_it_serves_the_index_of_the_settings_until_its_file_is_removed(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "address"
    command = [
        *(sys.executable, "-m", "skyrl_mega.retriever", "run", "--config", RECIPE, "--directory", str(tmp_path)),
        *("--address-file", str(file), "--logs", str(tmp_path)),
        f"environment.retriever.build=--corpus {corpus} --methods bm25",
        "environment.retriever.index=index",
        "environment.retriever.serve=",
        "environment.retriever.url=http://10.0.0.9:1",
        "data.prepare=null",
    ]
    env = {k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE} | {"SKYRL_MEGA_INTERFACE": "lo"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not file.exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        url, token = file.read_text().splitlines()
        assert url.startswith("http://127.0.0.1:") and len(token) >= 32
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        (hits,) = SearchClient(url, token).search(["capital of Hungary"], topk=2)
        assert len(hits) == 2
        file.unlink()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "retriever: ready" in output
    assert token not in output and url not in output


@pytest.mark.parametrize(
    "settings, interface, message",
    [
        (["environment.retriever.index=null"], "lo", "environment.retriever.index = null: "),
        (["environment.retriever.index=absent"], "lo", "holds no index.json"),
        (["environment.retriever.index=absent"], "nowhere0", "SKYRL_MEGA_INTERFACE = nowhere0: "),
    ],
)
def test_wrong_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], interface: str, message: str
) -> None:
    monkeypatch.setenv("SKYRL_MEGA_INTERFACE", interface)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    command = ["--config", RECIPE, "--address-file", str(tmp_path / "address"), "--logs", str(tmp_path)]
    with pytest.raises(UserError) as caught:
        main([*command, "environment.retriever.build=null", *settings])
    assert message in str(caught.value)
    assert not (tmp_path / "address").exists()


def test_options_of_the_launcher_are_ignored() -> None:
    """Parses every option of the launcher: a batch script gives the same arguments to both commands."""
    words = [
        word
        for action in train.parser()._actions
        for word in (action.option_strings[-1:] if action.nargs == 0 else [*action.option_strings[-1:], "4"])
        if action.option_strings and action.dest != "help"
    ]
    args = serve_retriever.parser().parse_intermixed_args([*words, "--address-file", "a", "run.seed=1"])
    assert args.overrides == ["run.seed=1"] and {"--json", "--dry-run", "--suggest", "--like"} <= set(words)


def test_a_setting_after_suggest_is_a_setting(tmp_path: Path) -> None:
    command = ["--config", RECIPE, "--address-file", str(tmp_path / "address"), "--json", "--suggest"]
    with pytest.raises(UserError, match=r"environment\.retriever\.index = null: "):
        main([*command, "environment.retriever.index=null"])
