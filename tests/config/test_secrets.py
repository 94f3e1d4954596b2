"""Secret settings in many spellings, and settings without secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyrl_mega.cli.resuming import changes
from skyrl_mega.common import secrets
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.secrets import leaves, masked
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose, dump
from skyrl_mega.config.keys import keys

S = "Tr0ub4dor"
SPELLINGS: list[Any] = [
    {"X-API-Key": S}, {"api_keys": [S]}, {"tokens": [S, S]}, {"openai_key": S}, {"jwt": S}, {"apiKey": S},
    {"APIKey": S}, {"secrets": {"a": {"b": S}}}, {"auth": {"user": S, "pw": S}}, {"credentials": [{"x": S}]},
    {"secret_value": S}, {"headers": {"Authorization": f"Bearer {S}"}}, {"headers": {"X-Mine": S}},
    {"headers": [f"X-Auth-Token: {S}"]}, {"client-secret": S}, {"refreshToken": S}, {"accesstoken": S},
    {"mydbpassword": S}, {"botToken": S}, {"token_2": S}, {"AWS_SECRET_ACCESS_KEY": S}, {"api_key_openai": S},
    {"openai": {"key": S}}, {"Cookie": S}, {"basic_auth": f"u:{S}"}, {"url": f"https://h/x?token={S}&a=1"},
    {"url": f"https://h/x?a=1&key={S}"}, {"url": f"https://h/x#access_token={S}"}, {"dsn": f"postgres://u:{S}@h/db"},
    {"dsn": f"postgres://u:p/{S}@h/db"}, {"dsn": f"redis://:a@{S}@h:6379"},
    {"conn": f"AccountName=a;AccountKey={S}==;Suffix=x"}, {"conn": f"Server=s;Pwd={S};"},
    {"conn": f"host=h password={S}"}, {"command": f"run --token {S} --port 1"}, {"command": f"run --api-key={S}"},
    {"command": f"HF_TOKEN={S} run"}, {"command": ["run", "--token", S]}, {"command": ["run", f"--api-key={S}"]},
    {"command": f"run -password '{S} b'"}, {"command": f"curl -H 'Authorization: Bearer {S}' h"},
    {"body": f'{{"api_key": "{S}"}}'}, {"header": f"Bearer {S}"}, {"password": 12345678},
    {"secrets": {"pin": 12345678}}, {"key": "q7w8e9r0t1y2"},
]  # fmt: skip
PLAIN: list[Any] = [
    {"max_tokens": "5"}, {"tokens": "300"}, {"tokens": 4}, {"tokenizer": "x"}, {"pad_token_id": 3},
    {"eos_token": "</s>"}, {"special_tokens": ["<a>"]}, {"key_value_heads": 2}, {"image_key": "image"},
    {"answer_key": "a"}, {"key": "column"}, {"keys": ["a", "b"]}, {"sort": {"key": "name"}}, {"two_pass": "fast"},
    {"author": "me"}, {"monkey": "x"}, {"auth": True}, {"token_variable": "HF_TOKEN"}, {"password_file": "/x/y"},
    {"auth_type": "basic"}, {"secret_name": "k"}, {"headers": {"Content-Type": "application/json"}},
    {"command": "run --max-tokens 5 --tokenizer x --tokens 300 a"}, {"url": "https://h:8000/path@v1?x=a&tokens=30"},
    {"text": "Your password: eight letters. A key: b. A=b; secret tea."},
    {"template": "{{ bos_token }}{% if token == 'x' %}"}, {"text": "basic training, reward: *** good"},
    {"max_num_batched_tokens": "many"},
]  # fmt: skip


def written(mine: Mapping[str, Any], folder: Path) -> tuple[str, Any]:
    """Returns an environment's options as written to a file, as YAML text and as a tree."""
    (folder / "it.yaml").write_text(json.dumps({"environment": {"options": {"mine": mine}}}))
    text = dump(compose(folder / "it.yaml"))
    return text, yaml.safe_load(text)["environment"]["options"]["mine"]


@pytest.mark.parametrize("mine", SPELLINGS, ids=json.dumps)
def test_a_secret_in_any_spelling_is_masked_and_asked_for_again(mine: Any, tmp_path: Path) -> None:
    text, tree = written(mine, tmp_path)
    assert "***" in text and not any(secret in text for secret in (S, "12345678", "q7w8e9r0t1y2"))
    with pytest.raises(UserError, match="a secret that was masked when these settings were written"):
        written(tree, tmp_path)


