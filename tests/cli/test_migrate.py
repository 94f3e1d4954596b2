"""The command `python -m skyrl_mega.config migrate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_mega.cli import migrate
from skyrl_mega.config.command import DONE, WRONG_INPUT
from skyrl_mega.config.compose import compose
from skyrl_mega.config.migrate import text

SCRIPT = """\
#!/bin/bash
NODES=${NODES:-2}
MODEL=Qwen/Qwen3-4B-Base
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/rows.parquet data.val_files=$HOME/held.parquet \\
    data.train_batch_size=128 actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    data.max_prompt_length=1024 data.max_response_length=2048 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \\
    trainer.nnodes=$NODES "$@"
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    return file


def test_a_script_becomes_a_file_that_passes_the_dry_run(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "own" / "run.yaml"
    assert migrate.main(["verl", str(script), "trainer.total_epochs=2", "--out", str(out)]) == DONE
    lines = capsys.readouterr().out.splitlines()
    config = compose(out)
    assert (config.cluster.nodes, config.run.epochs, config.data.samples_per_prompt) == (2, 2, 8)
    assert config.rollout.engines == 8 and config.policy.recompute == "full"
    assert lines[-1] == f"next: python -m skyrl_mega.launch --config {out} --dry-run"
    assert lines[-2] == f"to add: {text.REWARD}"  # verl's rows have no env_class, and the script names no function
    assert lines[-3].startswith("dry run: passes; not on this machine: ")
    assert any(line.startswith("  layout ") for line in lines) or "policy.layout" not in out.read_text()
    assert "12 settings of verl: 10 taken, 2 changed, 0 dropped, 0 unknown; " in "\n".join(lines)


def test_ulysses_stays_unless_it_would_split_a_head(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script's model has 8 key/value heads, which verl copies for 16 ranks and this project does not."""
    for size, exchange in ((8, "all_to_all"), (16, "ring")):
        out = tmp_path / f"{size}.yaml"
        words = [f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size}", "--out", str(out)]
        assert migrate.main(["verl", str(script), *words]) == DONE
        assert "dry run: passes" in capsys.readouterr().out
        layout = compose(out).policy.layout
        assert (layout.context, layout.context_exchange) == (size, exchange)


def test_only_its_own_file_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, link, out = tmp_path / "theirs.yaml", tmp_path / "link.yaml", tmp_path / "out.yaml"
    theirs.write_text("trainer: {nnodes: 2}\n")
    link.symlink_to(theirs)
    for path, reason in ((theirs, "is the input itself"), (link, "is a link")):
        assert migrate.main(["verl", str(theirs), "--plain", "--out", str(path)]) == WRONG_INPUT
        assert reason in (line := capsys.readouterr().err) and str(path) in line
    assert migrate.main(["verl", "trainer.nnodes=3", "--plain", "--out", str(theirs)]) == WRONG_INPUT
    assert f"--out: {theirs} was not written by this command" in capsys.readouterr().err
    assert theirs.read_text() == "trainer: {nnodes: 2}\n"
    for nodes in (3, 4):
        assert migrate.main(["verl", f"trainer.nnodes={nodes}", "--plain", "--out", str(out)]) == DONE
        assert f"nodes: {nodes}\n" in out.read_text()
    assert sorted(tmp_path.iterdir()) == [link, out, theirs]


def test_what_is_impossible_is_named(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert migrate.main(["verl", str(script), "actor_rollout_ref.actor.ppo_mini_batch_size=48"]) == DONE
    printed = capsys.readouterr()
    assert "dry run: refused: data.mini_batch_prompts = 48: it does not divide" in printed.err
    assert printed.out.startswith("# verl: run.sh, brought over by")


def test_json(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert migrate.main(["verl", str(script), "trainer.nodes=3", "--json", "--plain"]) == DONE
    values = json.loads(capsys.readouterr().out)
    [row] = [row for row in values["rows"] if row["kind"] == "unknown"]
    assert row["theirs"] == "trainer.nodes" and row["why"] == "the nearest known is trainer.nnodes"
    assert values["settings"]["data.prompts_per_step"] == 128 and values["dry_run"] == ""
    assert sum(values["counts"].values()) == len(values["rows"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "the name of a program is missing; allowed is verl, skyrl, slime, trl, nemo"),
        (["areal", "x.sh"], "migrate = areal: no such program; allowed is verl"),
        (["verl"], "no setting of verl is given"),
        (["verl", "gone.sh"], "gone.sh: no such file"),
        (["slime", "{script}"], "has no command with settings of slime"),
        (["skyrl", "{python}"], "SkyRL takes its settings from the command line"),
        (["trl", "{python}"], "names no setting: neither GRPOConfig"),
        (["verl", "a.b=1", "--out", "x.txt", "--plain"], "--out x.txt: allowed is a file that ends in .yaml"),
    ],
)
def test_wrong_input(
    words: list[str], line: str, script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "x.py"
    python.write_text("print(1)\n")
    assert migrate.main([word.format(script=script, python=python) for word in words]) == WRONG_INPUT
    assert line in capsys.readouterr().err


def test_the_users_reward_function_is_not_imported(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("raise SystemExit('was imported')\n")
    out = tmp_path / "run.yaml"
    words = ["verl", str(script), f"custom_reward_function.path={reward}", "--out", str(out)]
    assert migrate.main(words) == DONE
    printed = capsys.readouterr().out
    assert f"layout and memory pass; --dry-run also checks the data, and imports {reward}:compute_score" in printed
    assert text.REWARD not in printed
    assert compose(out).environment.reward_function == f"{reward}:compute_score"
