"""Impossible settings are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The least that passes."""
    file = tmp_path_factory.mktemp("configs") / "base.yaml"
    file.write_text(
        "model: {path: m}\ndata: {train: [t.parquet], prompts_per_step: 64}\n"
        "cluster: {device: cpu}\npolicy: {ranks: 8}\n"
    )
    return file


@pytest.mark.parametrize(
    "arguments",
    [
        ["run.steps=0"],
        ["policy.optimizer.schedule=cosine", "policy.optimizer.decay_steps=10", "policy.optimizer.warmup_steps=9"],
        ["algorithm.advantage=reinforce", "data.samples_per_prompt=1", "rollout.sampling.temperature=0"],
        ["algorithm.kl.coefficient=0.1", "reference.layout.tensor=2", "reference.ranks=2"],
        ["rollout.sampling.top_k=1", "rollout.sampling.top_p=0.5", "evaluation.temperature=0"],
        ["cluster.device=cuda", "cluster.nodes=2"],
        ["data.mini_batch_prompts=16"],
        ["policy.options.recompute_granularity=selective", "policy.ddp_options.bucket_size=1000"],
    ],
)
def test_what_is_possible_passes(base: Path, arguments: list[str]) -> None:
    check(compose(base, arguments))


WRONG = [
    ("policy.layout.first_stage_layers=0", "policy.layout.first_stage_layers = 0: allowed is a whole number of at"),
    ("cluster.topology.nic_gb_s=0", "cluster.topology.nic_gb_s = 0.0: allowed is a number of at least 0.001"),
    (
        "cluster.topology.nics_per_node=9",
        "cluster.topology.nics_per_node = 9: allowed is at most cluster.gpus_per_node",
    ),
    (
        "cluster.device=cuda cluster.shared=true policy.ranks=8 rollout.engines=9",
        "rollout.engines = 9: with cluster.shared the workers of all engines have GPUs of policy ranks, and "
        "these are 9 workers, more than policy.ranks = 8; allowed is at most 8 engines",
    ),
    (
        "cluster.device=cuda cluster.shared=true cluster.gpus_per_node=4 cluster.nodes=3 rollout.tensor=3",
        "rollout.tensor = 3: with cluster.shared an engine has the GPUs of consecutive policy ranks, and some would "
        "lie in two nodes; allowed are divisors of cluster.gpus_per_node = 4",
    ),
    ("rollout.options.data_parallel_size=2", "rollout.options.data_parallel_size = 2: not yet available in a run"),
    ("rollout.options.data_parallel_size=x", "rollout.options.data_parallel_size = x: allowed is a whole number"),
    ("policy.layout.tensor=0", "policy.layout.tensor = 0: allowed is a whole number of at least 1"),
    ("policy.optimizer.lr=nan", "policy.optimizer.lr = nan: allowed is a number of at least 0"),
    ("policy.optimizer.lr=inf", "policy.optimizer.lr = inf: allowed is a number of at least 0"),
    ("policy.optimizer.lr=-1", "policy.optimizer.lr = -1.0: allowed is a number of at least 0"),
    ("algorithm.clip_low=1.5", "algorithm.clip_low = 1.5: allowed is a number from 0 to 1"),
    (
        "rollout.chat_template_options.tokenize=true",
        "rollout.chat_template_options.tokenize: the run decides it; leave",
    ),
    ("rollout.chat_template_options.tools=[]", "tools: the run decides it; use an environment with tools"),
    ("rollout.chat_template_options={1a:1}", "1a: allowed is the name of a template's variable"),
    ("rollout.chat_template_options=[1]", "rollout.chat_template_options"),
    ("evaluation.max_tokens=100000", "evaluation.max_tokens = 100000: allowed is at most"),
    ("evaluation.top_p=2", "evaluation.top_p = 2.0: allowed is a number from 0 to 1 or null"),
    ("cluster.device=gpu", "cluster.device = gpu: allowed is one of auto, cpu, cuda"),
    ("weights.wire=int4", "weights.wire = int4: allowed is one of auto, fp8"),
    ("model.build.experts=-1", "model.build.experts = -1: allowed is a whole number of at least 0"),
    ("run.name=a/b", "run.name = a/b: allowed are letters, digits"),
    ("run.name=..", "run.name = ..: allowed are letters, digits"),
    ('model.path=""', "model.path is not set: allowed is a Hugging Face directory"),
    ("model.build.experts=0", "model.build.experts = 0: qwen3_moe needs at least 1; or architecture=qwen3"),
    (
        "model.build.experts_per_token=9",
        "model.build.experts_per_token = 9: allowed is at most model.build.experts = 8",
    ),
    ("warmup.steps=5", "warmup.steps = 5: it needs warmup.files"),
    ("policy.optimizer.schedule=cosine", "schedule = cosine: it needs policy.optimizer.decay_steps"),
    (
        "policy.optimizer.schedule=linear policy.optimizer.decay_steps=5 policy.optimizer.warmup_steps=5",
        "policy.optimizer.decay_steps = 5: allowed is more than policy.optimizer.warmup_steps = 5",
    ),
    ("policy.optimizer.min_lr=1", "policy.optimizer.min_lr = 1: allowed is at most policy.optimizer.lr = 1e-06"),
    ("policy.optimizer.beta1=1", "policy.optimizer.beta1 = 1: allowed is a number below 1"),
    ("data.train=[]", "data.train is empty: allowed is a list of parquet files"),
    ("data.mini_batch_prompts=24", "data.mini_batch_prompts = 24: it does not divide data.prompts_per_step = 64"),
    ("data.mini_batch_prompts=128", "data.mini_batch_prompts = 128: it does not divide data.prompts_per_step = 64"),
    ("data.samples_per_prompt=1", "data.samples_per_prompt = 1: algorithm.advantage=grpo compares the samples"),
    ("rollout.sampling.temperature=0", "rollout.sampling.temperature = 0: the 8 samples of a prompt would all be the"),
    (
        "algorithm.kl.coefficient=0.1 warmup.steps=5 warmup.files=[x]",
        "the reference would be the model before its warm-up",
    ),
    ("reference.path=x", "reference.path is set: it needs algorithm.kl.coefficient above 0"),
    ("reference.ranks=2 algorithm.kl.coefficient=0.1", "reference.ranks = 2: it needs reference.layout"),
    ("algorithm.overlong.buffer=2000", "algorithm.overlong.buffer = 2000: allowed is at most the 1024 tokens"),
    ("rollout.sampling.top_k=0", "rollout.sampling.top_k = 0: allowed is -1 (all) or at least 1"),
    ("rollout.sampling.top_p=0", "rollout.sampling.top_p = 0: allowed is a number above 0"),
    ("rollout.max_response_tokens=100", "rollout.sampling.max_tokens = 1024: allowed is at most rollout.max_response"),
    ("rollout.max_length=100", "rollout.max_length = 100: allowed is more than rollout.max_prompt_tokens = 2048"),
    ("model.build.max_length=256", "model.build.max_length = 256: allowed is at least 3072"),
    (
        "policy.options.tensor_model_parallel_size=2",
        "policy.options.tensor_model_parallel_size: the run decides it; use policy.layout.tensor",
    ),
    (
        "policy.options.calculate_per_token_loss=false",
        "policy.options.calculate_per_token_loss: the run decides it; leave it out",
    ),
    (
        "policy.options.hidden_size=8",
        "policy.options.hidden_size: the run decides it; use another model.path: config.json decides it",
    ),
    (
        "policy.recompute=true policy.options.recompute_granularity=selective",
        "policy.options.recompute_granularity: the run decides it; use policy.recompute=false to choose",
    ),
    (
        "policy.ddp_options.overlap_grad_reduce=true",
        "policy.ddp_options.overlap_grad_reduce: the run decides it; use policy.overlap",
    ),
    (
        "policy.optimizer.options.adam_beta1=0.5",
        "policy.optimizer.options.adam_beta1: the run decides it; use policy.optimizer.beta1",
    ),
    (
        "rollout.options.tensor_parallel_size=2",
        "rollout.options.tensor_parallel_size: the run decides it; use rollout.te",
    ),
    ("rollout.options.logprobs_mode=raw", "rollout.options.logprobs_mode: the run decides it; leave it out"),
    ("rollout.options.enable_expert_parallel=true", "vLLM has no expert parallelism on a CPU; leave it out"),
    (
        "rollout.options.hf_overrides.quantization_config.quant_method=fp8",
        "weights.wire = auto: allowed is fp8 where rollout.options.hf_overrides.quantization_config makes engines",
    ),
    ("cluster.device=cuda", "policy 8 + engines 1 GPUs are more than cluster.nodes · gpus_per_node = 8"),
    (
        "cluster.device=cuda cluster.nodes=2 rollout.tensor=16",
        "rollout.tensor = 16: allowed is at most cluster.gpus_per_node = 8",
    ),
    (
        "cluster.device=cuda cluster.nodes=4 cluster.gpus_per_node=6 policy.ranks=12 policy.layout.tensor=4",
        "policy.layout.tensor = 4: it does not divide cluster.gpus_per_node = 6, so some tensor parallel group would",
    ),
]


@pytest.mark.parametrize("arguments, line", WRONG, ids=[arguments for arguments, _ in WRONG])
def test_what_is_impossible_is_one_line(base: Path, arguments: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        check(compose(base, arguments.split()))
    assert line in str(error.value)
    assert "\n" not in str(error.value)
