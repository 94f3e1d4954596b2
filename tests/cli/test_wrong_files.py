"""Broken model, tokenizer and data files: a one-line message with the file's name before any process starts."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.cli.inputs import check_inputs, planned_inputs
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.engines.vllm import arguments
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.setup import prompts_of
from tests.support.tokenizers import directory, word_piece


def said(run: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        run()
    line = str(caught.value)
    assert line.isprintable() and len(line) < 1000
    return line


@pytest.fixture
def model(inputs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(inputs / "model", tmp_path / "model"))


def refused(inputs: Path, *arguments: str) -> str:
    def run() -> None:
        config = compose(inputs / "config.yaml", arguments)
        check(config)
        check_inputs(config)

    return said(run)


CONFIGS: list[tuple[Any, str]] = [
    ({"model_type": ["qwen3_moe"]}, "model_type is"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps is tiny; skyrl_mega supports a positive number"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; skyrl_mega supports a positive integer of at"),
    ({"num_experts": 10**9, "num_local_experts": 10**9}, "experts is 1000000000"),
    ({"mlp_only_layers": 5}, "mlp_only_layers is 5"),
    ({"rope_parameters": [1]}, "rope_parameters is [1]"),
    ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "factor is x"),
    (b"[" * 100_000, "it nests deeper"),
    (b'{"a": "\xff"}', "no UTF-8"),
    (b'{"a": NaN}', "NaN is no number"),
    (b'{"a": 1e999}', "inf is no number"),
    (b"[]", "is no JSON object"),
    (b"", "cannot be read as JSON"),
]


@pytest.mark.parametrize("content, line", CONFIGS, ids=[line for _, line in CONFIGS])
def test_config_json(inputs: Path, model: Path, content: Any, line: str) -> None:
    file = model / "config.json"
    file.write_bytes(
        content if isinstance(content, bytes) else json.dumps({**json.loads(file.read_text()), **content}).encode()
    )
    assert line in refused(inputs, f"model.path={model}")


@pytest.mark.parametrize(
    "offsets, line",
    [
        ([(0, 4), (-4, 8)], "offsets -4, 8"),
        ([(0, 4), (2, 6)], "begins at 2, where the one before ends at 4"),
        ([(0, 4), (4, 6)], "has 2 bytes"),
        ([(0, 4), (8, 12)], "begins at 8"),
        ([(0, 4), ("a", 8)], "no safetensors header"),
    ],
)
def test_safetensors_whose_tensors_do_not_tile(inputs: Path, model: Path, offsets: Any, line: str) -> None:
    header = json.dumps(
        {f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": pair} for i, pair in enumerate(offsets)}
    ).encode()
    [file, *_] = model.glob("*.safetensors")
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert line in refused(inputs, f"model.path={model}")


TOKENIZERS = [
    ("tokenizer.json", "{}", "no tokenizer can be loaded"),
    ("tokenizer.json", "[]", "no tokenizer can be loaded"),
    ("tokenizer_config.json", "[]", "no tokenizer can be loaded"),
    ("chat_template.jinja", "{{ 1 / 0 }}", "the chat template refuses messages of user: division by zero"),
    ("chat_template.jinja", "5", "the chat template leaves out what the user says"),
    ("generation_config.json", "{", "generation_config.json: cannot be read as JSON"),
    ("generation_config.json", "[]", "generation_config.json: is no JSON object"),
    ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is x; allowed is a token"),
]


@pytest.mark.parametrize("name, content, line", TOKENIZERS)
def test_tokenizers(model: Path, name: str, content: str, line: str) -> None:
    (model / name).write_text(content)
    assert line in said(lambda: Renderer(str(model)))


def test_an_end_of_turn_that_the_model_cannot_say(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 100000]}')
    assert "end-of-turn token 100000 is not below" in said(lambda: Renderer(str(model)).check_vocabulary(128))


@pytest.mark.parametrize("name, content, line", TOKENIZERS[::3])
def test_a_run_and_its_dry_run_refuse_alike(inputs: Path, model: Path, name: str, content: str, line: str) -> None:
    (model / name).write_text(content)
    config = compose(inputs / "config.yaml", [f"model.path={model}"])
    for checked in (check_inputs, planned_inputs):
        with pytest.raises(UserError, match=line):
            checked(config)


def test_a_tokenizer_that_loses_text(inputs: Path, model: Path) -> None:
    config_json = (model / "config.json").read_text()
    directory(model, word_piece(), unk_token="[UNK]")
    (model / "config.json").write_text(config_json)
    config = compose(inputs / "config.yaml", [f"model.path={model}"])
    for checked in (check_inputs, planned_inputs):
        with pytest.raises(UserError, match=r"model.path=.*: tokenizer.json loses text: "):
            checked(config)


def test_a_wrong_preparation_is_refused_before_it_begins(inputs: Path) -> None:
    for wrong, line in (("nothing", "invalid choice: 'nothing'"), ("addition --wrong nan", "--wrong nan"),
                        ("addition 'x", "data.prepare: addition 'x: No closing quotation")):  # fmt: skip
        config = compose(inputs / "config.yaml", [f'data.prepare="{wrong}"', "data.train=[absent.parquet]"])
        for checked in (check_inputs, planned_inputs):
            with pytest.raises(UserError) as caught:
                checked(config)
            assert line in str(caught.value)


def test_a_prompt_that_the_model_has_no_token_for(model: Path) -> None:
    chat = Renderer(str(model))
    chat.check_vocabulary(128)
    messages = [{"role": "user", "content": "1+1"}]
    largest = max(chat.prompt(messages, "here"))
    chat.vocabulary = largest
    line = said(lambda: chat.prompt(messages, "data.train, row 7"))
    assert line.startswith(f"data.train, row 7: its token {largest} is not below config.json's vocab_size = {largest}")


@pytest.mark.parametrize("truth", ["nan", " NaN ", "", " "])
def test_a_truth_that_no_answer_equals(inputs: Path, tmp_path: Path, truth: str) -> None:
    rows = [{"ground_truth": "1"}, {"ground_truth": truth}]
    kind = pa.struct([("ground_truth", pa.string())])
    file = table(tmp_path / "t.parquet", prompt=conversations(b"1", b"2"), reward_spec=pa.array(rows, kind))
    line = refused(inputs, f"data.train=[{file}]", "environment.default=math")
    assert "row 1, column reward_spec.ground_truth = " in line and "allowed is" in line


def test_a_prompt_without_words(inputs: Path, tmp_path: Path) -> None:
    file = table(tmp_path / "t.parquet", prompt=conversations(b"1", b" \n"))
    assert "row 1, column prompt: all its messages are blank" in refused(
        inputs, f"data.train=[{file}]", "environment.default=gsm8k"
    )


def test_limits_of_time_that_do_not_fit_in_a_step(inputs: Path) -> None:
    line = "rollout.env_timeout_s = 60: a step of environment swe may take 70 s by its own time limits"
    assert line in refused(inputs, "environment.options.swe={tasks: x, command_timeout_s: 40}")


def table(file: Path, **columns: pa.Array) -> Path:
    pq.write_table(pa.table(columns), file)
    return file


def conversations(*contents: bytes) -> pa.Array:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.binary())]))
    rows = pa.array([[{"role": "user", "content": content}] for content in contents], kind)
    return rows.view(pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))


def test_parquet_that_is_no_text(inputs: Path, tmp_path: Path) -> None:
    good = conversations(b"1", b"2")
    for columns in (
        {"prompt": conversations(b"1", b"\xff")},
        {"prompt": good, "env_class": pa.array([b"x", b"\xc3"]).view(pa.string())},
        {"prompt": good, "other": pa.array([b"x", b"\xc3"]).view(pa.string())},
    ):
        file = table(tmp_path / "t.parquet", **columns)
        name = list(columns)[-1]
        assert f"row 1, column {name}: its text is not valid UTF-8" in refused(inputs, f"data.train=[{file}]")


def test_parquet_of_two_columns_of_one_name(inputs: Path, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([conversations(b"1")] * 2, ["prompt", "prompt"]), tmp_path / "t.parquet")
    assert "has two columns prompt" in refused(inputs, f"data.train=[{tmp_path / 't.parquet'}]")


def test_a_column_name_does_not_steer_the_terminal(inputs: Path, tmp_path: Path) -> None:
    file = table(tmp_path / "t.parquet", **{"\x1b[2J\x07": pa.array([1])})
    assert r"has \x1b[2J\x07" in refused(inputs, f"data.train=[{file}]").replace("(it has ", "has ")


def test_a_run_that_could_take_no_step(inputs: Path) -> None:
    line = (
        "data.prompts_per_step = 1000: there are 20 rows in data.train, in all epochs (run.epochs = 2) 40, too few for "
        "a single step"
    )
    assert line in refused(inputs, "data.prompts_per_step=1000", "run.epochs=2")
    check_inputs(compose(inputs / "config.yaml", ["data.prompts_per_step=40", "run.epochs=2"]))
    check_inputs(compose(inputs / "config.yaml", ["data.prompts_per_step=1000", "run.steps=0"]))


@pytest.mark.parametrize("arguments, line", [(["rollout.max_prompt_tokens=1"], "all 20 prompts of data.train are lo")])
def test_prompts_that_are_all_too_long(inputs: Path, arguments: list[str], line: str) -> None:
    config = compose(inputs / "config.yaml", arguments)
    with Console() as console:
        assert line in said(lambda: prompts_of(config, Renderer(config.model.path), console))


def test_an_engine_argument_that_vllm_does_not_have(inputs: Path) -> None:
    line = "rollout.options.max_num_seqz: vLLM has no such engine argument; did you mean max_num_seqs"
    assert line in refused(inputs, "rollout.options.max_num_seqz=1")
    assert "rollout.options.nope_nope" in refused(inputs, "rollout.options.nope_nope=1")


def test_an_engine_argument_that_vllm_takes_no_such_value_for(inputs: Path) -> None:
    for given, takes in (
        ("max_num_batched_tokens=many", "max_num_batched_tokens = many: allowed is a whole number"),
        ("max_num_batched_tokens=1.5", "max_num_batched_tokens = 1.5: allowed is a whole number"),
        ("max_num_batched_tokens=true", "max_num_batched_tokens = true: allowed is a whole number"),
        ("cpu_offload_gb=[4]", "cpu_offload_gb = [4]: allowed is a number"),
        ("enable_prefix_caching=1", "enable_prefix_caching = 1: allowed is true or false"),
        ("hf_token=7", "hf_token = ***: allowed is true or false or a text"),
        ("max_logprobs=null", "max_logprobs = null: allowed is a whole number"),
    ):
        assert f"rollout.options.{takes}; leave the option out to keep vLLM's default" in refused(
            inputs, f"rollout.options.{given}"
        )
    arguments.check({"cpu_offload_gb": 4, "block_size": None, "hf_token": "own", "attention_backend": "FLASH_ATTN"})


@pytest.mark.parametrize(
    "setting, line",
    [
        ("model.path=" + "a" * 300, "allowed are names of at most 255 bytes"),
        ("environment.retriever.url=nonsense", "environment.retriever.url = nonsense: allowed is http://host:port"),
        ("run.seed=-5", "run.seed = -5: allowed is a whole number from 0 to 4294967295"),
        (f"run.seed={10**30}", "run.seed = 10000000000000000000"),
        ("rollout.sampling.stop=['']", "rollout.sampling.stop = ['']: allowed is a list of text, none empty"),
        ("rollout.options.scale=nan", "rollout.options = {scale: .nan}: allowed is a mapping without NaN"),
        ("policy.ranks=1000000000", "policy.ranks = 1000000000: allowed is a whole number from 1 to 100000 or null"),
        ("rollout.engines=1000000000", "rollout.engines = 1000000000"),
        (f"data.samples_per_prompt={10**30}", "data.samples_per_prompt = 1000000"),
        ("policy.threads=1000000000", "policy.threads = 1000000000"),
        ("rollout.kv_cache_gib=1000000", "rollout.kv_cache_gib = 1000000"),
        ("weights.bucket_mib=1e12", "weights.bucket_mib = 1000000000000.0: allowed is a number from 0.001 to 65536"),
        ("data.train=[1,2]", "data.train: 1, 2 do not exist"),
        ("data.train=[[1]]", "data.train = [[1]]: [1] is no text; allowed is a list of text"),
        ("policy.layout.tensor=-2", "policy.layout.tensor = -2: allowed is a whole number of at least 1"),
        (f"evaluation.limit={10**30}", "and nothing beyond 1e+12"),
        ('run.name="a\\x1b[31m"', "run.name = "),
    ],
)
def test_settings_that_no_run_could_have(inputs: Path, setting: str, line: str) -> None:
    assert line in refused(inputs, setting)
