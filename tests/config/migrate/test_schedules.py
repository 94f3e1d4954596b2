"""Learning rate schedules in the units of each program."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl_mega.config.migrate.account import Migration
from skyrl_mega.config.migrate.read import read
from skyrl_mega.config.migrate.translate import translate

ACTOR, CRITIC = "actor_rollout_ref.actor.optim", "critic.optim"
DAPO = ("data.train_batch_size=512", "actor_rollout_ref.actor.ppo_mini_batch_size=32")  # 16 optimizer steps an RL step
SLIME = ("--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--global-batch-size", "64")  # 4 an RL step
SKYRL = ("trainer.train_batch_size=64", "trainer.policy_mini_batch_size=16")


def migrated(program: str, *words: str) -> Migration:
    return translate(read(program, words))


@pytest.mark.parametrize(
    ("program", "words", "ours"),
    [
        ("verl", (*DAPO, f"{ACTOR}.lr_warmup_steps=10"), {"policy.optimizer.warmup_steps": 160}),  # dapo_math.yaml
        (
            "verl",
            (*DAPO, f"{ACTOR}.lr_warmup_steps=10", "actor_rollout_ref.actor.ppo_epochs=2"),
            {"policy.optimizer.warmup_steps": 320},
        ),
        (
            "verl",
            (*DAPO, f"{CRITIC}.lr_warmup_steps=5", "algorithm.adv_estimator=gae", "critic.ppo_epochs=3"),
            {"critic.optimizer.warmup_steps": 240},
        ),
        (
            "verl",
            (
                *DAPO,
                f"{ACTOR}.lr_warmup_steps=-1",
                f"{ACTOR}.lr_warmup_steps_ratio=0.1",
                "trainer.total_training_steps=100",
            ),
            {"policy.optimizer.warmup_steps": 160},
        ),
        (
            "verl",
            (*DAPO, f"{ACTOR}.warmup_style=cosine", "trainer.total_training_steps=100"),
            {"policy.optimizer.schedule": "cosine", "policy.optimizer.decay_steps": 1600},
        ),
        (
            "verl",
            (*DAPO, f"{ACTOR}.lr_scheduler_type=cosine", "trainer.total_training_steps=100"),
            {"policy.optimizer.schedule": "cosine", "policy.optimizer.decay_steps": 1600},
        ),
        (
            "verl",
            (
                *DAPO,
                f"{ACTOR}.lr_decay_style=linear",
                f"{ACTOR}.lr_decay_steps=50",
                "trainer.total_training_steps=100",
            ),
            {"policy.optimizer.schedule": "linear", "policy.optimizer.decay_steps": 800},
        ),
        ("slime", (*SLIME, "--lr-warmup-iters", "10"), {"policy.optimizer.warmup_steps": 10}),
        (
            "slime",
            (*SLIME, "--lr-decay-style", "cosine", "--num-rollout", "100"),
            {"policy.optimizer.schedule": "cosine", "policy.optimizer.decay_steps": 400},
        ),
        (
            "SkyRL",
            (*SKYRL, "trainer.policy.optimizer_config.num_warmup_steps=10"),
            {"policy.optimizer.warmup_steps": 10},
        ),
        ("TRL", ("--warmup_steps", "10", "--num_processes", "2"), {"policy.optimizer.warmup_steps": 10}),
    ],
)
def test_steps_of_a_schedule(program: str, words: tuple[str, ...], ours: dict[str, Any]) -> None:
    settings = migrated(program, *words).settings
    assert {key: settings.get(key) for key in ours} == ours


def test_a_warm_up_in_rl_steps_is_changed_and_says_why() -> None:
    migration = migrated("verl", *DAPO, f"{ACTOR}.lr_warmup_steps=10")
    [row] = [row for row in migration.rows if row.theirs.endswith("lr_warmup_steps")]
    assert row.kind == "changed" and row.why.startswith("10 RL steps × 16 optimizer steps")


def test_a_decay_over_a_run_of_unknown_length_names_the_setting() -> None:
    migration = migrated("verl", *DAPO, f"{ACTOR}.warmup_style=cosine", "trainer.total_epochs=2")
    assert "policy.optimizer.decay_steps" not in migration.settings  # so the launcher refuses the schedule
    assert any("give policy.optimizer.decay_steps" in row.why for row in migration.rows)


def test_a_ratio_beside_a_number_of_steps_needs_no_look() -> None:
    migration = migrated("verl", *DAPO, f"{ACTOR}.lr_warmup_steps=10", f"{ACTOR}.lr_warmup_steps_ratio=0.1")
    assert migration.settings["policy.optimizer.warmup_steps"] == 160
    assert not [row for row in migration.rows if row.look]