@pytest.mark.parametrize("mine", PLAIN, ids=json.dumps)
def test_what_only_sounds_like_a_secret_is_written(mine: Any, tmp_path: Path) -> None:
    assert written(mine, tmp_path)[1] == mine


def test_no_setting_of_the_schema_and_no_recipe_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_from_environment", {})  # left from earlier tests
    for name, key in keys().items():
        if key.group or name.startswith("rollout.sampling.stop"):
            continue
        for value in ("some text", 12345678, ["some", "--port", "1"]):
            assert masked(value, name) == value, name
    recipes = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    assert len(recipes) > 10
    for recipe in recipes:
        settings = asdict(compose(recipe))
        assert dict(leaves(masked(settings))) == dict(leaves(settings)), recipe


@pytest.mark.parametrize("name", ["password_game", "token", "secrets"])
def test_an_environment_may_be_called_like_a_secret(name: str) -> None:
    config = compose(None, [f"environment.classes.{name}=mine.py:Env", f"environment.options.{name}={{mode: fast}}"])
    assert asdict(config)["environment"] == masked(asdict(config))["environment"]


def test_a_second_key_that_interpolates_a_secret(tmp_path: Path) -> None:
    tree = {
        "password": S, "again": "${environment.options.mine.password}", "near": "${.password}", "pin": "ab",
        "text": "a ${environment.options.mine.password} b", "copied": f"uses {S} too", "short": "${.token}",
        "token": "ab", "url": "http://me:${environment.options.mine.password}@h", "plain": "${.mode}", "mode": "fast",
    }  # fmt: skip
    text, options = written(tree, tmp_path)
    assert S not in text
    same = ("again", "near", "text", "short", "url")
    assert {name: options[name] for name in same} == {name: tree[name] for name in same}
    assert (options["plain"], options["pin"], options["copied"]) == ("fast", "ab", "***")
    (tmp_path / "again.yaml").write_text(text)
    given = [f"environment.options.mine.{name}={value}" for name, value in
             (("password", "swordfish"), ("token", "cd"), ("copied", "x"))]  # fmt: skip
    mine = compose(tmp_path / "again.yaml", given).environment.options["mine"]
    assert (mine["text"], mine["short"], mine["url"]) == ("a swordfish b", "cd", "http://me:swordfish@h")


@pytest.mark.parametrize("secret", ["S", "hunter22", "two words", "a, b", "x: y"])
@pytest.mark.parametrize(
    "argument",
    [
        "environment.retriever.token='{}'",
        "environment.retriever.url={{password: '{}'}}",
        "environment.token='{}'",
        "environment.secrets={{a: ['{}']}}",
        "nothing.auth='{}'",
        "trainer.api_key='{}'",
        "run.seed={{secret: '{}'}}",
        "environment.options.token='{}'",
        "run.steps=[1,--token,'{}']",
        "environment.token={}'[",
    ],
)
def test_no_error_repeats_a_secret(argument: str, secret: str) -> None:
    with pytest.raises(UserError) as caught:
        check(compose(None, [argument.format(secret)]))
    for line in caught.value.lines:
        assert f"'{secret}'" not in line and f" {secret}" not in line and f"={secret}" not in line


def test_an_error_of_anybody_shows_no_secret() -> None:
    for message in (
        f"mine.token = {S} b: allowed is x",
        f"http://me:{S}@h: no",
        f"https://h?api-key={S}: 404",
        f"--token {S}",
    ):
        assert S not in str(UserError(message)) and "***" in str(UserError(message))
    for message in (
        "rollout.max_tokens = 5: allowed is ≥ 1",
        "tokenizer = a b: no",
        "'a.token=${oc.env:NAME}'",
        "--wandb-key is slime's; here it is telemetry.trackers",
        "environment.options.addition.api_key: there is no such option",
        "model.embed_tokens.weight: the checkpoint has shape [4]",
    ):
        assert str(UserError(message)) == message


def test_a_resume_neither_prints_an_old_secret_nor_stops(tmp_path: Path) -> None:
    given = [f"run.directory={tmp_path}", "run.name=r", "environment.options.mine={tokens: [swordfish], mode: a}"]
    config = compose(None, given)
    folder = tmp_path / "r" / "checkpoints" / "step_000001"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": 1, "files": {}}))
    before = dump(config)
    (tmp_path / "r" / "config.yaml").write_text(before)
    assert changes(config) == []
    (tmp_path / "r" / "config.yaml").write_text(before.replace("'***'", "swordfish"))  # written by an older version
    assert changes(config) == []
