"""Translated settings, and the account of every setting."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.config.compose import compose
from skyrl_mega.config.keys import keys
from skyrl_mega.config.migrate import text
from skyrl_mega.config.migrate.account import Migration
from skyrl_mega.config.migrate.given import Given, GivenSettings
from skyrl_mega.config.migrate.read import read
from skyrl_mega.config.migrate.translate import translate
from skyrl_mega.config.other_programs.table import programs


def migrated(program: str, *words: str) -> Migration:
    return translate(read(program, words))


def kinds(migration: Migration) -> dict[str, str]:
    """Returns key → kind of the given settings."""
    return {row.theirs: row.kind for row in migration.rows if row.kind != "added"}


def why(migration: Migration, key: str) -> str:
    return next(row.why for row in migration.rows if row.theirs == key)


def accepted(migration: Migration, folder: Path) -> Any:
    """Returns the settings as the launcher reads the written file."""
    file = folder / "migrated.yaml"
    file.write_text(text.as_yaml(migration, "a test"))
    return compose(file)


VERL = shlex.split("""
algorithm.adv_estimator=grpo data.train_files=my.parquet data.val_files=held.parquet data.train_batch_size=64
data.max_prompt_length=512 data.max_response_length=1024 data.gen_batch_size=160 actor_rollout_ref.rollout.n=4
algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=5
actor_rollout_ref.model.path=Org/Small-1B actor_rollout_ref.actor.optim.lr=2e-6
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.01
actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=8192 actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.rollout.tensor_model_parallel_size=2
trainer.nnodes=2 trainer.n_gpus_per_node=4 trainer.logger=['console','wandb'] trainer.project_name=mine
trainer.total_epochs=3 trainer.save_freq=-1 trainer.test_freq=7
""")


def test_verl(tmp_path: Path) -> None:
    migration = migrated("verl", *VERL, "actor_rollout_ref.actor.nothing_known=1", "trainer.nnodes=4")
    config = accepted(migration, tmp_path)
    assert (config.cluster.nodes, config.cluster.gpus_per_node, config.cluster.shared) == (4, 4, True)
    assert (config.rollout.engines, config.rollout.tensor) == (8, 2)  # 16 GPUs of 2 an engine
    assert (config.data.prompts_per_step, config.data.mini_batch_prompts, config.data.samples_per_prompt) == (64, 16, 4)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.3, 0.28)  # the narrower key counts
    assert config.algorithm.dual_clip == 3.0 and config.algorithm.loss_mean == "sequences"
    assert config.algorithm.kl.coefficient == 0  # use_kl_loss is off
    assert config.algorithm.dynamic_sampling.oversample == 2.5  # 160 / 64
    assert (config.rollout.max_response_tokens, config.rollout.sampling.max_tokens) == (1024, 1024)
    assert (config.policy.micro_tokens, config.policy.optimizer.lr) == (4096, 2e-6)
    assert (config.checkpoint.every, config.evaluation.every, config.evaluation.temperature) == (0, 7, 0)
    assert config.residency.keep == [] and config.telemetry.trackers[-1] == "wandb"
    assert config.model.path.endswith("/Small-1B") and migration.open_layout
    of = kinds(migration)
    assert of["trainer.total_epochs"] == "taken" and of["data.gen_batch_size"] == "changed"
    assert of["actor_rollout_ref.actor.kl_loss_coef"] == "dropped"
    assert of["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"] == "dropped"
    assert "ppo_max_token_len_per_gpu" in why(migration, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu")
    assert of["actor_rollout_ref.actor.nothing_known"] == "unknown"
    assert migration.counts["dropped"] == sum(kind == "dropped" for kind in of.values()) + 1  # trainer.nnodes, twice


def test_megatrons_sizes_are_kept() -> None:
    sizes = ["tensor_model_parallel_size=4", "expert_model_parallel_size=8", "param_offload=True"]
    migration = migrated("verl", *(f"actor_rollout_ref.actor.megatron.{size}" for size in sizes))
    assert migration.settings["policy.layout.tensor"] == 4 and migration.settings["policy.layout.expert"] == 8
    assert not migration.open_layout


def test_ulysses_is_context_parallelism_with_an_all_to_all(tmp_path: Path) -> None:
    given = {
        "verl": ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "actor_rollout_ref.ref."),
        "SkyRL": ("trainer.policy.sequence_parallel_size", "trainer.ref."),
    }
    for program, (key, reference) in given.items():
        other = reference + key.rpartition(".")[2]
        migration = migrated(program, f"{key}=4", f"{other}=4")
        layout = accepted(migration, tmp_path).policy.layout
        assert (layout.context, layout.context_exchange) == (4, "all_to_all")
        assert kinds(migration)[key] == "changed" and migration.open_layout
        assert kinds(migration)[other] == "dropped"
        assert not {name for name in migrated(program, f"{key}=1").settings if "layout" in name}


def test_skyrl(tmp_path: Path) -> None:
    words = shlex.split("""data.train_data="['d/train.parquet']" data.val_data="['d/held.parquet']"
        trainer.logger=console
        trainer.placement.colocate_all=false trainer.placement.policy_num_nodes=2
        trainer.placement.policy_num_gpus_per_node=8 generator.inference_engine.num_engines=4
        generator.inference_engine.tensor_parallel_size=4 trainer.algorithm.loss_reduction=token_mean_legacy
        trainer.micro_train_batch_size_per_gpu=2 generator.max_turns=3 generator.max_input_length=3000
        generator.sampling_params.max_generate_length=500 trainer.max_ckpts_to_keep=-1 environment.env_class=mine
        trainer.algorithm.off_policy_correction.tis_ratio_type=token trainer.policy.optimizer_config.num_warmup_steps=9
        """)
    migration = migrated("SkyRL", *words)
    config = accepted(migration, tmp_path)
    assert (config.policy.ranks, config.cluster.nodes) == (16, 4)  # 16 for the policy, 16 for the engines
    assert (config.algorithm.loss_mean, config.algorithm.loss_mean_samples) == ("micro_batches", 2)
    assert (config.rollout.max_input_tokens, config.rollout.max_length) == (3000, 3500)
    assert (config.algorithm.kl.coefficient, config.algorithm.kl.mean) == (0.001, "sequences")  # SkyRL's defaults
    assert config.algorithm.importance_cap == 2.0 and config.policy.optimizer.warmup_from_zero
    assert config.rollout.conversation == "messages" and config.run.seed == 42
    assert config.policy.micro_tokens == 2 * 3500
    assert kinds(migration)["environment.env_class"] == "dropped" and config.environment.default is None


def test_slime(tmp_path: Path) -> None:
    words = shlex.split("""--actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /m/Qwen3-30B-A3B
        --prompt-data /d/own.jsonl --eval-prompt-data a /d/a.parquet b /d/b.parquet --rollout-batch-size 32
        --n-samples-per-prompt 8 --global-batch-size 128 --over-sampling-batch-size 64 --eps-clip 0.2
        --eps-clip-high 0.28 --rollout-num-gpus-per-engine 8 --advantage-estimator gspo --use-wandb
        --wandb-group g --distributed-timeout-minutes 30 --num-layers 48""")
    migration = migrated("slime", *words)
    config = accepted(migration, tmp_path)
    assert (config.data.mini_batch_prompts, config.algorithm.dynamic_sampling.oversample) == (16, 2)
    assert (config.algorithm.gspo.clip_low, config.algorithm.gspo.clip_high) == (0.2, 0.28)
    assert config.algorithm.loss == "gspo" and config.algorithm.loss_mean == "sequences"
    assert config.data.eval == ["/d/a.parquet", "/d/b.parquet"] and config.rollout.engines == 2
    assert config.cluster.call_timeout_s == 1800 and config.telemetry.options["wandb"] == {"group": "g"}
    assert kinds(migration)["--num-layers"] == "dropped" and not migration.open_layout


def test_a_divisor_that_is_no_number_is_dropped() -> None:
    actor = "actor_rollout_ref.actor"
    words = (f"{actor}.loss_agg_mode=seq-mean-token-sum-norm", f"{actor}.loss_scale_factor=many")
    migration = migrated("verl", *(word for word in VERL if "loss_agg_mode" not in word), *words)
    assert why(migration, f"{actor}.loss_agg_mode") == "many is no number"
    assert "algorithm.loss_mean_length" not in migration.settings


def test_a_missing_divisor_of_skyrl_is_the_sum_of_its_limits() -> None:
    """Takes SkyRL's former default; today's SkyRL has none. verl and TRL state the limit of all turns themselves."""
    words = (
        "trainer.algorithm.loss_reduction=seq_mean_token_sum_norm",
        "generator.max_turns=3",
        "generator.sampling_params.max_generate_length=500",
    )
    assert migrated("SkyRL", *words).settings["algorithm.loss_mean_length"] == 512 + 500
    for key in ("generator.max_input_length", "trainer.max_prompt_length"):
        for longer in ((*words, f"{key}=4096"), (f"{key}=4096", *words)):
            assert migrated("SkyRL", *longer).settings["algorithm.loss_mean_length"] == 4096 + 500
    unlimited = migrated("SkyRL", *words, "generator.sampling_params.max_generate_length=null")
    assert unlimited.settings["algorithm.loss_mean"] == "constant"
    given = migrated("SkyRL", *words, "trainer.algorithm.max_seq_len=4096")
    assert given.settings["algorithm.loss_mean_length"] == 4096


def test_trl_counts_prompts_and_steps(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from datasets import load_dataset\nfrom trl import GRPOConfig, GRPOTrainer\nraise SystemExit('was run')\n"
        "N = 4\ndata = load_dataset('own/puzzles', split='train')\ndata = data.map(str)\n"
        "config = GRPOConfig(per_device_train_batch_size=N * 2, num_generations=N, gradient_accumulation_steps=2,\n"
        "    steps_per_generation=4, max_steps=100, save_steps=20, learning_rate=5e-7, beta=unknown_name,\n"
        "    use_vllm=True, loss_type='dr_grpo')\n"
        "config.epsilon_high = 0.28\n"
        "GRPOTrainer(model='Org/Small-1B', reward_funcs=[mine], args=config, train_dataset=data)\n"
    )
    migration = migrated("TRL", str(script), "--num_processes", "2")
    settings = migration.settings
    # A generation: 8 × 2 processes × 4 = 64 completions = 16 prompts; an optimizer step: 8 × 2 × 2 = 32 = 8 prompts.
    assert (settings["data.prompts_per_step"], settings["data.mini_batch_prompts"]) == (16, 8)
    assert (settings["run.steps"], settings["checkpoint.every"]) == (50, 10)  # two optimizer steps an RL step
    assert settings["policy.optimizer.decay_steps"] == 100  # TRL's default: linear to the end
    assert settings["data.train"] == ["data/puzzles/train.parquet"] and settings["cluster.gpus_per_node"] == 2
    assert kinds(migration)["beta"] == "dropped" and "running Python" in why(migration, "beta")
    assert kinds(migration)["reward_funcs"] == "dropped"
    algorithm = accepted(migration, tmp_path).algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.28)
    assert (algorithm.loss_mean, algorithm.loss_mean_length) == ("constant", 512)  # TRL's default max_completion_length


def test_a_known_data_set_is_converted() -> None:
    words = ["data.train_files=/d/dapo-math-17k.parquet", "data.val_files=/d/aime-2024.parquet"]
    migration = migrated("verl", *words, "reward_model.reward_manager=dapo")
    assert migration.settings["data.prepare"].split()[-4:] == [
        "--train-file", "/d/dapo-math-17k.parquet", "--test-file", "/d/aime-2024.parquet",
    ]  # fmt: skip
    assert migration.settings["environment.options.aime.answer"] == "dapo"
    assert {row.kind for row in migration.rows if row.theirs in ("data.train_files", "data.val_files")} == {"changed"}


@pytest.mark.parametrize("program", programs())
@pytest.mark.parametrize("value", [17, True, False, None, "x", 0.5, ["a", "b"]], ids=str)
def test_no_setting_vanishes(program: str, value: Any) -> None:
    names = [key.replace("*", "anything") for key in programs()[program]]
    given = [Given(name, value) for name in (*names, "trainer.no_such_key")]
    migration = translate(GivenSettings(program, given))
    rows = [row.theirs for row in migration.rows if row.kind != "added"]
    assert sorted(rows) == sorted(each.key for each in given)
    assert all(row.why for row in migration.rows if row.kind in ("dropped", "unknown"))
    text.as_yaml(migration, "a test")


@pytest.mark.parametrize("program", programs())
def test_every_value_of_the_table_gives_allowed_settings(program: str) -> None:
    plain = {"true": True, "false": False, "null": None, "-1": -1, "0": 0}
    for key, entry in programs()[program].items():
        for value in entry.values:
            settings = translate(GivenSettings(program, [Given(key, plain.get(value, value))])).settings
            wrong = [name for name, ours in settings.items() if name in keys() and not keys()[name].allows(ours)]
            assert not wrong, f"{key}={value}: {wrong}"


def test_a_list_that_is_null_is_dropped() -> None:
    key = "--rollout-stop"
    slime = translate(GivenSettings("slime", [Given(key, None)]))
    assert (slime.settings.get("rollout.sampling.stop"), why(slime, key)) == (None, "not set there")


def test_the_yaml_has_numbers_that_yaml_reads() -> None:
    written = text.as_yaml(Migration("verl", {"policy.optimizer.lr": 1e-06, "policy.optimizer.eps": 1.5e-08}), "x")
    assert "lr: 1.0e-06" in written and "eps: 1.5e-08" in written


def test_secrets_are_masked_in_the_account() -> None:
    migration = migrated("slime", "--wandb-key", "0123456789abcdef0123456789abcdef01234567", "--lr", "1e-6")
    assert "0123456789abcdef" not in text.as_text(migration) + str(text.as_values(migration))


def test_reward_functions_and_environments_are_named(tmp_path: Path) -> None:
    verl = migrated(
        "verl", "custom_reward_function.path=rewards/mine.py", "custom_reward_function.name=score",
        "+custom_reward_function.reward_kwargs.bonus=0.5", "data.train_files=/d/dapo-math-17k.parquet",
    )  # fmt: skip
    environment = accepted(verl, tmp_path).environment
    assert environment.reward_function == "rewards/mine.py:score"
    assert environment.options == {"reward_function": {"bonus": 0.5}}
    assert verl.settings["data.train"] == ["/d/dapo-math-17k.parquet"]  # the function judges the rows as they are
    trl = migrated("TRL", "--reward_funcs", "my_lib.rewards.exact", "--learning_rate", "1e-6")
    assert trl.settings["environment.reward_function"] == "my_lib.rewards:exact"
    assert "completions[0][0]['content']" in why(trl, "reward_funcs")  # TRL passes texts for text prompts
    skyrl = migrated("SkyRL", "environment.env_class=maze", "environment.skyrl_gym.maze.size=4")
    assert "environment.classes.maze=package.module:Class" in why(skyrl, "environment.env_class")
    assert accepted(skyrl, tmp_path).environment.options == {"maze": {"size": 4}}


@pytest.mark.parametrize(
    ("given", "expected", "why_expected"),
    [
        ("http://node:8000/retrieve", "http://node:8000", "/retrieve is added here"),
        ("http://node:8000", "http://node:8000", ""),
        ("null", None, "not set there"),
    ],
)
def test_the_url_of_a_search_loses_its_suffix(given: str, expected: str | None, why_expected: str) -> None:
    key = "environment.skyrl_gym.search.search_url"
    skyrl = migrated("SkyRL", f"{key}={given}")
    assert skyrl.settings.get("environment.retriever.url") == expected and why(skyrl, key) == why_expected


@pytest.fixture
def with_rewards(tmp_path: Path) -> Path:
    """Returns a script beside `rewards.py`, whose last line is still to be written."""
    (tmp_path / "rewards.py").write_text("def accuracy_reward(completions, **row):\n    return [1.0]\n")
    script = tmp_path / "train.py"
    script.write_text(
        "from my_lib.scores import length\nfrom rewards import accuracy_reward as accuracy\n"
        "from trl import GRPOConfig, GRPOTrainer\nfrom trl.rewards import think_format_reward\n"
    )
    return script


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ("accuracy", "{folder}/rewards.py:accuracy_reward"),
        ("[length]", "my_lib.scores:length"),
        ("'rewards.accuracy_reward'", "rewards:accuracy_reward"),
    ],
)
def test_a_reward_function_is_found_by_its_import(with_rewards: Path, functions: str, expected: str) -> None:
    with with_rewards.open("a") as file:
        file.write(f"GRPOTrainer(model='Org/Small-1B', reward_funcs={functions})\n")
    settings = migrated("TRL", str(with_rewards)).settings
    assert settings["environment.reward_function"] == expected.format(folder=with_rewards.parent)


def test_several_reward_functions_are_added_by_code_that_runs(with_rewards: Path) -> None:
    with with_rewards.open("a") as file:
        file.write("config = GRPOConfig(reward_weights=[1.0, 0.5])\n")
        file.write("GRPOTrainer(model='Org/Small-1B', reward_funcs=[accuracy, length], args=config)\n")
    migration = migrated("TRL", str(with_rewards))
    advice = why(migration, "reward_funcs")
    assert "environment.reward_function=my_reward.py:total" in advice and migration.without_reward
    code = "\n".join(line.removeprefix("      ") for line in advice.splitlines()[1:])
    names: dict[str, Any] = {"accuracy_reward": lambda c, **row: [1.0], "length": lambda c, **row: [len(c[0])]}
    exec(code, names)
    assert names["total"](["four"]) == [3.0]


def test_the_account_ends_with_what_needs_a_look() -> None:
    migration = migrated(
        "verl", "data.prompt_key=prompt", "actor_rollout_ref.model.lora_rank=32", "trainer.no_such_key=1",
        "actor_rollout_ref.model.lora_alpha=0", "trainer.logger=console",
    )  # fmt: skip
    lines = text.as_text(migration).splitlines()
    start = lines.index(text.summary(migration))
    assert [line.split()[3] for line in lines[start + 1 :]] == [
        "actor_rollout_ref.model.lora_rank=32", "trainer.no_such_key=1",
    ]  # fmt: skip
    assert why(migration, "data.prompt_key") == "the column is `prompt` here too"
    trl = migrated("TRL", "--optim", "adamw_8bit", "--use_peft", "false", "--learning_rate", "1e-6")
    assert [row.theirs for row in trl.rows if row.look] == ["optim"]


def test_unknown_figures_of_trl_are_dropped_with_what_depends_on_them(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "BS=$(nvidia-smi | wc -l)\ntrl grpo --per_device_train_batch_size $BS --generation_batch_size 5e2 \\\n"
        "    --gradient_accumulation_steps $(cat f) --num_generations 5 --save_steps $(cat g) --max_steps 1e2\n"
    )
    migration = migrated("TRL", str(script), "--num_processes", "4")
    assert migration.settings["data.prompts_per_step"] == 100  # 500 / 5
    unset = {"data.mini_batch_prompts", "policy.micro_tokens", "checkpoint.every", "run.steps"}
    assert not unset & set(migration.settings)
    of = kinds(migration)
    assert of["per_device_train_batch_size"] == of["gradient_accumulation_steps"] == of["save_steps"] == "dropped"
    assert of["generation_batch_size"] == "changed" and of["max_steps"] == "dropped"
    assert "gradient_accumulation_steps" in why(migration, "max_steps")
    [line] = [line for line in migration.assumptions if "data.mini_batch_prompts and policy.micro_tokens" in line]
    assert "per_device_train_batch_size and gradient_accumulation_steps" in line
    unknown = migrated("TRL", "--num_generations", "eight", "--generation_batch_size", "500")
    assert "data.prompts_per_step" not in unknown.settings
    assert "num_generations" in why(unknown, "generation_batch_size")


@pytest.mark.parametrize(
    ("program", "words", "steps", "epochs"),
    [
        ("slime", "--num-rollout 3000 --num-epoch 2", 3000, 1_000_000),
        ("slime", "--num-epoch 2", None, 2),
        ("TRL", "--max_steps 500 --num_train_epochs 2", 500, 1_000_000),
        ("TRL", "--max_steps -1 --num_train_epochs 2", None, 2),
        ("verl", "trainer.total_training_steps=500 trainer.total_epochs=2", 500, 2),  # the sooner ends verl's run
    ],
)
def test_steps_decide_where_the_data_is_repeated(program: str, words: str, steps: int | None, epochs: int) -> None:
    migration = migrated(program, *words.split())
    assert (migration.settings.get("run.steps"), migration.settings["run.epochs"]) == (steps, epochs)
    if epochs > 2:
        assert "ends the run" in why(migration, "--num-epoch" if program == "slime" else "num_train_epochs")
        assert [row.theirs for row in migration.rows if "run.epochs" in row.ours] == ["passes over the data"]


def test_a_default_decay_of_unknown_length_is_named() -> None:
    [line] = [line for line in migrated("TRL", "--num_processes", "8").assumptions if "lr_scheduler_type" in line]
    assert "linear is left out, so the learning rate stays constant" in line and "decay_steps" in line
    assert migrated("slime", "--num-rollout", "30").settings["policy.optimizer.schedule"] == "linear"


def test_the_clip_range_of_each_loss_of_skyrl() -> None:
    algorithm = "trainer.algorithm."
    words = [f"{algorithm}policy_loss_type=gspo", f"{algorithm}eps_clip_low=0.1"]
    gspo = migrated("SkyRL", *words).settings
    assert (gspo["algorithm.gspo.clip_low"], gspo["algorithm.gspo.clip_high"]) == (0.1, 0.2)  # 0.2 is its default
    assert "algorithm.clip_low" not in gspo
    words = [
        f"{algorithm}policy_loss_type=cispo",
        f"{algorithm}cispo.cispo_eps_clip_high=3",
        f"{algorithm}eps_clip_low=0.1",
    ]
    cispo = migrated("SkyRL", *words)
    low, high = (cispo.settings[f"algorithm.cispo.clip_{side}"] for side in ("low", "high"))
    assert (low, high) == (0, 3) and "cispo_eps_clip_low" in why(cispo, f"{algorithm}eps_clip_low")


KL = {
    "both": (
        "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.005 algorithm.kl_penalty=mse "
        "actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.02 "
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        ("loss", 0.02, "k3"),
    ),
    "reward": (
        "actor_rollout_ref.actor.use_kl_loss=false algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.005 "
        "algorithm.kl_penalty=mse",
        ("reward", 0.005, "k2"),
    ),
    "slime": ("--kl-coef 0.01 --use-kl-loss --kl-loss-coef 0.02 --kl-loss-type k2", ("loss", 0.02, "k2")),
    "slime, watched": ("--kl-coef 0.01 --use-kl-loss --kl-loss-coef 0 --kl-loss-type k2", ("reward", 0.01, "k1")),
}


@pytest.mark.parametrize(("words", "expected"), KL.values(), ids=KL)
def test_one_kl_term_is_taken_whole(words: str, expected: tuple[str, float, str]) -> None:
    migration = migrated("slime" if words.startswith("--") else "verl", *words.split())
    kept = tuple(
        migration.settings.get(key, keys()[key].default)
        for key in ("algorithm.kl.where", "algorithm.kl.coefficient", "algorithm.kl.estimator")
    )
    assert kept == expected
    for row in migration.rows:
        if "algorithm.kl" in str(row.ours):
            assert all(migration.settings[key] == value for key, value in row.ours.items())


def test_rows_agree_with_settings_without_evaluation_data() -> None:
    migration = migrated("verl", "trainer.test_freq=5", "data.train_files=a.parquet")
    assert kinds(migration)["trainer.test_freq"] == "dropped" and migration.settings["evaluation.every"] == 0
    assert "evaluation.every=5" in why(migration, "trainer.test_freq")
    assert all(migration.settings[key] == v for row in migration.rows for key, v in row.ours.items())
