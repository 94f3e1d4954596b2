"""Options of environments: every wrong option is a one-line message before a run starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs.options import Option, choice, filled, group, mapping, number, switch, text, texts, whole
from skyrl_mega.envs.registry import BUILT_IN, check, resolve
from skyrl_mega.envs.sandbox import CommandLimits, Sandbox

NEVER: list[Any] = [math.nan, math.inf, -math.inf, "x\0y", "\ud800", "a" * 5000, [1], [["a"]], {1: {}}, b"x", object()]
"""Values invalid for every option of a number, a text, a choice, a switch or a list."""


def declared(name: str) -> Mapping[str, Option]:
    options = resolve(name, EnvironmentConfig()).OPTIONS
    assert options is not None, f"environment {name} takes whatever is given"
    return options


def leaves(options: Mapping[str, Option], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Option]]:
    for name, option in options.items():
        if option.inner is None:
            yield (*path, name), option
        else:
            yield from leaves(option.inner, (*path, name))


def nested(path: tuple[str, ...], value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def refusal(name: str, options: Any) -> str:
    with pytest.raises(UserError) as caught:
        check(EnvironmentConfig(options={name: options}))
    message = str(caught.value)
    assert message.startswith(f"environment.options.{name}") and message.isprintable() and len(message) < 500
    return message


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_wrong_option_of_any_environment_passes(name: str) -> None:
    check(EnvironmentConfig(options={name: {}}))
    for wrong in (5, "x", [1], {"no_such_option": 1}, {7: 1}, {"": 1}):
        refusal(name, wrong)
    for path, option in leaves(declared(name)):
        filled("usual", {"o": option.default}, {"o": option})
        key = ".".join((name, *path))
        for value in NEVER if option.rule.type is not dict else NEVER[:-3]:
            assert f"environment.options.{key} = " in refusal(name, nested(path, value))


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("addition", 5, "environment.options.addition = 5: allowed is none: it has no options"),
        ("math", {"timeout_s": -1}, "math.timeout_s = -1: allowed is a number above 0 and at most 3600"),
        ("math", {"timeout_s": math.nan}, "math.timeout_s = nan: allowed is a number above 0"),
        ("math", {"tail": -5}, "math.tail = -5: allowed is a whole number from 0"),
        ("math", {"right": math.inf}, "math.right = inf: allowed is a number"),
        ("math", {"algebra": "often"}, "math.algebra = often: allowed is true or false"),
        ("python", {"shown_characters": "many"}, "python.shown_characters = many: allowed is a whole number"),
        ("python", {"sandbox": {"wall_s": math.nan}}, "python.sandbox.wall_s = nan: allowed is a number above 0"),
        ("python", {"sandbox": {"processes": 0.5}}, "python.sandbox.processes = 0.5: allowed is a whole number from 1"),
        ("python", {"sandbox": {"memory_mib": math.inf}}, "sandbox.memory_mib = inf: allowed is a whole number"),
        ("python", {"sandbox": [1]}, "python.sandbox = [1]: allowed is a mapping of without, wall_s"),
        ("text2sql", {"query_timeout_s": "long"}, "text2sql.query_timeout_s = long: allowed is a number"),
        ("text2sql", {"max_rows": -1}, "text2sql.max_rows = -1: allowed is a whole number from 1"),
        ("lcb", {"timeout_s": "x"}, "lcb.timeout_s = x: allowed is a number"),
        ("lcb", {"max_tests": True}, "lcb.max_tests = true: allowed is a whole number"),
        ("swe", {"protected": 5}, "swe.protected = 5: allowed is a list of text"),
        ("swe", {"command_timeout_s": -1}, "swe.command_timeout_s = -1: allowed is a number above 0"),
        ("swe", {"session_options": {"cpu_s": 1.5}}, "swe.session_options.cpu_s = 1.5: allowed is a whole number"),
        ("gsm8k", {"strict": True}, "gsm8k.strict: there is no such option; allowed is none"),
        ("aime", {"wrong": "\x1b[31m"}, 'aime.wrong = "\\e[31m": allowed is a number'),
    ],
)
def test_what_is_said(name: str, options: Any, said: str) -> None:
    assert said in refusal(name, options)


def test_limits_under_which_python_does_not_run_are_refused() -> None:
    for limits in (CommandLimits(memory_mib=1), CommandLimits(open_files=1)):
        with pytest.raises(UserError, match="not even an empty Python program runs"):
            Sandbox(limits).check("environment.options.python.sandbox")


def test_a_declaration_of_ones_own() -> None:
    declared = {
        "n": whole(3, "", low=1),
        "x": number(None, ""),
        "on": switch(False, ""),
        "how": choice("a", "b", doc=""),
        "name": text(None, ""),
        "names": texts([], ""),
        "more": mapping(""),
        "box": group({"s": number(1.0, "", above=0)}, ""),
    }
    usual = {"n": 3, "x": None, "on": False, "how": "a", "name": None, "names": [], "more": {}, "box": {"s": 1.0}}
    assert filled("k", None, declared) == filled("k", {}, declared) == usual
    assert filled("k", {"box": {"s": 2}, "how": "b"}, declared) == {**usual, "box": {"s": 2}, "how": "b"}
    for key, wrong in (("n", None), ("names", [""]), ("name", ""), ("box", {"t": 1}), ("how", "c")):
        with pytest.raises(UserError, match=rf"^k\.{key}"):
            filled("k", {key: wrong}, declared)
