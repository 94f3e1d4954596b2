"""An environment with several named rewards, up to the estimator."""

from __future__ import annotations

from pathlib import Path

import torch

from skyrl_mega.batch.make_batch import make_batch
from skyrl_mega.batch.rewards import UNNAMED, Turns
from skyrl_mega.config.schema import AlgorithmConfig, EnvironmentConfig, RolloutConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.char_tokenizer import EOS
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trainer.run import rollout_metrics
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Group, Kind, Status, Trajectory
from tests.support.scripted import Scripted, play

ENVIRONMENT = EnvironmentConfig(classes={"named": "tests.rollout.user_envs:Named"})


def played(chat: Renderer, reward_weights: dict[str, float] | None = None) -> Trajectory:
    prompt = Prompt(0, [{"role": "user", "content": "hello"}], "named", {"extra_info": {}})
    (t,) = play(chat, ENVIRONMENT, [(prompt, Scripted(chat, [f"a{EOS}", f"bc{EOS}"]))], reward_weights=reward_weights)
    return t


def test_they_are_summed_with_their_weights_and_kept_by_name(characters_chat: Renderer, tmp_path: Path) -> None:
    t = played(characters_chat, {"right": 2.0, "short": 1.0, "late": 0.5})
    assert [step.reward for step in t.steps if step.kind is Kind.RESPONSE] == [1.75, 3.75]
    assert t.reward == 5.5 and t.rewards == {"right": 2.0, "short": -0.5, "late": 4.0}
    plain = Trajectory(t.prompt, 1, t.tokens, t.mask, t.logprobs, 1, 3.0, Status.TRUNCATED_TURNS, 1)
    batch = make_batch([Group(t.prompt, [t, plain])], AlgorithmConfig(), RolloutConfig())
    assert {name: values.tolist() for name, values in batch.named.items()} == {
        "late": [4.0, 0.0], UNNAMED: [0.0, 3.0], "right": [2.0, 0.0], "short": [-0.5, 0.0]
    }  # fmt: skip
    assert torch.equal(Turns.of([t, plain]).rewards[:2], torch.tensor([1.75, 3.75]).double())
    assert rollout_metrics([t, plain])["reward/of/right"] == 1.0
    parquet.write(tmp_path / "t.parquet", [t, plain])
    assert [back.rewards for back in parquet.read(tmp_path / "t.parquet")] == [t.rewards, {}]


def test_without_weights_each_counts_once(characters_chat: Renderer) -> None:
    assert played(characters_chat).reward == 5.5


def test_once_there_are_weights_a_reward_without_one_is_refused(characters_chat: Renderer) -> None:
    t = played(characters_chat, {"rihgt": 2.0})
    assert t.status is Status.ERROR_ENV
    assert "reward['right'] has no weight; algorithm.reward_weights has 'rihgt'" in t.metadata["error"]
