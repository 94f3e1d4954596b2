"""Planted faults of a single line, each with the test that must fail (`python -m benchmarks.plants`)."""

from __future__ import annotations

from typing import NamedTuple


class Plant(NamedTuple):
    """A fault and the test for it."""

    area: str
    fault: str
    """The effect of the fault on a run."""
    path: str
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    test: str
    """pytest's name of the test that fails."""


PLANTS = (
    Plant(
        "versions",
        "a step takes groups by number, whatever their age",
        "skyrl_mega/trainer/asynchronous.py",
        "return finished.ticket.version, finished.ticket.number",
        "return 0, finished.ticket.number",
        "tests/trainer/test_rollouts_ahead.py::test_a_step_takes_the_oldest_groups",
    ),
    Plant(
        "masks",
        "the response budget has one token more",
        "skyrl_mega/rollout/agent/agent_loop.py",
        "if response >= self.limits.response or too_long:",
        "if response > self.limits.response or too_long:",
        "tests/rollout/test_by_hand.py::test_an_observation_that_fills_the_response_budget_is_left_out",
    ),
    Plant(
        "masks",
        "the room for a turn counts the tokens of all conversations",
        "skyrl_mega/rollout/agent/limits.py",
        "self.length - len(t.context))",
        "self.length - len(t.tokens))",
        "tests/rollout/test_by_hand.py::test_the_longest_sequence_bounds_what_the_policy_sees_and_not_all_that_it_has_said",
    ),
    Plant(
        "masks",
        "a text keeps an end token that is not the tokenizer's eos",
        "skyrl_mega/rollout/agent/renderer.py",
        "if tokens and tokens[-1] in self.stop_tokens else tokens",
        "if tokens and tokens[-1] == self.tokenizer.eos_token_id else tokens",
        "tests/rollout/test_by_hand.py::test_a_text_ends_before_any_token_that_ends_a_turn",
    ),
    Plant(
        "order",
        "the second epoch's order repeats in all later ones",
        "skyrl_mega/data/order.py",
        "default_rng([self.seed, epoch])",
        "default_rng([self.seed, min(epoch, 1)])",
        "tests/data/test_order.py::test_epochs_and_seeds_have_orders_of_their_own",
    ),
    Plant(
        "alignment",
        "a reference of its own ranks gives the policy's log-probs",
        "skyrl_mega/trainer/reference.py",
        "self.policy.add(COLUMN, self.ranks.logprobs(",
        "self.policy.add(COLUMN, self.policy.logprobs(",
        "tests/trainer/test_reference_logprobs.py::test_a_reference_of_its_own_ranks_gives_its_own",
    ),
    Plant(
        "alignment",
        "a reference beside the policy gives the policy's log-probs",
        "skyrl_mega/trainer/reference.py",
        "temperature=temperature, reference=True)",
        "temperature=temperature, reference=False)",
        "tests/trainer/test_reference_logprobs.py::test_a_reference_beside_the_policy_is_asked_for_by_name",
    ),
    Plant(
        "resume",
        "a checkpoint of one_step has the stream's place behind a batch that is lost",
        "skyrl_mega/trainer/one_step_ahead.py",
        "                stream_state = batch.stream_state\n",
        "                stream_state = self.stream.state()\n",
        "tests/trainer/test_one_step_ahead.py::test_the_place_that_is_kept_is_before_the_batch_that_is_not_whole",
    ),
    Plant(
        "versions",
        "after a sync under way a trajectory's version begins one token late",
        "skyrl_mega/rollout/agent/agent_loop.py",
        "(version, end + first) for version",
        "(version, end + first + (first > 0)) for version",
        "tests/rollout/test_by_hand.py::test_tokens_after_a_sync_are_of_the_new_weights",
    ),
    Plant(
        "versions",
        "tokens are counted for a version from one token late on",
        "skyrl_mega/trajectories/trajectory.py",
        "[*(start for _, start in self.versions[1:])",
        "[*(start + 1 for _, start in self.versions[1:])",
        "tests/rollout/test_by_hand.py::test_tokens_after_a_sync_are_of_the_new_weights",
    ),
    Plant(
        "resume",
        "prompts that were put back are forgotten by a resume",
        "skyrl_mega/data/order.py",
        '[*state.get("returned", [])]',
        "[]",
        "tests/data/test_order.py::test_what_was_put_back_comes_first_also_after_a_resume",
    ),
    Plant(
        "alignment",
        "importance weights are divided by the first mini-batch's mean",
        "skyrl_mega/trainer/loop.py",
        "importance_means[index]",
        "importance_means[0]",
        "tests/trainer/test_loop.py::test_each_mini_batch_has_the_mean_of_its_own_importance_weights",
    ),
    Plant(
        "masks",
        "the mean importance weight includes tokens that no engine drew",
        "skyrl_mega/batch/mini_batch_stats.py",
        'torch.where(mini["drawn"], engine, old) if "drawn" in mini else engine',
        "engine",
        "tests/algorithms/test_selection.py::test_a_token_that_no_engine_drew_has_the_importance_weight_1",
    ),
    Plant(
        "alignment",
        "another token's log-prob is taken back with an end token",
        "skyrl_mega/rollout/agent/edits.py",
        "        del values[-1]\n",
        "        del values[-1 if values is not t.logprobs else -2]\n",
        "tests/rollout/test_one_message.py::test_an_end_token_is_taken_back_where_the_message_continues",
    ),
    Plant(
        "masks",
        "with the overlong filter, failed environments' answers are trained on",
        "skyrl_mega/batch/make_batch.py",
        "left_out = failed | torch.tensor(",
        "left_out = torch.tensor(",
        "tests/batch/test_batch.py::test_truncated_are_filtered_and_failed_count_for_nothing",
    ),
    Plant(
        "masks",
        "a sample of a turn does not train on its answer's first token",
        "skyrl_mega/batch/samples.py",
        "[part.trained_from - part.start for",
        "[part.trained_from - part.start + 1 for",
        "tests/batch/test_step_wise.py::test_a_sample_is_what_the_policy_saw_and_said",
    ),
    Plant(
        "masks",
        "a sample by reference counts tokens that another sample trains on",
        "skyrl_mega/batch/samples.py",
        "(max(s.start, sample.trained_from), ",
        "(s.start, ",
        "tests/batch/test_by_reference.py::test_ranks_get_the_same",
    ),
    Plant(
        "alignment",
        "a column of the trajectories loses what it is aligned to",
        "skyrl_mega/batch/samples.py",
        "torch.cat(values), like.aligned)",
        "torch.cat(values))",
        "tests/batch/test_batch.py::test_a_column_of_a_trajectory_is_cut_and_carried_with_its_tokens",
    ),
    Plant(
        "alignment",
        "what a part of an answer earned lies one character late",
        "skyrl_mega/rollout/agent/token_rewards.py",
        "bisect_left(ends, end)",
        "bisect_left(ends, end + 1)",
        "tests/rollout/test_token_rewards.py::test_they_are_in_the_reward_and_at_their_tokens",
    ),
    Plant(
        "alignment",
        "the reward of an answer without a token is lost",
        "skyrl_mega/batch/rewards.py",
        "nonempty[-1][1] + reward)",
        "nonempty[-1][1])",
        "tests/batch/test_token_inputs.py::test_each_token_of_the_policy_is_there_once",
    ),
    Plant(
        "versions",
        "a version of a token that was taken back stays",
        "skyrl_mega/rollout/agent/edits.py",
        "if first < len(t.tokens)]",
        "if first <= len(t.tokens)]",
        "tests/rollout/test_one_message.py::test_an_end_token_is_taken_back_where_the_message_continues",
    ),
    Plant(
        "versions",
        "groups that were under way are of the newest weights after a resume",
        "skyrl_mega/trainer/asynchronous.py",
        "ticket if ticket.played or ticket.recorded else replace(ticket, version=newest)",
        "replace(ticket, version=newest)",
        "tests/trainer/test_rollouts_ahead.py::test_what_was_played_of_groups_under_way_is_not_played_again",
    ),
    Plant(
        "versions",
        "a step trains on tokens of one sync more than allowed",
        "skyrl_mega/trainer/rollouts_ahead.py",
        "if worst > self.max_staleness:",
        "if worst > self.max_staleness + 1:",
        "tests/trainer/test_versions.py::test_a_token_that_is_too_old_ends_the_run",
    ),
    Plant(
        "order",
        "what is put back comes after what was put back before",
        "skyrl_mega/data/order.py",
        "[*indices, *self.returned]",
        "[*self.returned, *indices]",
        "tests/data/test_order.py::test_what_was_put_back_comes_first_also_after_a_resume",
    ),
    Plant(
        "order",
        "every step takes its mini-batches in the same order",
        "skyrl_mega/trainer/loop.py",
        "default_rng([*seed, 23])",
        "default_rng([23])",
        "tests/trainer/test_loop.py::test_several_epochs_take_every_mini_batch_again_in_an_order_of_the_seed",
    ),
    Plant(
        "order",
        "an asynchronous step has its groups by age",
        "skyrl_mega/trainer/asynchronous.py",
        "return sorted(chosen, key=_number)",
        "return chosen",
        "tests/trainer/test_rollouts_ahead.py::test_a_step_takes_the_oldest_groups",
    ),
    Plant(
        "resume",
        "the adaptive entropy bonus forgets the last entropy",
        "skyrl_mega/algorithms/entropy.py",
        'self.coefficient, self.entropy = state["coefficient"], state["entropy"]',
        'self.coefficient = state["coefficient"]',
        "tests/trainer/test_loop.py::test_the_adaptive_coefficient_comes_back_with_a_checkpoint",
    ),
    Plant(
        "resume",
        "with other settings, groups get names that were trained on",
        "skyrl_mega/trainer/asynchronous.py",
        "self.requested = saved.named_steps * self.wanted",
        "self.requested = 0",
        "tests/trainer/test_rollouts_ahead.py::test_other_settings_draw_the_prompts_again",
    ),
    Plant(
        "resume",
        "routes and token rewards of kept trajectories are lost",
        "skyrl_mega/trainer/saved_rollouts.py",
        "list(trajectories), columns=True)",
        "list(trajectories))",
        "tests/trainer/test_one_step_ahead.py::test_columns_of_a_batch_come_back_with_a_checkpoint",
    ),
)
