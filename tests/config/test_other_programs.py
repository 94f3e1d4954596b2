"""Messages for settings of SkyRL, verl, slime, TRL or NeMo-RL."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError, UserErrors
from skyrl_mega.config.checks import check
from skyrl_mega.config.command import WRONG_INPUT, Parser, guarded
from skyrl_mega.config.compose import compose
from skyrl_mega.config.keys import keys
from skyrl_mega.config.other_programs import lookup
from skyrl_mega.config.other_programs.table import Counterpart, programs

ROOT = Path(__file__).parents[2]
FREE = [name for name, key in keys().items() if key.type is dict]
YAML = {"null": None, "true": True, "false": False, "-1": -1, "0": 0}
SAME = {"data.shuffle", "algorithm.gamma", "policy.precision", "cluster.gpus_per_node"}
"""Settings with the same name here."""


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="train", allow_abbrev=False)
    p.add_argument("--config", required=True)
    p.add_argument("overrides", nargs="*")
    return p


def typed_option(name: str) -> object:
    return parser().parse_intermixed_args([name, "17"])


def typed_key(name: str) -> object:
    return compose(None, [f"{name}=17"])


def said(run: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns the error lines of a command after wrong input."""
    assert guarded(lambda: run() and 0) == WRONG_INPUT
    return capsys.readouterr().err.splitlines()


def entries(program: str) -> dict[str, Counterpart]:
    """Returns a program's table, with `.*` replaced by a key below."""
    table = programs()[program]
    below = {key: f"{key[:-1]}anything" if key.endswith("*") else key for key in table}
    return {below[key]: entry for key, entry in table.items() if key not in SAME}


def test_every_key_that_is_named_is_a_setting() -> None:
    named: dict[str, str] = {}
    for table in programs().values():
        for theirs, entry in table.items():
            for each in (entry, *entry.values.values()):
                assert each.here or each.note, f"{theirs}: it says neither what it is here nor what to do instead"
                named.update(dict.fromkeys(each.here, theirs))
    for ours, theirs in named.items():
        name = ours.partition("=")[0].removesuffix(".*")
        assert name in keys() or any(name.startswith(f"{free}.") for free in FREE), f"{theirs}: no setting {name}"
    compose(None, [ours for ours in named if "=" in ours])  # their values are allowed


