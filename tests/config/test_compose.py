"""Composition of files, groups and arguments to typed settings, or a one-line message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose, dump
from skyrl_mega.config.keys import keys, nearest
from skyrl_mega.config.schema import Config, LayoutConfig

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with a base file and its group."""
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "low.yaml").write_text("clip_high: 0.1\ndual_clip: 3\n")
    (tmp_path / "algorithm" / "high.yaml").write_text("clip_high: 0.3\n")
    (tmp_path / "base.yaml").write_text(
        "defaults:\n  - algorithm: low\n  - _self_\nrun:\n  name: base\nalgorithm:\n  clip_low: 0.15\n"
        "model:\n  path: ${run.directory}/model\n"
    )
    (tmp_path / "plain.yaml").write_text("run:\n  name: plain\n")
    return tmp_path


def write(folder: Path, text: str) -> Path:
    file = folder / "it.yaml"
    file.write_text(text)
    return file


def test_a_file_its_group_and_the_schema_meet(folder: Path) -> None:
    config = compose(folder / "base.yaml")
    assert isinstance(config, Config) and isinstance(config.policy.layout, LayoutConfig)
    assert (config.algorithm.clip_high, config.algorithm.dual_clip, config.algorithm.clip_low) == (0.1, 3.0, 0.15)
    assert config.run.name == "base"
    assert config.model.path == "runs/model"
    assert config.data.prompts_per_step == 512


def test_arguments_win_and_later_ones_win_over_earlier(folder: Path) -> None:
    config = compose(folder / "base.yaml", ["run.seed=1", "run.seed=2", "algorithm.clip_high=0.25", "run.name=x"])
    assert (config.run.seed, config.algorithm.clip_high, config.run.name) == (2, 0.25, "x")


@pytest.mark.parametrize("file", ["base.yaml", "plain.yaml"])
def test_a_group_is_chosen_on_the_command_line(folder: Path, file: str) -> None:
    config = compose(folder / file, ["algorithm=high", "algorithm.clip_low=0.05"])
    assert (config.algorithm.clip_high, config.algorithm.clip_low) == (0.3, 0.05)
    assert config.algorithm.dual_clip is None


def test_values_of_every_kind(folder: Path) -> None:
    config = compose(
        folder / "plain.yaml",
        [
            "policy.optimizer.lr=3e-4",
            "data.train=[a.parquet,b.parquet]",
            "rollout.sampling.stop=['</answer>']",
            "policy.ranks=4",
            "policy.recompute=true",
            "evaluation.top_p=null",
            "rollout.options.block_size=16",
            "+rollout.options.scale=1e-3",
            "environment.classes.mine=path/to/env.py:Mine",
            'run.directory="a=b"',
            "reference.layout.tensor=2",
            "model.build={hidden: 32}",
            "model.build.layers=3",
        ],
    )
    assert config.policy.optimizer.lr == 3e-4
    assert config.data.train == ["a.parquet", "b.parquet"]
    assert config.rollout.sampling.stop == ["</answer>"]
    assert (config.policy.ranks, config.policy.recompute, config.evaluation.top_p) == (4, "full", None)
    assert config.rollout.options == {"block_size": 16, "scale": 1e-3}
    assert config.environment.classes == {"mine": "path/to/env.py:Mine"}
    assert config.run.directory == "a=b"
    assert config.reference.layout == LayoutConfig(tensor=2)
    assert config.model.build is not None
    assert (config.model.build.hidden, config.model.build.layers, config.model.build.heads) == (32, 3, 4)


