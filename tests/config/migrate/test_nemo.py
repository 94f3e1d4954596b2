"""Runs of NeMo-RL: files that inherit, and settings that no other program has."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose
from skyrl_mega.config.migrate import text
from skyrl_mega.config.migrate.account import Migration
from skyrl_mega.config.migrate.given import GivenSettings
from skyrl_mega.config.migrate.inheritance import read_with_parents
from skyrl_mega.config.migrate.read import read
from skyrl_mega.config.migrate.translate import translate

BASE = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, val_period: 10, normalize_rewards: true}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.2}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 512
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, betas: [0.9, 0.99]}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 400}}
    - {milestones: [50]}
  sequence_packing: {enabled: true, train_mb_tokens: "${mul:${policy.max_total_sequence_length}, 4}"}
  megatron_cfg:
    enabled: false
    tensor_model_parallel_size: 2
    activation_checkpointing: false
    recompute_granularity: selective
    optimizer: {lr: 1.0e-6}
    fp8_cfg: {enabled: false, fp8_recipe: blockwise}
  generation: {max_new_tokens: "${policy.max_total_sequence_length}", vllm_cfg: {tensor_parallel_size: 2}}
data: {train: {data_path: rows.parquet}, validation: {data_path: held.parquet}, default: {env_name: math}}
cluster: {gpus_per_node: 8, num_nodes: 4}
"""
CHILD = """
defaults: base.yaml
grpo: {num_prompts_per_step: 64, use_leave_one_out_baseline: false}
policy: {max_total_sequence_length: 4096, model_name: Qwen/Qwen3-30B-A3B}
"""
MEGATRON = """
defaults: [child.yaml]
policy:
  optimizer: null
  scheduler: null
  megatron_cfg: {enabled: true, expert_model_parallel_size: 8, fp8_cfg: {enabled: true, fp8_recipe: mxfp8}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in (("base", BASE), ("child", CHILD), ("megatron", MEGATRON)):
        (tmp_path / f"{name}.yaml").write_text(content)
    return tmp_path


def migrated(*words: str) -> Migration:
    return translate(read("NeMo-RL", words))


def mapping_in(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def row(migration: Migration, key: str) -> Any:
    return next(row for row in migration.rows if row.theirs == key)


def test_a_file_has_the_settings_of_the_files_it_inherits_from(folder: Path) -> None:
    migration = migrated(str(folder / "child.yaml"), "cluster.num_nodes=2")
    ours = migration.settings
    assert not migration.assumptions and "unknown" not in {row.kind for row in migration.rows}
    assert (ours["data.prompts_per_step"], ours["data.samples_per_prompt"]) == (64, 16)
    assert ours["data.mini_batch_prompts"] == 512 // 16
    assert (ours["rollout.max_length"], ours["rollout.sampling.max_tokens"]) == (4096, 4096)
    assert ours["policy.micro_tokens"] == 4 * 4096, "functions count with the values of the child"
    assert (ours["cluster.nodes"], ours["rollout.engines"], ours["rollout.tensor"]) == (2, 8, 2)
    assert ours["model.path"].endswith("/Qwen3-30B-A3B")
    assert (ours["data.train"], ours["data.eval"]) == (["rows.parquet"], ["held.parquet"])
    assert ours["algorithm.kl.unbiased"] is True
    file = folder / "ours.yaml"
    file.write_text(text.as_yaml(migration, "a test"))
    assert compose(file).policy.optimizer.decay_steps == 900


def test_other_settings_of_the_file_follow_the_command_line(folder: Path) -> None:
    ours = migrated(str(folder / "child.yaml"), "policy.max_total_sequence_length=8192").settings
    assert (ours["rollout.max_length"], ours["rollout.sampling.max_tokens"]) == (8192, 8192)
    assert ours["policy.micro_tokens"] == 4 * 8192


def test_the_schedule_and_optimizer_are_those_of_the_backend_in_use(folder: Path) -> None:
    torch, megatron = migrated(str(folder / "child.yaml")), migrated(str(folder / "megatron.yaml"))
    names = ("policy.optimizer.lr", "policy.optimizer.warmup_steps", "policy.optimizer.decay_steps")
    assert [torch.settings[name] for name in names] == [5e-6, 100, 900]
    assert torch.settings["policy.optimizer.schedule"] == "cosine" and torch.open_layout
    assert "policy.layout.tensor" not in torch.settings
    assert "megatron_cfg.enabled=false" in row(torch, "policy.megatron_cfg.optimizer.lr").why
    assert megatron.settings["policy.optimizer.lr"] == 1e-6 and not megatron.open_layout
    assert (megatron.settings["policy.layout.tensor"], megatron.settings["policy.layout.expert"]) == (2, 8)
    assert megatron.settings["policy.precision.recipe"] == "mxfp8"
    assert row(megatron, "policy.optimizer").kind == "dropped"


def test_a_switch_inside_a_group_needs_the_group(folder: Path) -> None:
    cases = ("child", "true", None), ("megatron", "false", "none"), ("megatron", "true", "selective")
    for backend, given, expected in cases:
        words = [str(folder / f"{backend}.yaml"), f"policy.megatron_cfg.activation_checkpointing={given}"]
        assert migrated(*words).settings.get("policy.recompute") == expected, (backend, given)
    off = migrated(str(folder / "child.yaml"), "policy.megatron_cfg.fp8_cfg.enabled=true")
    assert "policy.precision.recipe" not in off.settings


def test_what_is_inherited_and_needs_nothing_is_not_listed(folder: Path) -> None:
    migration = migrated(str(folder / "child.yaml"))
    shown = text.as_text(migration)
    assert "policy.tokenizer.name" not in shown and "more, from inherited files" in shown
    assert "grpo.use_leave_one_out_baseline" in shown, "the file itself has it"
    assert "policy.tokenizer.name" in [row["theirs"] for row in text.as_values(migration)["rows"]]
    assert "policy.tokenizer.name" in text.as_text(migrated(str(folder / "child.yaml"), "policy.tokenizer.name=x"))


def test_a_missing_file_leaves_the_programs_defaults(folder: Path) -> None:
    (folder / "base.yaml").unlink()
    migration = migrated(str(folder / "child.yaml"))
    assert "base.yaml, from which child.yaml inherits, is not here" in migration.assumptions[0]
    assert (migration.settings["data.samples_per_prompt"], migration.settings["data.mini_batch_prompts"]) == (16, 32)
    assert migration.settings["rollout.sampling.max_tokens"] == 4096, "of the longest sequence"


def test_the_file_of_a_command_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "run.sh"
    script.write_text("uv run examples/run_grpo.py --config child.yaml grpo.num_prompts_per_step=128\n")
    unread = migrated(str(script))
    assert row(unread, "--config").kind == "unknown" and "the file is not here" in row(unread, "--config").why
    monkeypatch.chdir(folder)
    for words in ([str(script)], ["--config=child.yaml", "grpo.num_prompts_per_step=128"]):
        settings = migrated(*words).settings
        assert (settings["data.prompts_per_step"], settings["rollout.max_length"]) == (128, 4096)


@pytest.mark.parametrize(
    ("content", "line"),
    [("defaults: own.yaml", "does not end"), ("defaults: {a: 1}", "allowed is a file, or a list of files")],
)
def test_wrong_inheritance_is_refused(content: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(content + "\ngrpo: {seed: 1}\n")
    with pytest.raises(UserError, match=line):
        migrated(str(tmp_path / "own.yaml"))


def test_files_are_merged_as_omegaconf_merges_them(tmp_path: Path) -> None:
    """NeMo-RL itself merges by OmegaConf; random trees, without its mark for replaced groups. OmegaConf refuses to
    merge a group with a list, so that only some names have lists."""
    rng = random.Random(0)
    leaves: tuple[list[Any], list[Any]] = ([[1, 2], [], "b"], [1, "a", None])

    def tree(depth: int) -> dict[str, Any]:
        def value(name: str) -> Any:
            group = depth and name in "abc" and rng.random() < 0.7
            return tree(depth - 1) if group else rng.choice(leaves[name in "abc"])

        return {name: value(name) for name in rng.sample("abcde", rng.randint(1, 4))}

    for n in range(200):
        contents = [tree(3) for _ in range(3)]
        paths = [tmp_path / f"{n}_{i}.yaml" for i in range(3)]
        for path, content, above in zip(paths, contents, ([], [0], [0, 1]), strict=True):
            path.write_text(yaml.safe_dump({**content, "defaults": [paths[i].name for i in above]}))
        both = OmegaConf.merge(*contents[:2])
        expected = OmegaConf.to_container(OmegaConf.merge(contents[0], both, contents[2]))
        assert read_with_parents(paths[2], mapping_in, GivenSettings("NeMo-RL")) == expected


def test_a_marked_group_replaces_the_inherited_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {dataset_name: x, seed: 1}\n")
    (tmp_path / "b.yaml").write_text("defaults: a.yaml\ntrain: {_override_: true, data_path: y.parquet}\n")
    read_file = GivenSettings("NeMo-RL")
    content = read_with_parents(tmp_path / "b.yaml", mapping_in, read_file)
    assert content == {"train": {"data_path": "y.parquet"}}


IS = "loss_fn.truncated_importance_sampling"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"importance_cap": 1e6}),
        ([f"{IS}_type=tis", f"{IS}_ratio=2.0"], {"importance_cap": 2.0, "importance_outside": "truncate"}),
        (
            [f"{IS}_type=icepop", f"{IS}_ratio=5.0", f"{IS}_ratio_min=0.5"],
            {"importance_cap": 5.0, "importance_floor": 0.5, "importance_outside": "mask"},
        ),
        (
            [f"{IS}_type=seq-mask-tis", f"{IS}_ratio=1.002", f"{IS}_ratio_min=0.999"],
            {"importance_cap": 1e6, "rejection.level": "geometric", "rejection.low": 0.999, "rejection.high": 1.002},
        ),
        (
            ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
            {"importance_cap": 1e6, "importance_level": "sequence", "loss": "gspo", "loss_mean": "sequences"},
        ),
    ],
)
def test_importance_weights(words: list[str], expected: dict[str, Any]) -> None:
    settings = migrated("loss_fn.use_importance_sampling_correction=true", *words).settings
    found = {name: settings.get(f"algorithm.{name}") for name in expected}
    assert found == expected
    assert "algorithm.importance_floor" in settings or "importance_floor" not in expected
    off = migrated("loss_fn.use_importance_sampling_correction=false", *words).settings
    assert off["algorithm.importance_cap"] is None and "algorithm.rejection.level" not in off


@pytest.mark.parametrize(
    ("words", "estimator"),
    [
        (["grpo.normalize_rewards=true"], "grpo"),
        (["grpo.normalize_rewards=false"], "rloo"),
        (["grpo.adv_estimator.normalize_rewards=false", "grpo.adv_estimator.name=grpo"], "rloo"),
        (["grpo.normalize_rewards=false", "grpo.adv_estimator.name=grpo"], "grpo"),
        (["grpo.normalize_rewards=false", "grpo.adv_estimator.normalize_rewards=true"], "grpo"),
        (["grpo.adv_estimator.name=reinforce_plus_plus"], "reinforce++_baseline"),
        (["grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.minus_baseline=false"], "reinforce++"),
        (["grpo.adv_estimator.name=gdpo"], "gdpo"),
    ],
)
def test_estimators(words: list[str], estimator: str) -> None:
    settings = migrated("grpo.use_leave_one_out_baseline=true", *words).settings
    assert settings.get("algorithm.advantage", "grpo") == estimator


@pytest.mark.parametrize(
    ("words", "ranks", "engines"),
    [
        (["policy.generation.colocated.resources.num_nodes=1"], 24, 4),
        (["policy.generation.colocated.resources.num_nodes=2", "cluster.num_nodes=3"], 8, 8),
        (["policy.generation.colocated.resources.gpus_per_node=2", "cluster.num_nodes=1"], 6, 1),
        ([], None, None),
    ],
)
def test_engines_with_gpus_of_their_own(words: list[str], ranks: int | None, engines: int | None) -> None:
    common = ["cluster.num_nodes=4", "cluster.gpus_per_node=8", "policy.generation.vllm_cfg.tensor_parallel_size=2"]
    migration = migrated(*common, *words, "policy.generation.colocated.enabled=false")
    assert migration.settings.get("policy.ranks") == ranks
    assert migration.settings.get("rollout.engines") == engines
    assert bool(migration.assumptions) == (ranks is None)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([("ConstantLR", {"factor": 1.0})], (0, "constant", None)),
        ([("LinearLR", {"total_iters": 7})], (7, "constant", None)),
        ([("LinearLR", {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 90})], (0, "linear", 90)),
        ([("LinearLR", {"start_factor": "1e-8", "total_iters": 7})], (7, "constant", None)),
        ([("ConstantLR", {"factor": 0.1})], None),
        ([("LinearLR", {"end_factor": 0.1, "total_iters": 100})], None),
        ([("LinearLR", {"total_iters": "inf"})], None),
        ([("LinearLR", {}), ("ConstantLR", {"factor": 1.0}), ("CosineAnnealingLR", {"T_max": 93})], None),
        ([("LinearLR", [1])], None),
        ([("LinearLR", {"start_factor": None})], None),
        ([("LinearLR", {"total_iters": 7}), ("LinearLR", {"total_iters": 7})], None),
        ([("LinearLR", {"total_iters": 7}), ("CosineAnnealingLR", {"T_max": 93})], (7, "cosine", 100)),
        ([("StepLR", {"step_size": 3})], None),
        ([("LinearLR", {"total_iters": 7}), ("CosineAnnealingLR", {})], None),
    ],
)
def test_schedules_of_torch(parts: list[tuple[str, Any]], expected: tuple[int, str, int | None] | None) -> None:
    schedulers = [{"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs} for name, kwargs in parts]
    one_update = ["policy.train_global_batch_size=512", "grpo.num_prompts_per_step=32"]
    migration = migrated(f"policy.scheduler={schedulers}", "grpo.num_generations_per_prompt=16", *one_update)
    names = ("policy.optimizer.warmup_steps", "policy.optimizer.schedule", "policy.optimizer.decay_steps")
    found = tuple(migration.settings.get(name) for name in names)
    given = row(migration, "policy.scheduler")
    assert found == (expected or (None, None, None))
    assert given.look == (expected is None) and given.kind == ("dropped" if expected is None else "changed")


def test_known_data_and_rewards_of_dapo(tmp_path: Path) -> None:
    words = [
        *("data.train.dataset_name=DAPOMath17K", "data.validation.dataset_name=DAPOMathAIME2024"),
        *("data.default.env_name=math", "env.math.math_verify_impl=dapo_math_verify"),
        *("grpo.reward_scaling.enabled=true", "grpo.reward_scaling.target_min=-1.0"),
        *("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=100"),
        *("policy.generation.max_new_tokens=400", "grpo.reward_shaping.max_response_length=300"),
    ]
    migration = migrated(*words)
    assert "--env aime --train-file data/dapo-math-17k.parquet" in migration.settings["data.prepare"]
    assert migration.settings["data.train"] == ["${data.folder}/train.parquet"]
    assert migration.settings["environment.options.aime.answer"] == "dapo"
    assert "environment.default" not in migration.settings
    assert migration.settings["algorithm.overlong.buffer"] == 100
    assert [line.partition(":")[0] for line in migration.to_add] == ["run.epochs", "evaluation.samples"]
    assert row(migration, "grpo.reward_shaping.max_response_length").look
    plain = migrated("data.train.dataset_name=DAPOMath17K", "env.math.math_verify_impl=hf_math_verify")
    assert "--env math" in plain.settings["data.prepare"]


def test_the_scheduler_counts_rl_steps() -> None:
    """NeMo-RL advances its schedulers once per call of `train`, after all mini-batches of an RL step."""
    four = ["grpo.num_prompts_per_step=64", "grpo.num_generations_per_prompt=32", "policy.train_global_batch_size=512"]
    prefix = "policy.megatron_cfg.scheduler"
    words = [f"{prefix}.lr_warmup_iters=13", f"{prefix}.lr_decay_iters=100", f"{prefix}.lr_decay_style=cosine"]
    ours = migrated("policy.megatron_cfg.enabled=true", *four, *words).settings
    assert (ours["policy.optimizer.warmup_steps"], ours["policy.optimizer.decay_steps"]) == (52, 400)
    parts = [{"name": "a.CosineAnnealingLR", "kwargs": {"T_max": 100, "eta_min": 1e-7}}]
    ours = migrated(f"policy.scheduler={parts}", "policy.optimizer.kwargs.lr=1e-6", *four).settings
    assert (ours["policy.optimizer.decay_steps"], ours["policy.optimizer.min_lr"]) == (400, 1e-7)


def test_an_explicit_null_is_no_bound() -> None:
    migration = migrated("loss_fn.use_importance_sampling_correction=true", f"{IS}_ratio=null", f"{IS}_type=null")
    assert migration.settings["algorithm.importance_cap"] == 1e6


def test_what_changes_training_needs_a_look() -> None:
    words = [
        *("grpo.use_leave_one_out_baseline=true", "data.train.split_validation_size=0.05"),
        *("data.default.prompt_file=cot.txt", "grpo.reward_shaping.enabled=true"),
        *("grpo.reward_shaping.stop_properly_penalty_coef=0.0", "grpo.reward_shaping.overlong_buffer_length=128"),
    ]
    migration = migrated(*words)
    assert [each.theirs for each in migration.rows if each.look] == [
        *("grpo.use_leave_one_out_baseline", "data.train.split_validation_size", "data.default.prompt_file"),
        "grpo.reward_shaping.stop_properly_penalty_coef",
    ]
    assert "algorithm.overlong.buffer" not in migration.settings


@pytest.mark.parametrize(
    ("words", "coefficient", "look"),
    [
        ([], 0.1, False),
        (["loss_fn.use_kl_in_reward=true"], None, False),
        (["loss_fn.use_kl_in_reward=true", "grpo.adv_estimator.name=reinforce_plus_plus"], 0.1, True),
    ],
)
def test_a_kl_term_in_the_reward(words: list[str], coefficient: float | None, look: bool) -> None:
    migration = migrated("loss_fn.reference_policy_kl_penalty=0.1", *words)
    assert migration.settings.get("algorithm.kl.coefficient") == coefficient
    assert [each.theirs for each in migration.rows if each.look] == ["loss_fn.use_kl_in_reward"] * look


@pytest.mark.parametrize("seed", ["${mul:[1,2],1000000000}", "${mul:aaaa,1000000000000}", "${mul:10,${mul:${a},${a}}}"])
def test_functions_take_numbers_of_a_common_size(seed: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"a: {10**12}\ngrpo: {{seed: '{seed}'}}\n")
    migration = migrated(str(tmp_path / "a.yaml"))
    assert "run.seed" not in migration.settings and "names settings outside" in row(migration, "grpo.seed").why


@pytest.mark.parametrize("content", ["seed: 2020-13-45", "seed: !!int abc", "seed: !!bool abc", f"seed: {'1' * 5000}"])
def test_values_that_yaml_cannot_read_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(UserError, match="is not YAML"):
        migrated(str(tmp_path / "a.yaml"))


def test_endless_inheritance_is_refused(tmp_path: Path) -> None:
    for n in range(14):
        (tmp_path / f"{n}.yaml").write_text(f"defaults: [{', '.join([f'{n + 1}.yaml'] * 3)}]\ngrpo: {{seed: 1}}\n")
    with pytest.raises(UserError, match="more than 200 files"):
        migrated(str(tmp_path / "0.yaml"))


def test_a_run_has_the_name_of_its_file(folder: Path) -> None:
    assert migrated(str(folder / "child.yaml")).settings["run.name"] == "child"
    named = migrated(str(folder / "child.yaml"), "logger.wandb_enabled=true", "logger.wandb.name=mine")
    assert named.settings["run.name"] == "mine"


def test_milestones_agree_with_the_schedulers() -> None:
    names = {"LinearLR": {"total_iters": 50}, "CosineAnnealingLR": {"T_max": 9}}
    parts = [{"name": f"torch.{name}", "kwargs": kwargs} for name, kwargs in names.items()]
    for milestones, expected in (([50], "changed"), ([10], "dropped"), ([50, 70], "dropped")):
        migration = migrated(f"policy.scheduler={[*parts, {'milestones': milestones}]}")
        assert row(migration, "policy.scheduler").kind == expected, milestones


def test_only_files_that_the_run_reads_are_to_be_written(tmp_path: Path) -> None:
    assert migrated("data.train.dataset_name=Own").to_add[0].startswith("data/Own/train.parquet: write the rows of Own")
    assert not migrated("data.train.data_path=/x/gsm8k.jsonl").to_add
    assert not migrated("data.train.data_path=rows.parquet").to_add
    several = migrated("data.train=[{dataset_name: a},{dataset_name: b}]")
    assert several.to_add[0].startswith("data.train: write the rows of its 2 data sets")


def test_a_file_of_a_script_follows_later_arguments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "run.sh"
    script.write_text("python examples/run_grpo.py --config child.yaml\n")
    assert "run.name" not in migrated(str(script)).settings
    monkeypatch.chdir(folder)
    ours = migrated(str(script), "policy.max_total_sequence_length=8192").settings
    assert (ours["run.name"], ours["rollout.sampling.max_tokens"]) == ("child", 8192)


def test_marks_and_mandatory_values_are_read_as_nemo_reads_them(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("policy: {model_name: m, generation: {vllm_cfg: {a: 1, b: 2}}}\n")
    child = "defaults: a.yaml\npolicy: {model_name: '???', generation: {vllm_cfg: {_override_: true, a: 3}}}\n"
    (tmp_path / "b.yaml").write_text(child)
    content = read_with_parents(tmp_path / "b.yaml", mapping_in, GivenSettings("NeMo-RL"))
    assert content == {"policy": {"model_name": "m", "generation": {"vllm_cfg": {"a": 3, "b": 2}}}}


def test_endless_anchors_are_refused_before_files_are_merged(tmp_path: Path) -> None:
    levels = [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 40)]
    (tmp_path / "a.yaml").write_text("\n".join(["a0: &a0 {x: 1, y: 2}", *levels]))
    with pytest.raises(UserError, match="more than"):
        migrated(str(tmp_path / "a.yaml"))


def test_data_sets_without_a_name_are_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: {train: {data_path: '${oc.env:DATA}'}}\n")
    unknown = migrated(str(tmp_path / "a.yaml"))
    assert "data.train" not in unknown.settings and row(unknown, "data.train.data_path").look
    loaded = migrated("data.train.dataset_name=ResponseDataset", "data.train.data_path=/d/y.v2.jsonl")
    assert loaded.settings["data.train"] == ["data/y.v2/train.parquet"]


def test_a_decay_needs_the_learning_rate() -> None:
    parts = [{"name": "a.LinearLR", "kwargs": {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 100}}]
    assert row(migrated(f"policy.scheduler={parts}", "policy.optimizer.kwargs.lr=abc"), "policy.scheduler").look
    ours = migrated(f"policy.scheduler={parts}", "policy.optimizer.kwargs.lr=1e-5").settings
    assert ours["policy.optimizer.min_lr"] == pytest.approx(1e-6)
