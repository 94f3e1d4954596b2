"""Errors for wrong models, data, environments and layouts before any start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.cli.inputs import check_inputs, check_layouts, planned_inputs
from skyrl_mega.cli.prepare import prepare, with_device
from skyrl_mega.cluster.devices import GpuEvidence
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.precision import RECIPES
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.config.schema.model import WITH_EXPERTS
from skyrl_mega.models.blocks.gqa import CPU_HEADS
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import build, hf_config
from skyrl_mega.planner.fit import parallel_of
from skyrl_mega.planner.layout_text import policy_rows
from skyrl_mega.telemetry.console import Console


def refusal(folder: Path, *arguments: str) -> str:
    """Returns the one-line error message of a run with these arguments."""
    config = compose(folder / "config.yaml", arguments)
    check(config)
    with pytest.raises(UserError) as error:
        check_inputs(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_right_passes(inputs: Path) -> None:
    hf = check_inputs(compose(inputs / "config.yaml"))
    assert hf["model_type"] == "qwen3_moe"


def test_sequences_may_be_longer_than_config_json_says(inputs: Path) -> None:
    check_inputs(compose(inputs / "config.yaml", ["rollout.max_prompt_tokens=60", "model.max_length=68"]))


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ("policy.layout.tensor=3 policy.ranks=6", ["policy.layout.tensor", "3", "4 attention heads"]),
        ("policy.layout.tensor=4 policy.layout.expert=1", ["policy.layout.tensor", "4", "2 key/value heads"]),
        ("policy.layout.pipeline=3 policy.ranks=6", ["policy.layout.pipeline", "3", "4 layers"]),
        ("policy.layout.pipeline=2 policy.layout.virtual_pipeline=4", ["virtual_pipeline", "4 layers"]),
        ("policy.layout.virtual_pipeline=2", ["policy.layout.virtual_pipeline", "policy.layout.pipeline"]),
        ("policy.layout.expert=3 policy.ranks=3", ["policy.layout.expert", "3", "8 experts"]),
        ("policy.layout.tensor=2 policy.ranks=3", ["policy.layout", "2", "3 ranks"]),
        ("policy.layout.expert=8", ["policy.layout", "8", "4 ranks"]),
        (
            "policy.layout.tensor=2 policy.layout.expert=1 policy.layout.expert_tensor=1",
            ["policy.layout.expert_tensor", "trains wrong", "expert_tensor 2"],
        ),
        (
            "policy.layout.expert=1 policy.layout.expert_tensor=2",
            ["policy.layout.expert_tensor: 2 above tensor 1", "trains wrong", "give expert_tensor 1 or expert above 1"],
        ),
        ("algorithm.kl.coefficient=0.1 reference.layout.tensor=3 reference.ranks=3", ["reference.layout.tensor", "3"]),
        ("policy.layout.tensor=2 policy.layout.expert_tensor=2", ["policy.layout.expert_tensor = 2", "Gloo cannot"]),
        ("rollout.tensor=3", ["rollout.tensor", "3", "2 key/value heads"]),
        ("rollout.tensor=4", ["rollout.tensor", "4", "multiple of 32"]),
        ("rollout.max_prompt_tokens=60", ["68 tokens", "64 (max_position_embeddings)"]),
        ("rollout.max_prompt_tokens=60 model.max_length=67", ["68 tokens", "67 (model.max_length)"]),
        ("environment.default=addtion", ["'addtion'", "did you mean 'addition'"]),
        ("environment.classes.mine=nowhere.at_all:Env", ["environment.classes.mine", "nowhere.at_all"]),
        ("environment.options.adition={}", ["environment.options.adition"]),
        ("model.path=/does/not/exist", ["model.path", "/does/not/exist", "Hugging Face directory"]),
        ("algorithm.kl.coefficient=0.1 reference.path=/does/not/exist", ["/does/not/exist"]),
        ("data.eval=[/does/not/exist.parquet]", ["data.eval", "/does/not/exist.parquet does not exist"]),
        ("warmup.steps=1 warmup.files=[/does/not/exist.parquet]", ["warmup.files", "does not exist"]),
    ],
)
def test_a_wrong_setting_is_one_line(inputs: Path, arguments: str, parts: list[str]) -> None:
    line = refusal(inputs, *arguments.split())
    assert [part for part in parts if part not in line] == [], line


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def truncated(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def another_kind(model: Path) -> None:
    hf = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(hf | {"model_type": "mamba"}))


def another_size(model: Path) -> None:
    hf = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(hf | {"hidden_size": 96}))


@pytest.mark.parametrize(
    "spoil, parts",
    [
        (no_config, ["config.json", "missing"]),
        (no_weights, ["model.safetensors", "neither"]),
        (truncated, ["model.safetensors", "cut off"]),
        (another_kind, ["model_type", "'mamba'", "qwen3_moe"]),
        (another_size, ["model.embed_tokens.weight", "shape", "config.json"]),
    ],
)
def test_a_wrong_model_is_one_line(
    inputs: Path, tmp_path: Path, spoil: Callable[[Path], None], parts: list[str]
) -> None:
    shutil.copytree(inputs / "model", tmp_path / "model")
    spoil(tmp_path / "model")
    line = refusal(inputs, f"model.path={tmp_path / 'model'}")
    assert [part for part in parts if part not in line] == [], line


@pytest.mark.parametrize(
    "rows, parts",
    [
        ([{"env_class": "addition"}], ["data.train", "prompt"]),
        ([{"prompt": "1+1", "env_class": "addition"}], ["prompt", "role", "content"]),
        (
            [{"prompt": [{"role": "user", "content": "1+1"}], "env_class": "adition"}],
            ["row 0", "env_class", "addition"],
        ),
        ([{"prompt": [{"role": "user", "content": "1+1"}]}], ["env_class"]),
    ],
)
def test_wrong_data_is_one_line(inputs: Path, tmp_path: Path, rows: list[dict[str, object]], parts: list[str]) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    line = refusal(inputs, f"data.train=[{file}]")
    assert [part for part in [str(file), *parts] if part not in line] == [], line


def test_a_file_that_is_no_parquet(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("prompt\n1+1\n")
    assert "rows.parquet" in refusal(inputs, f"data.train=[{tmp_path / 'rows.parquet'}]")


def test_absent_model_and_data_are_made(inputs: Path, tmp_path: Path) -> None:
    new = [
        f"model.path={tmp_path / 'model'}",
        "model.build.layers=2",
        "model.build.max_length=64",
        f"data.train=[{tmp_path / 'data' / 'train.parquet'}]",
        "data.eval=[]",
        f'data.prepare="addition --output {tmp_path / "data"} --train 10 --test 2 --demonstrations 0"',
    ]
    config = compose(inputs / "config.yaml", new)
    check(config)
    check_inputs(config)
    assert not (tmp_path / "model").exists(), "a check builds nothing"
    with Console() as console:
        assert prepare(config, console).cluster.device == "cpu"
    check_inputs(compose(inputs / "config.yaml", new[:-1]))
    wrong = compose(inputs / "config.yaml", [f"data.train=[{tmp_path / 'x.parquet'}]", "data.prepare=adition"])
    with Console() as console, pytest.raises(UserError, match=r"data\.prepare: .*adition"):
        prepare(wrong, console)


def test_the_seats(inputs: Path) -> None:
    config = compose(
        inputs / "config.yaml",
        ["policy.ranks=8", "policy.layout={tensor: 2, pipeline: 2, virtual_pipeline: 2, expert: 2}"],
    )
    hf = check_inputs(config)
    rows = policy_rows(parallel_of(config)[0], architecture(hf).describe(hf))
    assert [row["rank"] for row in rows] == list(range(8))
    assert [row["layers"] for row in rows] == ["0-0 2-2"] * 4 + ["1-1 3-3"] * 4
    assert [row["tp"] for row in rows] == [0, 1] * 4
    assert [row["heads"] for row in rows[:2]] == ["0-1", "2-3"] and [row["kv"] for row in rows[:2]] == ["0", "1"]
    assert [row["experts"] for row in rows[:4]] == ["0-3", "4-7"] * 2


def test_a_driver_without_a_gpu_leaves_the_devices_to_its_ray_cluster(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("skyrl_mega.cluster.devices.gpu_evidence", lambda: GpuEvidence())
    asked = compose(inputs / "config.yaml", ["cluster.device=cuda", "cluster.nodes=2", "policy.ranks=8"])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=r"cluster\.device = cuda: torch sees no CUDA device here"):
        with_device(asked)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert with_device(asked).cluster.device == "cuda"


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_gpus_that_torch_does_not_see_are_never_left_for_the_cpu(
    asked: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs with the CPU environment on a GPU node: an error before the model is built or data is prepared."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    build = [f"model.path={tmp_path / 'model'}", "model.build={experts: 8}"]
    config = compose(inputs / "config.yaml", [f"cluster.device={asked}", *build])
    pattern = f"cluster\\.device = {asked}: here are .*8 GPUs by SLURM_GPUS_ON_NODE, but torch .*; .*cluster.device=cpu"
    with Console() as console, pytest.raises(UserError, match=pattern):
        prepare(config, console)
    assert not (tmp_path / "model").exists()
    assert with_device(compose(inputs / "config.yaml", ["cluster.device=cpu"])).cluster.device == "cpu"


def test_a_model_that_was_built_with_other_sizes_is_refused(inputs: Path) -> None:
    """Changes the sizes of a built model: without an error, the run would train the old model and config.yaml would
    differ.
    """
    built = "model.build={layers: 4, max_length: 64}"
    check_inputs(compose(inputs / "config.yaml", [built]))
    for setting, parts in {
        "model.build.hidden=256": ["model.build.hidden = 256", f"{inputs}/model", "has 64 (hidden_size", "remove"],
        "model.build.architecture=llama": ["model.build.architecture = llama", "has qwen3_moe"],
        "model.build.experts_per_token=4": ["model.build.experts_per_token = 4", "has 2"],
    }.items():
        message = refusal(inputs, built, setting)
        assert all(part in message for part in parts), message
        with pytest.raises(UserError, match=setting.partition("=")[0]):
            planned_inputs(compose(inputs / "config.yaml", [built, setting]))


def test_a_built_family_with_its_own_names_of_sizes_is_compared_too(inputs: Path, tmp_path: Path) -> None:
    built = ["model.build={architecture: mixtral}", f"model.path={tmp_path}/mixtral"]
    build(BuildConfig(architecture="mixtral"), tmp_path / "mixtral")
    check_inputs(compose(inputs / "config.yaml", built))
    message = refusal(inputs, *built, "model.build.experts=4")
    assert "model.build" in message and "describes another model" in message


def test_a_head_that_no_engine_on_a_cpu_serves_is_refused(inputs: Path, tmp_path: Path) -> None:
    new = ["model.build={layers: 4, max_length: 64}", f"model.path={tmp_path}/new"]
    for head_dim in (32, 64):
        check_inputs(compose(inputs / "config.yaml", [*new, f"model.build.head_dim={head_dim}"]))
    message = refusal(inputs, *new, "model.build.head_dim=16")
    assert "model.build.head_dim = 16" in message and "allowed are 32, 48, 64" in message
    gpu = compose(inputs / "config.yaml", [*new, "model.build.head_dim=16", "cluster.device=cuda"])
    planned_inputs(gpu)


def test_these_are_the_heads_that_vllm_has_attention_for() -> None:
    """Compares with the head sizes of vLLM's attention kernels."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    def has(head_dim: int) -> bool:
        one, two = torch.tensor([5], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
        try:
            torch.ops._C.get_scheduler_metadata(1, 4, 2, head_dim, one, torch.float32, two, True, -1, "vec", True, None)
        except RuntimeError:  # Unsupported CPU attention configuration
            return False
        return True

    assert tuple(head_dim for head_dim in range(4, 600, 4) if has(head_dim)) == CPU_HEADS


def test_parameters_in_fp8_are_refused_where_a_cpu_is_what_there_is(inputs: Path) -> None:
    """Sets FP8 parameters with `auto`, which counts as a GPU until the run inspects the machine."""
    fp8 = ["policy.precision.recipe=fp8_blockwise", "policy.precision.parameters=fp8", "weights.wire=fp8"]
    config = compose(inputs / "config.yaml", ["cluster.device=auto", *fp8])
    with pytest.raises(UserError, match=r"^policy\.precision\.parameters = fp8: it needs Transformer Engine's tensors"):
        with_device(config)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        *((f"policy.precision.recipe={recipe}", "policy.precision.recipe") for recipe in RECIPES),
        ("weights.wire=fp8", "weights.wire"),
        ("rollout.options.quantization=fp8_per_block", "rollout.options"),
    ],
)
def test_fp8_is_refused_for_every_family_not_shown_with_it(inputs: Path, setting: str, key: str) -> None:
    config = compose(inputs / "config.yaml", ["cluster.device=cuda", setting])
    refused = {}
    for family in WITH_EXPERTS:
        hf = hf_config(BuildConfig(architecture=family, hidden=128))
        try:
            check_layouts(config, hf)
        except UserError as error:
            if "FP8 has" in str(error):
                refused[family] = str(error)
        if family in refused:
            parts = {
                "a norm over all heads": family in ("olmoe", "minimax_m2"),
                "multi-head latent attention": "kv_lora_rank" in hf,
                "a gated delta net": "linear_num_key_heads" in hf,
                "attention sinks": family == "gpt_oss",
                "Qwen3's experts only": True,
            }
            assert next(part for part, named in parts.items() if named) in refused[family]
            assert refused[family].startswith(f"{key}: FP8 has ")
            assert refused[family].endswith("weights.wire=auto and engines without quantization")
    assert refused.keys() == {*WITH_EXPERTS[1:]}