@pytest.mark.parametrize(
    "argument, line",
    [
        ("policy.layout.tensr=2", "policy.layout.tensr = 2 is not known here; did you mean policy.layout.tensor?"),
        ("policy.tensor=2", "policy.tensor = 2 is not known here; did you mean policy.layout.tensor?"),
        ("environment.deadline=30", "environment.deadline = 30 is not known here; rollout.env_timeout_s bounds one"),
        ("rollout.timeout_s=30", "and rollout.trajectory_timeout_s a whole trajectory (docs/environments.md)"),
        ("polcy.ranks=2", "did you mean policy.ranks? allowed in a configuration: run, cluster, model"),
        ("policy.layout.tensor=two", "policy.layout.tensor = two: allowed is a whole number of at least 1"),
        ("policy.layout.tensor=2.5", "policy.layout.tensor = 2.5: allowed is a whole number of at least 1"),
        ("policy.layout.tensor=true", "policy.layout.tensor = true: allowed is a whole number of at least 1"),
        ("policy.layout.tensor.x=2", "policy.layout.tensor is a whole number of at least 1 and holds no other keys"),
        ("policy.optimizer.streamed=2", "policy.optimizer.streamed = 2: allowed is true or false"),
        ("policy.overlap=-1", "policy.overlap = -1: allowed is true or false or null"),
        ("policy.moe.freeze_router=maybe", "policy.moe.freeze_router = maybe: allowed is true or false"),
        ("policy.layout=3", "policy.layout = 3: allowed is a group of tensor, pipeline"),
        ("policy.layout=null", "policy.layout = null: allowed is a group of tensor"),
        ("run.seed=null", "run.seed = null: allowed is a whole number"),
        ("policy.ranks=few", "policy.ranks = few: allowed is a whole number from 1 to 100000 or null"),
        ("telemetry.profile.enabled=true", "is not known here; telemetry.profile.steps lists the steps"),
        (
            "policy.precision.param_gather=true",
            "is not known here; policy.precision.parameters=fp8 stores and gathers",
        ),
        (
            "policy.megatron_cfg.fp8_cfg.enabled=true",
            "is NeMo-RL's; here there is none: policy.precision.recipe says so: model is off, fp8_blockwise on",
        ),
        ("policy.megatron_cfg.fp8_cfg.amax=1", "amax = 1 is not known here; allowed in policy: ranks, "),
        ("policy.recompute=1", "policy.recompute = 1: allowed is one of none, selective"),
        ("residency.keep=parameters", "optimizer, critic or null: [parameters,gradients] keeps these two, [] none, nu"),
        ("residency.keep=true", "residency.keep = true: allowed is a list of engine_weights, kv_cache"),
        ("data.train=x.parquet", "data.train = x.parquet: allowed is a list of text"),
        ("rollout.options=3", "rollout.options = 3: allowed is a mapping"),
        ("model.build.hiden=32", "model.build.hiden = 32 is not known here; did you mean model.build.hidden?"),
        ("data.train=a,b", "data.train=a,b: one value is allowed; a list is written data.train=[a,b]"),
        ("~evaluation.top_p", "a setting cannot be taken away; give evaluation.top_p=null"),
        ("data.train=[", "data.train=[: not of the form group.key=value"),
        ("run.seed", "run.seed: not of the form group.key=value"),
        ("algorithm=middle", "algorithm/middle is not in"),
        ("run.name=${nowhere.x}", "run.name: Interpolation key 'nowhere.x' not found"),
    ],
)
def test_a_wrong_argument_is_one_line(folder: Path, argument: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        compose(folder / "base.yaml", [argument])
    assert line in str(error.value)
    assert "\n" not in str(error.value)


TYPED = ["12e345", "1234e56", "007", "1_000", "0x1f", "1:30", "on", "Yes", "off", "true", ".inf", "2024-01-02", "a=b"]


@pytest.mark.parametrize("text", TYPED)
def test_text_stays_as_it_is_typed(folder: Path, text: str) -> None:
    file = write(folder, f"run:\n  name: {text}\ndata:\n  train: [{text}]\nrollout:\n  options: {{x: 007}}\n")
    for config in (compose(file), compose(None, [f"run.name={text}", f"data.train=[{text}]"])):
        assert (config.run.name, config.data.train) == (text, [text])
        file.write_text(dump(config))
        assert compose(file) == config, "and from what a run wrote of it"
    assert compose(write(folder, "rollout:\n  options: {x: 007}\n")).rollout.options == {"x": 7}


@pytest.mark.parametrize(
    "quoted", [r'"\n\n"', r'"\u00fc\t"', r'"\\n"', r"'\n'", '"a, b"', '"${run.name}]"', '"{"', '"null"']
)
def test_quoted_text_means_the_same_in_a_file_and_an_argument(folder: Path, quoted: str) -> None:
    text = f"run: {{directory: {quoted}}}\nrollout: {{sampling: {{stop: [{quoted}, x]}}, options: {{x: {quoted}}}}}\n"
    arguments = (f"run.directory={quoted}", f"rollout.sampling.stop=[{quoted}, x]", f"+rollout.options.x={quoted}")
    assert compose(None, arguments) == compose(write(folder, text))


def test_numbers_that_a_mapping_gives_text_settings_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"run.name = inf: allowed is text"):
        compose(None, ["run={name: 12e345}"])
    assert compose(None, ["run={name: '12e345'}"]).run.name == "12e345"
    assert compose(None, ["run.name='it''s'"]).run.name == "it's"
    with pytest.raises(UserError, match=r"is no quoted text of YAML .* write a backslash twice"):
        compose(None, [r'run.name="a\d"'])


