"""Fixtures for the tests of all packages."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import skyrl_mega.cluster  # noqa: F401  (before any test's module imports Ray: it then listens on loopback alone)

if TYPE_CHECKING:
    from skyrl_mega.rollout.agent.renderer import Renderer

ROOT = Path(__file__).parents[1]

NIGHTLY = (
    "benchmarks/test_driver.py::test_a_small_round_measures_everything",
    "benchmarks/test_gpu_proofs.py::test_kernels_and_limits_are_rehearsed",
    "benchmarks/test_gpu_wheels.py::test_transformer_engine_comes_whole_or_not_at_all",
    "cli/test_cli.py::test_a_signal_ends_it_with_75_and_the_folder_is_free_again[15]",
    "cli/test_cli.py::test_a_signal_ends_it_with_75_and_the_folder_is_free_again[2]",
    "cli/test_dry_run.py::test_235b_on_512_gpus",
    "cli/test_dry_run.py::test_a_suggestion_leaves_room_for_a_critic",
    "cli/test_dry_run.py::test_an_optimizer_is_streamed_where_nothing_fits_without",
    "cli/test_dry_run.py::test_what_is_suggested_fits[235B]",
    "cli/test_dry_run.py::test_what_is_suggested_fits[30B]",
    "cli/test_refusals.py::test_it_is_refused_with_a_mend_that_works[a critic and engines on GPUs of the policy]",
    "cli/test_refusals.py::test_it_is_refused_with_a_mend_that_works[a model that is too large]",
    "cli/test_refusals.py::test_it_is_refused_with_a_mend_that_works[a reference on one GPU]",
    "cli/test_suggest.py::test_235b_fits_256_gpus_that_policy_and_engines_share",
    "cli/test_suggest.py::test_an_optimizer_is_streamed_only_beside_parameters_that_take_it[model]",
    "cli/test_suggest.py::test_hosts_without_memory_for_what_leaves_are_seen",
    "cli/test_suggest.py::test_layers_go_to_host_memory_where_sequences_are_long[short]",
    "cli/test_suggest.py::test_layouts_with_parameters_in_fp8_pass_every_check",
    "cli/test_suggest.py::test_where_nothing_fits_it_says_why[hosts]",
    "cluster/test_fleet.py::test_one_that_fails_is_replaced_and_stays_stale[19]",
    "cuda/test_nodes.py::test_two_nodes_shared",
    "cuda/test_queue.py::test_a_step_of_dapo_waits_for_hours_and_ends",
    "cuda/test_queue.py::test_an_engine_that_stands_still_is_found_within_the_limit[searchr1_30b]",
    "cuda/test_queue.py::test_slow_tokens_and_a_queue_of_ten_caches_end_nothing[searchr1_30b]",
    "cuda/test_reference.py::test_segments_expand_in_a_policy_process_unless_the_user_says_otherwise[cpu-user3-",
    "cuda/test_reference.py::test_segments_expand_in_a_policy_process_unless_the_user_says_otherwise[cuda-user1-",
    "cuda/test_reference.py::test_segments_expand_in_a_policy_process_unless_the_user_says_otherwise[cuda-user2-",
    "envs/harness/test_agents_page.py::test_a_run",
    "envs/test_tutorial.py::test_its_run",
    "evaluate/test_engines.py::test_killed_and_resumed_has_every_sample_once",
    "export/test_export.py::test_as_a_process_that_is_stopped[15]",
    "megatron/test_checkpoint.py::test_experts_saved_in_one_layout_are_the_same_in_any[DP3]",
    "megatron/test_checkpoint.py::test_experts_saved_in_one_layout_are_the_same_in_any[TP2 EP2 ETP2]",
    "megatron/test_checkpoint.py::test_overlap_changes_nothing_of_a_checkpoint[saved without",
    "megatron/test_critic.py::test_a_checkpoint_of_one_layout_goes_on_in_another[torch.float32]",
    "megatron/test_critic.py::test_a_critic_trains_the_same_in_every_layout[EP2]",
    "megatron/test_critic.py::test_a_critic_trains_the_same_in_every_layout[PP2]",
    "megatron/test_critic.py::test_a_critic_trains_the_same_in_every_layout[TP2 CP2]",
    "megatron/test_critic.py::test_a_critic_trains_the_same_in_every_layout[TP2 ETP2]",
    "megatron/test_layouts.py::test_a_dense_model_with_bias_and_tied_head_trains_the_same[TP2 PP2]",
    "megatron/test_layouts.py::test_a_moe_trains_the_same_in_every_layout[TP2 EP2, offload, recompute MoE]",
    "megatron/test_layouts.py::test_a_moe_trains_the_same_in_every_layout[TP2, fused head]",
    "megatron/test_layouts.py::test_experts_are_balanced_the_same_in_every_layout[TP2 ETP2]",
    "megatron/test_layouts.py::test_layers_that_lie_in_host_memory_change_no_bit[qwen2-",
    "megatron/test_loss_layouts.py::test_every_loss_and_every_mean_train_the_same_in_every_layout[CP2]",
    "megatron/test_loss_layouts.py::test_every_loss_and_every_mean_train_the_same_in_every_layout[EP2]",
    "megatron/test_loss_layouts.py::test_every_loss_and_every_mean_train_the_same_in_every_layout[PP2 VPP2]",
    "megatron/test_loss_layouts.py::test_every_loss_and_every_mean_train_the_same_in_every_layout[PP2]",
    "megatron/test_loss_layouts.py::test_every_loss_and_every_mean_train_the_same_in_every_layout[TP2 CP2]",
    "megatron/test_loss_layouts.py::test_every_loss_and_every_mean_train_the_same_in_every_layout[TP2 EP2]",
    "megatron/test_loss_layouts.py::test_every_loss_with_every_mean_trains_the_same_in_every_cut",
    "megatron/test_overlap.py::test_nothing_depends_on_it[moe 2 {'micro_tokens': 40, 'recompute': 'full'}",
    "megatron/test_overlap.py::test_nothing_depends_on_it[moe {'pipeline': 2, 'context': 2} ]",
    "megatron/test_overlap.py::test_nothing_depends_on_it[moe {'tensor': 2, 'expert': 2} ]",
    "megatron/test_overlap.py::test_nothing_depends_on_it[tied dense 2 ",
    "megatron/test_overlap.py::test_nothing_depends_on_it[tied dense {'pipeline': 2, 'virtual_pipeline': 2} ]",
    "megatron/test_residency.py::test_taking_turns_changes_no_bit[2-sizes0",
    "megatron/test_residency.py::test_taking_turns_changes_no_bit[2-sizes1",
    "megatron/test_residency.py::test_taking_turns_changes_no_bit[4-",
    "megatron/test_router_replay.py::test_every_layout_goes_where_the_routes_say[EP2]",
    "megatron/test_router_replay.py::test_every_layout_goes_where_the_routes_say[PP2]",
    "megatron/test_router_replay.py::test_every_layout_goes_where_the_routes_say[TP2 EP2]",
    "megatron/test_router_replay.py::test_every_layout_goes_where_the_routes_say[TP2 ETP2]",
    "megatron/test_sequence_unit_layouts.py::test_a_layout_gives_the_single_processs_step[DP2]",
    "megatron/test_streamed_optimizer.py::test_a_process_holds_three_pieces_in_a_step_and_none_between_steps",
    "megatron/test_streamed_optimizer.py::test_streaming_changes_no_bit[2-sizes0",
    "megatron/test_streamed_optimizer.py::test_streaming_changes_no_bit[2-sizes1",
    "megatron/test_streamed_optimizer.py::test_streaming_changes_no_bit[2-sizes3",
    "megatron/test_streamed_optimizer.py::test_streaming_changes_no_bit[4-",
    "megatron/test_without_wandb.py::test_an_engine_does_not_import_wandb",
    "planner/test_buffers.py::test_bytes_are_megatrons_own[latent",
    "planner/test_checkpoint.py::test_the_index_of_thirty_billion_parameters_is_small_and_read_at_once",
    "planner/test_checkpoint.py::test_thirty_billion_parameters_are_written_evenly[False-2x8",
    "planner/test_checkpoint.py::test_thirty_billion_parameters_are_written_evenly[False-4x8 TP2 EP8 local]",
    "planner/test_checkpoint.py::test_thirty_billion_parameters_are_written_evenly[False-4x8 TP2 EP8 te]",
    "planner/test_checkpoint.py::test_thirty_billion_parameters_are_written_evenly[True-2x8 TP4 EP8 te]",
    "planner/test_checkpoint.py::test_thirty_billion_parameters_are_written_evenly[True-4x8",
    "recipes/test_dry_run.py::test_every_recipe_leaves_memory[dapo_glm_4_5_air",
    "recipes/test_dry_run.py::test_every_recipe_leaves_memory[searchr1_glm_4_5_air",
    "rollout/test_generator.py::test_what_a_dead_engine_had_is_answered_by_the_others",
    "rollout/test_lockstep.py::test_several_turns_repeat_to_the_last_bit[2-1]",
    "rollout/test_replay_of_engine.py::test_the_engines_routes_halve_the_mismatch_of_bfloat16",
    "rollout/test_waiting.py::test_a_real_engine_with_a_queue_ends_nothing_by_time",
    "rollout/test_waiting.py::test_an_engine_that_stands_still_is_found_and_others_take_its_requests[30]",
    "simulation/test_rates.py::test_any_number_of_slots_and_of_calls_is_that_of_all[1-",
    "simulation/test_rates.py::test_any_number_of_slots_and_of_calls_is_that_of_all[12-",
    "simulation/test_rates.py::test_any_number_of_slots_and_of_calls_is_that_of_all[15-",
    "simulation/test_rates.py::test_any_number_of_slots_and_of_calls_is_that_of_all[16-",
    "simulation/test_rates.py::test_any_number_of_slots_and_of_calls_is_that_of_all[2-",
    "simulation/test_rates.py::test_any_number_of_slots_and_of_calls_is_that_of_all[40-",
    "simulation/test_rates.py::test_any_number_of_slots_and_of_calls_is_that_of_all[5-",
    "simulation/test_rates.py::test_any_number_of_slots_and_of_calls_is_that_of_all[7-",
    "slurm/test_jobs.py::test_a_job_is_shipped_and_trains_on_four_nodes",
    "slurm/test_jobs.py::test_a_node_whose_ray_dies_is_left_out_and_scancel_releases_the_rest",
    "slurm/test_jobs.py::test_a_run_survives_a_lost_node",
    "slurm/test_ray.py::test_who_is_refused_and_who_waits",
    "trainer/test_asynchrony.py::test_one_step_ahead_killed_and_resumed_equals_never_killed",
    "trainer/test_asynchrony.py::test_staleness_0_is_what_a_synchronous_run_does",
    "trainer/test_engine_faults.py::test_a_killed_and_a_stopped_worker",
    "trainer/test_parked_fault.py::test_a_rank_that_is_killed_while_its_state_is_parked",
    "trainer/test_reference.py::test_a_reference_in_its_own_layout_gives_the_same_kl",
    "trainer/test_schedules.py::test_no_schedule_loses_doubles_or_ages_anything[two hundred more]",
    "trainer/test_turns.py::test_a_run_learns_the_same_with_everything_taking_turns",
    "trainer/test_unnoticed.py::test_a_parser_that_reads_nothing_ends_the_run_with_the_evidence",
    "weights/test_faults.py::test_a_lost_process_is_named_in_time[19-a guest]",
    "weights/test_faults.py::test_a_lost_process_is_named_in_time[19-a host]",
    "weights/test_faults.py::test_a_lost_process_is_named_in_time[19-an engine worker]",
    "weights/test_faults.py::test_a_lost_process_is_named_in_time[19-the last one]",
    "weights/test_fp8_engine.py::test_an_engine_computes_with_the_policys_weights_in_fp8",
    "weights/test_overhead.py::test_a_later_sync_costs_the_host_next_to_nothing[shared devices]",
    "weights/test_scale.py::test_256_to_256[235B TP4 PP2 EP64",
    "weights/test_scale.py::test_apart[30B EP8 PP2",
    "weights/test_scale.py::test_apart[30B TP2 EP4 ETP2",
    "weights/test_scale.py::test_apart[7B DP32",
    "weights/test_sleeping_engine.py::test_one_that_is_killed_asleep_starts_when_there_is_room_and_serves_the_same",
    "weights/test_sleeping_engine.py::test_twenty_cycles_leave_nothing_behind",
    "weights/test_sleeping_engine.py::test_workers_with_tied_embeddings_and_biases_sleep_too",
    "weights/test_vllm_engine.py::test_every_architecture_takes_new_weights_twice",
)
"""Expensive tests or cases, by the beginnings of their names; cheaper siblings run with every change."""
FIRST = (
    "slurm",
    "trainer/test_asynchrony.py",
    "megatron/test_loss_layouts.py",
    "trainer/test_schedules.py",
    "weights/test_scale.py",
    "weights/test_sleeping_engine.py",
    "weights/test_vllm_engine.py",
)
"""Tests of several minutes, started first to keep all cores busy until the end."""

# The same examples in every run, without a time limit: a busy machine must not fail a correct test.
# HYPOTHESIS_PROFILE=night generates more examples, HYPOTHESIS_PROFILE=explore new ones.
slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=slow_is_fine, max_examples=60)
settings.register_profile(
    "night", deadline=None, derandomize=True, suppress_health_check=slow_is_fine, max_examples=400
)
settings.register_profile("explore", deadline=None, print_blob=True, suppress_health_check=slow_is_fine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def among(names: Iterable[str], path: Path) -> bool:
    """Returns True if a test's file is among these files, or inside any of these folders."""
    return not {ROOT / "tests" / name for name in names}.isdisjoint([path, *path.parents])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of `NIGHTLY`, and puts slow files before the rest."""
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(NIGHTLY):
            item.add_marker("nightly")
    items.sort(key=lambda item: not among(FIRST, item.path))


@pytest.fixture(autouse=True)
def attention_of_one_model() -> Iterator[None]:
    """Clears the variables by which megatron-core sets Transformer Engine's attention for a model, after each test."""
    yield
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Returns the folder of real data named by SKYRL_MEGA_TEST_DATA, or skips the test if unset."""
    folder = os.environ.get("SKYRL_MEGA_TEST_DATA")
    if not folder:
        pytest.skip("real data is absent: SKYRL_MEGA_TEST_DATA is not set")
    return Path(folder)


@pytest.fixture(scope="session")
def stories(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the trained 260k-parameter Llama model as a Hugging Face directory (float32, tied, 8 heads of 8, 4 kv
    heads).
    """
    from tests.support.stories import write

    return write(real_data / "data" / "stories260k", tmp_path_factory.mktemp("stories"))


@pytest.fixture(scope="session")
def characters_chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Returns the `characters` tokenizer with its own template."""
    from tests.support.chats import characters

    return characters(tmp_path_factory.mktemp("chats") / "characters")


@pytest.fixture(scope="session")
def qwen_chat(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Returns Qwen3's tokenizer and template."""
    from skyrl_mega.rollout.agent.renderer import Renderer
    from tests.support.chats import qwen

    path = qwen(real_data, tmp_path_factory.mktemp("chats") / "qwen")
    shutil.copy(real_data / "data" / "qwen_tokenizer" / "qwen3_4b_config.json", path / "config.json")
    return Renderer(str(path))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns SmolLM2-135M-Instruct as a Hugging Face directory (float32, 0.5 GB, written in 15 s, once for all
    workers).
    """
    pytest.importorskip("gguf")
    from skyrl_mega.common.errors import UserError
    from skyrl_mega.models.smollm2 import gguf_file, write

    try:
        gguf_file()
    except UserError as absent:
        pytest.skip(str(absent))
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by all workers
    with (folder / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return write(folder / "smollm2")
