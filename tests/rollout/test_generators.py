"""Generators of one's own: what is trained on, and equality with the built-in agent loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from skyrl_mega.algorithms import losses
from skyrl_mega.algorithms.losses import LossInputs
from skyrl_mega.config.schema import AlgorithmConfig, RolloutConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generators import Branch, GeneratorService, GroupRequest, TrajectoryGenerator, load
from skyrl_mega.rollout.generators.finish import SAMPLED
from skyrl_mega.trajectories.trajectory import Group, Status, Trajectory
from tests.support.batches import make_batch, mini_batches, token_advantages
from tests.support.generators import Independent, RandomPolicy, agent_of, play_group, prompt_of, sampled_as_trained

GENERATORS = [
    RolloutConfig(generator="best_of_n", generator_options={"n": 9}),
    RolloutConfig(generator="branching", generator_options={"stems": 2}),
    RolloutConfig(generator="refinement"),
    RolloutConfig(generator="tree_search", generator_options={"depth": 2, "tokens": 3}),
]


def known(t: Trajectory) -> dict[str, Any]:
    """Returns everything of a trajectory except times, and the metrics of generators."""
    values = asdict(replace(t, prompt=None, seconds={}))  # type: ignore[arg-type]
    for step in values["steps"]:
        step |= {"at_s": 0.0, "generate_s": 0.0, "env_s": 0.0}
    values["metadata"].pop("metrics", None)
    return values


def losses_of(trajectories: Sequence[Trajectory]) -> tuple[Any, ...]:
    """Returns tokens, columns, advantages and loss of a batch."""
    algorithm = AlgorithmConfig()
    batch = make_batch([Group(trajectories[0].prompt, [*trajectories])], algorithm, RolloutConfig())
    advantages = token_advantages(batch, algorithm)
    (mini,) = mini_batches(batch, None, algorithm)
    logprobs = mini["rollout_logprobs"].clone().requires_grad_()
    inputs = LossInputs(
        logprobs_L=logprobs,
        sequence_L=mini.answers()[0],
        sequences=mini.answers()[1],
        weights_L=mini["weights"],
        old_L=mini["rollout_logprobs"],
        rollout_L=mini["rollout_logprobs"],
        advantages_L=advantages,
    )
    loss, _ = losses.find("ppo")(inputs, algorithm)
    loss.backward()
    return mini.tokens, mini["weights"], advantages, loss.detach(), logprobs.grad


def test_the_agent_loop_as_a_generator_gives_the_same_trajectories_batch_and_loss(characters_chat: Renderer) -> None:
    for prompt in (prompt_of(), prompt_of(env="faulty"), prompt_of(env="faulty", fault="raise")):
        policies = [RandomPolicy(characters_chat) for _ in range(2)]
        agent = agent_of(characters_chat, policies[0])

        async def independent(agent: Any = agent, prompt: Any = prompt) -> list[Trajectory]:
            return await asyncio.gather(*(agent.play(prompt, i, f"0/1/{i}") for i in range(4)))

        built_in = asyncio.run(independent())
        own = play_group(agent_of(characters_chat, policies[1]), Independent({}), prompt)
        assert [known(t) for t in own] == [known(t) for t in built_in]
        assert policies[0].requests.keys() == policies[1].requests.keys()
        assert [(r.tokens, r.seed) for r in policies[0].requests.values()] == [
            (policies[1].requests[name].tokens, r.seed) for name, r in policies[0].requests.items()
        ]
        if not built_in[0].status.failed:
            for mine, theirs in zip(losses_of(own), losses_of(built_in), strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("rollout", GENERATORS, ids=lambda rollout: str(rollout.generator))
def test_every_trained_token_was_sampled_in_its_context(characters_chat: Renderer, rollout: RolloutConfig) -> None:
    generator = load.create(rollout)
    assert generator is not None
    for shared in ("each", "once"):
        generator.shared = shared
        for uid in range(8):
            policy = RandomPolicy(characters_chat)
            trajectories = play_group(agent_of(characters_chat, policy), generator, prompt_of(uid), 6)
            assert [t.sample for t in trajectories] == list(range(6))
            assert not any(t.status.failed for t in trajectories)
            sampled_as_trained(trajectories, policy)
            sampled = sum(len(answer.tokens) for answer in policy.answers.values())
            assert trajectories[0].metadata["metrics"][SAMPLED] == pytest.approx(sampled / 6)
            trained = sum(t.written for t in trajectories)
            assert trained == sum(
                step.end - step.start for t in trajectories for step in t.steps if step.kind == "response"
            )
            if shared == "once":
                assert trained <= sampled


def test_a_common_prefix_is_trained_once_or_in_every_leaf(characters_chat: Renderer) -> None:
    class Fork(TrajectoryGenerator):
        async def generate(self, group: GroupRequest, service: GeneratorService) -> list[Branch]:
            stem = await (await service.open()).sample(2)
            return [await (stem if stem.ended else await stem.sample()).step() for _ in range(group.samples)]

    for uid in range(8):
        each, once = Fork({}), Fork({})
        once.shared = "once"
        both = []
        for generator in (each, once):
            policy = RandomPolicy(characters_chat)
            both.append(play_group(agent_of(characters_chat, policy, turns=1), generator, prompt_of(uid), 3))
            sampled_as_trained(both[-1], policy)
        assert [t.tokens for t in both[0]] == [t.tokens for t in both[1]]
        assert [t.reward for t in both[0]] == [t.reward for t in both[1]]
        prompt = both[0][0].prompt_length
        common = min(2, *(len(t.tokens) - prompt for t in both[0]))
        assert all(set(t.mask[prompt : prompt + common]) == {1} for t in both[0])
        first, *others = both[1]
        assert set(first.mask[prompt : prompt + common]) == {1}
        assert all(set(t.mask[prompt : prompt + common]) <= {0} and t.prompt_length == prompt + common for t in others)


def test_branches_after_a_turn_get_environments_that_repeat_it(characters_chat: Renderer) -> None:
    class Late(TrajectoryGenerator):
        async def generate(self, group: GroupRequest, service: GeneratorService) -> list[Branch]:
            stem = await (await (await service.open()).sample()).step()
            seconds = await asyncio.gather(*(stem.sample() for _ in range(group.samples)))
            return await asyncio.gather(*(branch.step() for branch in seconds))

    policy = RandomPolicy(characters_chat, longest=6)
    trajectories = play_group(agent_of(characters_chat, policy, turns=2), Late({}), prompt_of())
    sampled_as_trained(trajectories, policy)
    assert [t.metadata["turns"] for t in trajectories] == [2] * 4 and [t.reward for t in trajectories] == [2.0] * 4
    assert {t.status for t in trajectories} == {Status.TRUNCATED_TURNS}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return []", "generate returned 0 branches; allowed is group.samples = 4"),
        ("return None", "generate returned null; allowed is a list of 4 branches"),
        ("return [await service.open() for _ in range(4)]", "branch 0 with a turn that no environment judged"),
        ("b = await (await (await service.open()).sample()).step()\nreturn [b] * 4", "the same branch twice"),
        ("return 1 / 0", "generate raised ZeroDivisionError"),
        ("await service.open(9)", "open: sample is 9; allowed is 0 to 3"),
        ("await (await service.open()).step()", "step: there is no turn to judge"),
        ("b = await (await service.open()).sample()\nawait b.sample()", "sample: the turn is complete"),
        (
            "import asyncio\nt = asyncio.create_task((await service.open()).sample())\nt.cancel()\nawait t",
            "generate awaited a task that it had cancelled",
        ),
        ("b = await (await service.open()).sample()\nb.cut(99)", "cut: tokens is 99; allowed is 0 to"),
        ("b = await (await service.open()).sample()\nb.tell([{'role': 'usr'}])", "tell: messages[0]"),
    ],
)
def test_a_wrong_generator_fails_its_group_by_name(
    characters_chat: Renderer, tmp_path: Any, body: str, error: str
) -> None:
    from tests.support.generators import write_class

    generator = load.create(RolloutConfig(generator=write_class(tmp_path, body)))
    assert generator is not None
    trajectories = play_group(agent_of(characters_chat, RandomPolicy(characters_chat)), generator, prompt_of())
    assert len(trajectories) == 4 and {t.status for t in trajectories} == {Status.ERROR_ENV}
    assert f"generator Mine: {error}" in trajectories[0].metadata["error"] or error in trajectories[0].metadata["error"]
    if "raised" in error:
        assert "mine.py, line 7" in trajectories[0].metadata["at"]


def test_a_fault_of_the_run_is_raised_even_if_the_generator_catches_it(characters_chat: Renderer) -> None:
    class Catching(TrajectoryGenerator):
        async def generate(self, group: GroupRequest, service: GeneratorService) -> list[Branch]:
            with suppress(RuntimeError):
                await (await service.open()).sample()
            return []

    class Broken(RandomPolicy):
        async def generate(self, request: Request) -> Completion:
            raise RuntimeError("no engine")

    with pytest.raises(RuntimeError, match="no engine"):
        play_group(agent_of(characters_chat, Broken(characters_chat)), Catching({}), prompt_of())


def test_names_of_requests_do_not_depend_on_the_speed_of_answers(characters_chat: Renderer) -> None:
    generator = load.create(GENERATORS[-1])
    assert generator is not None
    requests = []
    for slow in (0.0, 0.01):

        class Slow(RandomPolicy):
            async def generate(self, request: Request, slow: float = slow) -> Completion:
                await asyncio.sleep(slow * (len(self.requests) % 3))
                return await super().generate(request)

        policy = Slow(characters_chat)
        trajectories = play_group(agent_of(characters_chat, policy), generator, prompt_of(), 8)
        requests.append(({name: [*r.tokens] for name, r in policy.requests.items()}, [t.tokens for t in trajectories]))
    assert requests[0] == requests[1]


def test_all_environments_of_a_group_are_closed(characters_chat: Renderer) -> None:
    closed: list[int] = []

    async def close() -> None:
        closed.append(1)

    class Leaving(TrajectoryGenerator):
        async def generate(self, group: GroupRequest, service: GeneratorService) -> list[Branch]:
            for _ in range(3):
                await service.open()
            service.opened[0].close = close  # type: ignore[method-assign]
            raise ValueError

    play_group(agent_of(characters_chat, RandomPolicy(characters_chat)), Leaving({}), prompt_of())
    assert closed == [1]


class Exits(TrajectoryGenerator):
    """Ends the process."""

    async def generate(self, group: GroupRequest, service: GeneratorService) -> list[Branch]:
        """Raises SystemExit."""
        raise SystemExit(3)


def test_a_generator_that_calls_sys_exit_fails_its_group(characters_chat: Renderer) -> None:
    made = play_group(agent_of(characters_chat, RandomPolicy(characters_chat)), Exits({}), prompt_of())
    assert [t.status for t in made] == [Status.ERROR_ENV] * 4
    assert "Exits: generate raised SystemExit(3)" in str(made[0].metadata["error"])
