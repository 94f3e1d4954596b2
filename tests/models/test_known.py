"""Tests of the known models against published parameter counts, and against config.json files if available."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.published import KNOWN, hub_name, known
from skyrl_mega.models.registry import architecture

PARAMETERS = {
    "Qwen2-0.5B-Instruct": 494_032_768,
    "Qwen2-7B-Instruct": 7_615_616_512,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen2.5-Coder-7B-Instruct": 7_615_616_512,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen3-0.6B": 751_632_384 - 151936 * 1024,  # the file holds the tied head a second time
    "Qwen3-0.6B-Base": 596_049_920,
    "Qwen3-1.7B": 2_031_739_904 - 151936 * 2048,
    "Qwen3-1.7B-Base": 2_031_739_904 - 151936 * 2048,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-4B-Base": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-8B-Base": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-14B-Base": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-30B-A3B-Base": 30_532_122_624,
    "Qwen3-30B-A3B-Thinking-2507": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-70B-Instruct": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-1B-Instruct": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "SmolLM2-135M-Instruct": 134_515_008,
    "GLM-4.5": 352_797_814_784,
    "GLM-4.5-Air": 106_852_245_504,
    "GLM-4.6": 352_797_814_784,
    "GLM-4.7": 352_797_814_784,
    "GLM-4.7-Flash": 29_943_390_976,
    "DeepSeek-V3": 671_026_404_352,
    "DeepSeek-R1": 671_026_404_352,
    "Kimi-K2-Instruct": 1_026_408_209_408,
    "Moonlight-16B-A3B": 15_960_108_544,
    "Moonlight-16B-A3B-Instruct": 15_960_108_544,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-V2-Lite-Chat": 15_706_484_224,
    "MiniMax-M2": 228_689_748_992,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "OLMoE-1B-7B-0924": 6_919_161_856,
    "OLMoE-1B-7B-0924-Instruct": 6_919_161_856,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen2-57B-A14B": 57_408_658_944,
    "Qwen2-57B-A14B-Instruct": 57_408_658_944,
    "Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "Qwen3-Next-80B-A3B-Thinking": 79_674_391_296,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen3.5-35B-A3B-Base": 34_660_610_688,
    "Qwen3.5-122B-A10B": 122_111_526_912,
    "Qwen3.5-397B-A17B": 396_346_350_336,
}
"""Parameters of each checkpoint: as counted by the Hugging Face hub, and for mixtures of experts other than Qwen3's as
counted by transformers, which counts neither correction biases (a buffer) nor multi-token-prediction layers; of Qwen3.5
the text model."""

BIASES = {
    **dict.fromkeys(("GLM-4.5", "GLM-4.6", "GLM-4.7"), 89 * 160),
    "GLM-4.5-Air": 45 * 128,
    "GLM-4.7-Flash": 46 * 64,
    **dict.fromkeys(("DeepSeek-V3", "DeepSeek-R1"), 58 * 256),
    "Kimi-K2-Instruct": 60 * 384,
    **dict.fromkeys(("Moonlight-16B-A3B", "Moonlight-16B-A3B-Instruct"), 26 * 64),
    "MiniMax-M2": 62 * 256,
}
"""Elements of the correction biases: layers with experts × experts."""

FILES = {
    "Qwen3-30B-A3B": "qwen3_30b_a3b/config.json",
    "Qwen3-4B": "qwen_tokenizer/qwen3_4b_config.json",
    "Qwen2.5-7B-Instruct": "qwen_tokenizer/qwen2.5_7b_config.json",
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_sizes_make_the_published_number_of_parameters(name: str) -> None:
    hf, model = known(name), name.partition("/")[2]
    shapes = architecture(hf).tensors(hf).values()
    assert sum(map(math.prod, shapes)) == PARAMETERS[model] + BIASES.get(model, 0)


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_that_of_the_published_file(name: str, real_data: Path) -> None:
    published = json.loads((real_data / "data" / FILES[name]).read_text())
    hf = known(name)
    assert {key: published.get(key) for key in hf} == hf
    assert architecture(published).describe(published) == architecture(hf).describe(hf)


@pytest.mark.slow
def test_the_model_that_is_made_here_is_the_one_known(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert architecture(config).describe(config) == architecture(known("smollm2-135m")).describe(known("smollm2-135m"))


def test_a_path_names_a_known_model_by_its_last_part() -> None:
    assert hub_name("/data/models/Qwen3-30B-A3B") == hub_name("Qwen/Qwen3-30B-A3B") == "Qwen/Qwen3-30B-A3B"
    assert hub_name("runs/models/mine") is None
    with pytest.raises(UserError, match=r"^runs/mine: no known model; known are Qwen/Qwen2-0\.5B-Instruct, "):
        known("runs/mine")


def test_what_is_given_may_be_changed() -> None:
    known("Qwen3-4B")["num_hidden_layers"] = 1
    assert known("Qwen3-4B")["num_hidden_layers"] == 36
