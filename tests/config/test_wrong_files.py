"""Configuration files and arguments that nobody means, and secrets among the settings."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from skyrl_mega.config.compose import compose, dump
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.secrets import masked, note
from skyrl_mega.sizing import fixes

HOSTILE: list[tuple[str, bytes, str]] = [
    ("defaults that are text", b"defaults: x\n", "defaults: x; allowed is a list such as"),
    ("defaults of numbers", b"defaults: [{1: 2}]\n", "defaults: {1: 2}; allowed is a list"),
    ("defaults in a circle", b"defaults: [it]\n", "its `defaults` go in a circle"),
    ("an anchor in itself", b"run: &a\n  x: *a\n", "it nests deeper than 50 levels"),
    ("5000 levels", b"run: " + b"[" * 5000 + b"]" * 5000, "it nests deeper than 50 levels"),
    ("no UTF-8", b"run: {name: \xff}\n", "is not YAML"),
    ("half of a pair", b'run: {name: "\\ud800"}\n', "half of a surrogate pair"),
    ("a control character", b"run: {name: a\x1bb}\n", "is not YAML"),
    ("too much", b"#" * 2**21, "it has more than 1048576 bytes"),
    ("a tag", b"run: !!python/object/apply:os.system [true]\n", "is not YAML"),
    ("a date that is none", b"run: {name: 2024-02-32}\n", "is not YAML"),
    ("names in a circle", b"run: {name: '${run.directory}', directory: '${run.name}'}\n", "Recursive interpol"),
]


@pytest.mark.parametrize("content, line", [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_file_is_one_line(tmp_path: Path, content: bytes, line: str) -> None:
    (tmp_path / "it.yaml").write_bytes(content)
    with pytest.raises(UserError) as caught:
        compose(tmp_path / "it.yaml")
    assert line in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "argument, line",
    [
        ("=5", "=5: no setting is named"),
        ("..=x", "..=x"),
        ("run.name=" + "[" * 3000 + "]" * 3000, "not of the form"),
        ("run.seed=\x1b[31m", r"\x1b[31m"),
        ("run.name=${run.name}", "Recursive interpolation"),
    ],
)
def test_a_hostile_argument_is_one_line(tmp_path: Path, argument: str, line: str) -> None:
    (tmp_path / "it.yaml").write_text("run: {name: a}\n")
    with pytest.raises(UserError) as caught:
        compose(tmp_path / "it.yaml", [argument])
    assert line in str(caught.value) and str(caught.value).isprintable()


def test_a_name_that_is_too_long() -> None:
    for name in ("a" * 5000 + ".yaml", "a\0b.yaml"):
        with pytest.raises(UserError, match=r"^--config a+.*(cannot be read|no such file)"):
            compose(name)


def test_a_missing_self_says_nothing_but_the_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "b.yaml").write_text("seed: x\n")
    (tmp_path / "it.yaml").write_text("defaults: [run: b]\nrun: {name: a}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError, match=r"run\.seed = x"):
            compose(tmp_path / "it.yaml")


@pytest.mark.parametrize("value", [-2, 0, -(10**9)])
def test_values_near_one_out_of_its_range(value: int) -> None:
    for key, near in fixes.NEAR.items():
        if key in ("policy.layout.tensor", "policy.ranks", "policy.micro_tokens"):
            assert all(other >= 1 for other in near(value) if other is not None)


def test_secrets_are_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "correct-horse-battery"
    monkeypatch.setenv("MY_API_KEY", secret)
    monkeypatch.setenv("FOLDER_OF_RUNS", "/data/of/mine")
    text = (
        "run: {directory: '${oc.env:FOLDER_OF_RUNS}'}\nmodel: {path: Qwen3-30B-A3B}\ncluster: {device: cuda}\n"
        "data: {train: [t.parquet]}\n"
        "environment:\n  options:\n    mine: {header: 'Bearer ${oc.env:MY_API_KEY}', "
        "password: hunter22, max_tokens: 5}\n"
        "    other: {hf: hf_abcdefghijklmnopqrstuvwx, url: 'https://me:pw@host/x'}\n"
    )
    (tmp_path / "it.yaml").write_text(text)
    config = compose(tmp_path / "it.yaml")
    assert config.environment.options["mine"]["header"] == f"Bearer {secret}"
    written = dump(config)
    for hidden in (secret, "hunter22", "hf_abc", "me:pw"):
        assert hidden not in written
    assert "Bearer ${oc.env:MY_API_KEY}" in written and "max_tokens: 5" in written and "/data/of/mine" in written
    (tmp_path / "again.yaml").write_text(written)
    assert compose(tmp_path / "again.yaml").environment.options["mine"]["header"] == f"Bearer {secret}"


def test_what_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2 + "01234567")
    note({"a": ["x ${oc.env:WANDB_API_KEY,none}"]})
    found = masked({"a": ["0123456789abcdef" * 2 + "01234567"], "tokens": 3, "token_variable": "T", "api_key": "k"})
    assert json.dumps(found) == json.dumps(
        {"a": ["${oc.env:WANDB_API_KEY}"], "tokens": 3, "token_variable": "T", "api_key": "***"}
    )
