"""Settings of files and arguments as given, before their translation."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.migrate.read import read
from skyrl_mega.config.migrate.translate import translate


def test_the_environments_values_stay_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret-value")
    file = tmp_path / "run.yaml"
    file.write_text(
        'x: ${oc.env:TOKEN}\ny: [1, "${x}"]\nn: 4\ntrainer:\n  run_name: ${x}\n  ckpt_path: "${ oc.env:TOKEN}"\n'
        '  export_path: a${oc.${e}:TOKEN}\n  project_name: ${y}\n  logger: "${oc.env:TOKEN}"\n  epochs: ${n}\ne: env\n'
    )
    settings = {given.key: given for given in read("SkyRL", [str(file)]).settings}
    assert "secret-value" not in str(settings)
    assert settings["trainer.run_name"].unresolved == "${x} names TOKEN of the environment"
    assert settings["trainer.ckpt_path"].unresolved and settings["trainer.export_path"].unresolved
    assert settings["trainer.project_name"].unresolved
    assert (settings["trainer.logger"].value, settings["trainer.logger"].unresolved) == ("${oc.env:TOKEN}", "")
    assert settings["trainer.epochs"].value == 4
    assert OmegaConf.create({"x": "${oc.env:TOKEN}"}).x == "secret-value"  # as before


def test_the_command_with_most_settings_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("evaluate() { python3 -m e trainer.nnodes=1 trainer.total_epochs=1 trainer.save_freq=3; }\n")
    with file.open("a") as script:
        script.write("python3 -m a trainer.nnodes=2\npython3 -m b trainer.nnodes=3 trainer.total_epochs=1\n")
    reading = read("verl", [str(file)])
    assert (reading.entry, reading.settings[0].value) == ("b", 3)
    [line] = reading.assumptions
    assert line.startswith("2 commands of the script") and "number 2" in line and "other 1 left out" in line


def test_processes_are_counted_once() -> None:
    migration = translate(read("TRL", ["--num_processes", "4", "--learning_rate", "1e-6"]))
    assert [row.kind for row in migration.rows if row.theirs == "num_processes"] == ["changed"]
    assert migration.counts["unknown"] == 0


def test_a_key_that_hydra_deletes_is_no_setting() -> None:
    [given] = read("verl", ["~trainer.nnodes=2"]).settings
    assert (given.key, given.unresolved) == ("~trainer.nnodes", "deletes a key in Hydra")


def test_a_settings_file_chosen_in_hydra_comes_with_advice() -> None:
    migration = translate(read("verl", ["--config-name=ppo_megatron_trainer.yaml", "trainer.nnodes=2"]))
    [row] = [row for row in migration.rows if row.theirs == "--config-name"]
    assert row.kind == "unknown" and "nothing is missing" in row.why and "--cfg job" in row.why


def test_values_without_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="inf is no number"):
        read("verl", ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1e999"])
    file = tmp_path / "run.yaml"
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    file.write_text("\n".join(["a0: &a0 1", *levels]))
    with pytest.raises(UserError, match="more than 100000 values"):
        read("verl", [str(file)])