@pytest.mark.parametrize("program", programs())
def test_each_key_alone_is_answered_in_one_line(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    for theirs, entry in entries(program).items():
        given = [theirs, "17"] if theirs.startswith("--") else [f"{theirs}=17"]
        option = theirs.startswith("--")
        lines = said(
            lambda given=given, option=option: (
                parser().parse_intermixed_args(given) if option else compose(None, given)
            ),
            capsys,
        )
        assert len(lines) == 1 and lines[0].startswith(f"error: {theirs} is "), lines
        assert f"{program}'s" in lines[0] and "did you mean" not in lines[0] and lookup.PAGE in lines[0]
        names = [ours.removesuffix(".*") for ours in entry.here]
        whose = [name for name, table in programs().items() if lookup.find(table, theirs)]
        assert whose[0] != program or all(name in lines[0] for name in names), lines


@pytest.mark.parametrize("program", programs())
def test_values_that_are_another_answer_are_answered(program: str) -> None:
    for theirs, entry in entries(program).items():
        for value, by_value in entry.values.items():
            line = lookup.answer(theirs, YAML.get(value, value))
            assert line and line.startswith(f"{theirs}={value} is ")
            assert all(ours in line for ours in by_value.here) and by_value.note.removesuffix(")") in line


def test_the_tables_have_enough() -> None:
    assert sum(map(len, programs().values())) >= 600
    assert not {key for table in programs().values() for key in table} & set(keys()) - SAME


def test_all_unknown_keys_of_a_command_line_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("trainer: {policy: {model: {path: m}}, epochs: 3}\ngenerator: {foo: 1}\n")
    lines = said(
        lambda: compose(
            file,
            [
                "+generator.engine_init_kwargs.swap_space=4",
                "trainer.algorithm.advantage_estimator=gae",
                "critic.optim.lr=1e-5",
                "run.sed=1",
                "beta=0.04",
            ],
        ),
        capsys,
    )
    assert [line.split(" (docs")[0] for line in lines[:2]] == [
        "error: trainer.policy.model.path is SkyRL's; here it is model.path",
        "error: trainer.epochs is SkyRL's; here it is run.epochs",
    ]
    assert lines[2].startswith(
        "error: generator.foo = 1 is not known here; did you mean rollout.generator? allowed in a "
    )
    assert lines[2].endswith("; docs/migration.md has keys of other programs")
    assert lines[3].startswith(
        "error: generator.engine_init_kwargs.swap_space is SkyRL's; here it is rollout.options.swap"
    )
    assert lines[4].startswith("error: trainer.algorithm.advantage_estimator=gae is SkyRL's; here it is algorithm.adv")
    assert lines[5].startswith("error: critic.optim.lr is verl's; here it is critic.optimizer.lr (docs")
    assert lines[6].startswith("error: run.sed = 1 is not known here; did you mean run.seed?")
    assert lines[7].startswith("error: beta is TRL's; here it is algorithm.kl.coefficient")


def test_options_of_other_programs_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--advantage-estimator", "grpo", "--colocate", "--sglang-log-level", "x", "--nothing-known"]
    lines = said(lambda: parser().parse_intermixed_args([*words, "--learning_rate=1e-6"]), capsys)
    assert [line.partition("; ")[0] for line in lines] == [
        "error: --advantage-estimator=grpo is slime's",
        "error: --colocate is slime's",
        "error: --sglang-log-level is slime's",
        "error: --nothing-known is not known here",
        "error: --learning_rate is TRL's",
    ]
    assert lookup.options([], {}) == []
    assert said(lambda: parser().parse_intermixed_args(["--nothing-known"]), capsys) == [
        "error: the following arguments are required: --config; see train --help"
    ]


def test_another_programs_command_line_is_answered_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(lambda: parser().parse_intermixed_args(["trainer.epochs=20", "data.shuffle=true"]), capsys)
    assert lines == ["error: trainer.epochs is SkyRL's; here it is run.epochs (docs/migration.md)"]


def test_a_group_is_answered_down_to_its_keys() -> None:
    with pytest.raises(UserErrors) as caught:
        compose(
            None, ["actor_rollout_ref={rollout: {n: 4, engine_kwargs: {vllm: {a: 1}}}, ref: {fsdp_config: {x: 1}}}"]
        )
    assert [line.split(" is ")[0] for line in caught.value.lines] == [
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.a",
        "actor_rollout_ref.ref.fsdp_config",
    ]


def test_an_option_that_the_run_decides_is_not_passed_on() -> None:
    arguments = "generator.inference_engine.engine_init_kwargs"
    assert lookup.answer(f"{arguments}.seed") == f"{arguments}.seed is SkyRL's; here it is run.seed (docs/migration.md)"
    assert "here there is none: the run decides it" in (lookup.answer(f"{arguments}.load_format") or "")
    assert "here it is rollout.options.swap_space " in (lookup.answer(f"{arguments}.swap_space") or "")
    for table in programs().values():
        for theirs, entry in table.items():
            for ours in (ours for each in (entry, *entry.values.values()) for ours in each.here):
                setting, _, option = ours.partition("=")[0].rpartition(".")
                assert option not in lookup.DECIDED.get(setting, {}), f"{theirs}: {ours} is refused"


@pytest.mark.parametrize(
    ("theirs", "value", "here"),
    [
        ("actor_rollout_ref.actor.megatron.param_offload", True, "[engine_weights,kv_cache,gradients,optimizer]"),
        ("actor_rollout_ref.actor.megatron.param_offload", False, "null: all stay"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", True, "[engine_weights,kv_cache,optimizer]"),
        ("critic.megatron.optimizer_offload", True, "[engine_weights,kv_cache,parameters,gradients,optimizer]"),
        ("trainer.policy.fsdp_config.cpu_offload", True, "[engine_weights,kv_cache]"),
        ("actor_rollout_ref.rollout.free_cache_engine", True, "[parameters,gradients,optimizer]"),
        ("actor_rollout_ref.rollout.free_cache_engine", False, "null: all stay"),
        ("--offload-train", "", "[engine_weights,kv_cache]"),
        ("--no-offload-train", "", "[parameters,gradients,optimizer]"),
        ("--offload-rollout", "", "[parameters,gradients,optimizer]"),
        ("--no-offload-rollout", "", "[engine_weights,kv_cache]"),
    ],
)
def test_what_stays_when_something_is_offloaded(theirs: str, value: object, here: str) -> None:
    assert f" it is residency.keep={here}" in (lookup.answer(theirs, value) or "")


def test_a_page_is_named_once_and_in_one_place() -> None:
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.fp8_param"
    assert (lookup.answer(key, True) or "").endswith("with fp8_blockwise (docs/precision.md, docs/migration.md)")


def test_many_mistakes_have_an_end() -> None:
    error = UserErrors(f"mistake {n}" for n in range(1000))
    assert len(error.lines) == UserErrors.MOST + 1 and error.lines[-1] == "and 800 more"
    assert UserError("one").lines == ["one"] and "\n" not in str(UserErrors(["a\nb", "c"]))


def test_every_estimate_of_verl_is_answered_in_loss_and_reward() -> None:
    table = programs()["verl"]
    names = {f"{name}{plus}" for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full") for plus in "+ "}
    for key in ("algorithm.kl_penalty", "actor_rollout_ref.actor.kl_loss_type"):
        assert set(table[key].values) == {name.strip() for name in names}


def page() -> str:
    return (ROOT / "docs" / "migration.md").read_text().partition("## Every key")[0]


def test_the_whole_commands_of_the_page_are_accepted() -> None:
    commands = re.findall(r"^    (python -m skyrl_mega\.launch (?:.*\\\n)*.*)$", page(), re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        _, _, _, option, file, *settings = shlex.split(command.replace("\\\n", " "))
        assert option == "--config"
        check(compose(ROOT / file, settings), planned=True)


def test_the_whole_commands_of_the_page_say_all_of_their_rows() -> None:
    for part in page().split("\n## ")[1:4]:
        (command,) = re.findall(r"^    (python -m skyrl_mega\.launch (?:.*\\\n)*.*)$", part, re.MULTILINE)
        file, *settings = shlex.split(command.replace("\\\n", " "))[4:]
        codes = re.findall(r"`'?([^`']+)", " ".join(re.findall(r"^\|.*\| (.+) \|$", part, re.MULTILINE)[2:]))
        rows = [word for code in codes for word in code.split() if "=" in word and not code.startswith("python")]
        assert len(rows) >= 20
        assert compose(ROOT / file, [*settings, *rows]) == compose(ROOT / file, settings)


def test_each_row_of_the_page_is_as_the_tables_have_it() -> None:
    rows = re.findall(r"^\| `([\w.]+)=.*` .*?\| (.+) \|$", page(), re.MULTILINE)
    assert len(rows) >= 80
    for theirs, here in rows:
        ours = [setting.split("=")[0] for code in re.findall(r"`'?([^`]+)`", here) for setting in code.split()]
        if not any(theirs in table for table in programs().values()) or ours[:1] == ["python"]:
            assert theirs in ("model", "train_dataset"), theirs
            continue
        line = lookup.answer(theirs) or ""
        assert here == "–" or any(setting in line for setting in ours), (theirs, ours, line)


@pytest.mark.parametrize(
    ("words", "here"),
    [
        (["--lam=0.9"], "it is algorithm.gae.lam"),
        (["--vf_coef=0.1"], "a critic has an optimizer of its own: critic.optimizer.lr"),
        (["--cliprange_value=0.2"], "it is critic.value_clip"),
        (["--num_ppo_epochs=4"], "it is data.epochs_per_step and critic.epochs"),
        (["--kl_coef=0.05"], "algorithm.kl.coefficient: with algorithm.kl.where=reward"),
        (["--cliprange=0.2"], "it is algorithm.clip_low and algorithm.clip_high"),
        (["--gamma=1.0"], "it is algorithm.gamma"),
        (["--epsilon_high=5"], "with cispo algorithm.cispo.clip_high, which is it less 1"),
        (["actor_rollout_ref.actor.clip_ratio_high=4"], "cispo has algorithm.cispo.clip_high"),
        (["+algorithm.gdpo_reward_keys=[a,b]"], "it is algorithm.advantage=gdpo: an environment's step names"),
        (["+algorithm.gdpo_reward_weights=[1,2]"], "it is algorithm.reward_weights: name: weight, not a list"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], "it is algorithm.rejection.level=token: its bounds"),
        (["algorithm.rollout_correction.rollout_rs=seq_mean_k1"], "it is algorithm.rejection.level=geometric"),
        (["algorithm.rollout_correction.rollout_rs=seq_max_k2"], "there is none: algorithm.rejection looks at ratios"),
        (["algorithm.kl_penalty=kl"], "it is algorithm.kl.estimator=k1: with where=reward"),
        (["algorithm.kl_penalty=abs"], "it is algorithm.kl.estimator=abs"),
        (["algorithm.kl_penalty=mse"], "it is algorithm.kl.estimator=k2"),
        (["algorithm.kl_penalty=low_var_kl"], "it is algorithm.kl.estimator=k3: with where=reward"),
        (["algorithm.kl_penalty=low_var_kl+"], "it is algorithm.kl.estimator=k3: with where=reward, where the +"),
        (["algorithm.kl_penalty=full"], "there is none: algorithm.kl.estimator is of the token that was drawn"),
        (["actor_rollout_ref.actor.kl_loss_type=low_var_kl+"], "it is algorithm.kl.estimator=k3+"),
        (["actor_rollout_ref.actor.kl_loss_type=kl+"], "it is algorithm.kl.estimator=k2: its gradient is k2's"),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_what_others_call_ppo_gdpo_kl_and_rejection(
    words: list[str], here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = words[0].startswith("--")
    run = (lambda: parser().parse_intermixed_args(words)) if option else (lambda: compose(None, words))
    (line,) = said(run, capsys)
    assert here in line