@pytest.mark.parametrize("argument", ["run.seed=1,2", "policy.ranks=glob(*)", "~run.seed", "~policy.layout"])
def test_no_offer_that_is_refused_itself(argument: str) -> None:
    with pytest.raises(UserError) as error:
        compose(None, [argument])
    assert not re.search(r"=(null|\[)", str(error.value)), "the setting takes neither null nor a list"


@pytest.mark.parametrize(
    "text, line",
    [
        (
            "policy:\n  layout:\n    tensr: 2\n",
            "policy.layout.tensr = 2 is not known here; did you mean policy.layout.ten",
        ),
        (
            "policy:\n  layout:\n    tensor: [1]\n",
            "policy.layout.tensor = [1]: allowed is a whole number of at least 1",
        ),
        ("policy:\n", "policy = null: allowed is a group of ranks, layout"),
        ("run: [\n", "it.yaml: line 2 column 1 is not YAML"),
        ("run:\n  seed: 1\n  seed: 2\n", "found duplicate key seed"),
        ("- run\n", "it holds a list; allowed is a mapping"),
        ("defaults:\n  - algorithm: middle\n", "algorithm/middle is not in"),
    ],
)
def test_a_wrong_file_is_one_line(folder: Path, text: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        compose(write(folder, text))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_says_what_is_there(folder: Path) -> None:
    with pytest.raises(UserError, match=r"bsae.yaml: no such file; .* has base.yaml, plain.yaml"):
        compose(folder / "bsae.yaml")
    with pytest.raises(UserError, match=r"allowed is a file that ends in \.yaml"):
        compose(folder / "base.yml")


def test_an_empty_file_gives_the_defaults(folder: Path) -> None:
    assert compose(write(folder, "")) == Config()


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_recipe_composes_and_its_dump_is_the_same_run(file: Path, tmp_path: Path) -> None:
    config = compose(file)
    (tmp_path / "config.yaml").write_text(dump(config))
    assert compose(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("algorithm/*.yaml")), ids=lambda file: file.stem)
def test_every_algorithm_can_be_chosen(file: Path) -> None:
    chosen = compose(CONFIGS / "quickstart.yaml", [f"algorithm={file.stem}"]).algorithm
    assert chosen.advantage == {"gae": "gae"}.get(file.stem, "grpo")
    assert chosen.clip_high == {"dapo": 0.28, "grpo": 0.2, "gae": 0.2}[file.stem]


def test_nearest_prefers_the_same_word_elsewhere() -> None:
    assert nearest("policy.lr") == "policy.optimizer.lr"
    assert nearest("data.promts_per_step") == "data.prompts_per_step"
    assert nearest("zzz") is None
    assert nearest("policy.layout.enabled") is None
    assert nearest("algorithm.sampling.enabled") == "algorithm.dynamic_sampling.enabled"


def test_every_key_is_documented() -> None:
    assert [name for name, key in keys().items() if not key.doc] == []


def test_groups_that_come_with_the_project_are_found_from_anywhere(tmp_path: Path) -> None:
    """Copies configs/quickstart.yaml, as recommended by the README."""
    (tmp_path / "mine.yaml").write_text((CONFIGS / "quickstart.yaml").read_text())
    assert compose(tmp_path / "mine.yaml") == compose(CONFIGS / "quickstart.yaml")
    assert compose(tmp_path / "mine.yaml", ["algorithm=grpo"]).algorithm.dynamic_sampling.enabled is False
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "dapo.yaml").write_text("clip_high: 0.77\n")
    assert compose(tmp_path / "mine.yaml").algorithm.clip_high == 0.77, "one beside the file goes before"
    with pytest.raises(UserError, match=r"algorithm/dpao is not in .*, nor among .*; allowed is dapo, gae, grpo"):
        compose(tmp_path / "mine.yaml", ["algorithm=dpao"])
