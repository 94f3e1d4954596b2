"""Absurd configuration files and arguments, and secrets among the settings."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.secrets import masked
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose, dump
from skyrl_mega.planner.candidates import KNOBS
from skyrl_mega.telemetry.console import Console

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
        ("data.train=" + "[" * 3000 + "]" * 3000, "not of the form"),
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
    for key, knob in KNOBS.items():
        if key in ("policy.layout.tensor", "policy.ranks", "policy.micro_tokens"):
            assert all(other >= 1 for other in knob.near(value) if other is not None)


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
    assert (
        "Bearer ${oc.env:MY_API_KEY}" in written
        and "max_tokens: 5" in written
        and "directory: /data/of/mine" in written
    )
    (tmp_path / "again.yaml").write_text(written)
    given = [f"environment.options.{key}=again" for key in ("mine.password", "other.hf", "other.url")]
    assert compose(tmp_path / "again.yaml", given).environment.options["mine"]["header"] == f"Bearer {secret}"


def test_what_is_masked() -> None:
    given = {"a": {"tokens": 3, "token_variable": "T", "api_key": "k", "dbPass": "x", "pwd": "y", "auth": ["z", ""]},
             "url": "https://me:pw@host/x", "text": "Bearer hf_" + "a" * 20, "eos_token": "</s>"}  # fmt: skip
    assert masked(given) == {
        "a": {"tokens": 3, "token_variable": "T", "api_key": "***", "dbPass": "***", "pwd": "***", "auth": ["***", ""]},
        "url": "https://***@host/x", "text": "***", "eos_token": "</s>",
    }  # fmt: skip


@pytest.mark.parametrize("value", ["hunter2", "q7", "1234", "correct horse: battery", "x" * 100])
@pytest.mark.parametrize("variable", ["TOKEN", "db_pass", "MY_API_KEY"])
def test_a_secret_that_comes_from_the_environment_is_shown_nowhere(
    value: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    taken = f"${{oc.env:{variable}}}"
    options = f"environment.options.mine={{credential: '{taken}', plain: '{taken}', list: ['{taken}', 'a {taken} b']}}"
    config = compose(None, [options, "environment.options.mine.again=${environment.options.mine.plain}",
                            "data.train=[t.parquet]", "model.path=Qwen3-30B-A3B"])  # fmt: skip
    mine = config.environment.options["mine"]
    assert mine["plain"] == mine["credential"] == mine["again"] == value
    (tmp_path / "it.yaml").write_text(dump(config))
    assert value not in dump(config)
    assert compose(tmp_path / "it.yaml") == config
    console = Console(out=io.StringIO())
    console.log_to(tmp_path / "run.log")
    console.say(f"gives {value}, or {value!r}")
    console.close()
    log = (tmp_path / "run.log").read_text()
    assert (value in log) == (len(value) < 8) and (taken in log) == (len(value) >= 8)
    for wrong in ("run.seed", "run.steps", "policy.layout.tensor", "algorithm.advantage", "rollout.top"):
        with pytest.raises(UserError) as caught:
            check(compose(None, [f"{wrong}={taken}"]))
        assert value not in str(caught.value) or (value == "1234" and wrong == "run.seed")
    with pytest.raises(UserError) as caught:
        check(compose(None, [f"model.path={taken}", "data.train=[t.parquet]", f"run.name='a b/{taken}'"]))
    assert value not in str(caught.value) or len(value) < 8


def test_what_is_no_secret_is_written_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER_OF_MODELS", "/data/models")
    monkeypatch.setenv("SHORT_SECRET", "train")
    given = [
        "model.path=${oc.env:FOLDER_OF_MODELS}/Qwen", "rollout.sampling.stop=[42]", "data.eval=[2024]",
        "environment.options.mine={two_pass: fast, api: rest, pin: a, mode: '${oc.env:SHORT_SECRET}'}",
    ]  # fmt: skip
    config = compose(None, given)
    (tmp_path / "it.yaml").write_text(dump(config))
    console = Console(out=io.StringIO())
    console.log_to(tmp_path / "run.log")
    console.say("step 3: train 4.1 s; saved runs/train")
    console.close()
    assert "step 3: train 4.1 s; saved runs/train" in (tmp_path / "run.log").read_text()
    monkeypatch.delenv("FOLDER_OF_MODELS")  # the run's own file alone remains
    again = compose(tmp_path / "it.yaml")
    assert again == config and again.model.path == "/data/models/Qwen"
    assert (again.rollout.sampling.stop, again.data.eval) == (["42"], ["2024"])
    assert again.environment.options["mine"] == {"two_pass": "fast", "api": "rest", "pin": "a", "mode": "train"}


def test_a_password_in_an_address_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WHO": "somebody", "WITH": "correct-horse", "WHERE": "http://me:opensesame@host"}.items():
        monkeypatch.setenv(name, value)
    config = compose(
        None, ["environment.options.mine={one: 'http://${oc.env:WHO}:${oc.env:WITH}@host', two: '${oc.env:WHERE}'}"]
    )
    (tmp_path / "it.yaml").write_text(dump(config))
    assert "correct-horse" not in dump(config) and "opensesame" not in dump(config)
    assert compose(tmp_path / "it.yaml") == config


def test_masked_settings_are_not_taken_for_values(tmp_path: Path) -> None:
    for key, value in (("environment.options.mine.password", "***"), ("environment.options.mine.url", "http://***@h")):
        (tmp_path / "it.yaml").write_text(dump(compose(None, [f"{key}=\"{value}\"".replace("***", "secret")]
                                                       if "url" in key else [f"{key}=secret"])))  # fmt: skip
        with pytest.raises(UserError, match=rf"^{key} = .*a secret that was masked .* give it again"):
            compose(tmp_path / "it.yaml")
        assert compose(tmp_path / "it.yaml", [f"{key}=again"])
    assert compose(None, ["rollout.sampling.stop=['***']"]).rollout.sampling.stop == ["***"]
