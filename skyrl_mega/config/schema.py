"""Every setting of a run, as dataclasses whose field docstrings are the manual.

`Config` is the root. A field made with `one_of`, `between` or `at_least` carries its allowed values in its metadata;
`checks.py` reads them from there, so that a rule stands beside the key it rules. Nothing here imports torch, ray or
vllm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from skyrl_mega.config.limits import ENVIRONMENT_WORKERS


def one_of(*allowed: str) -> Any:
    """A string field; the first of `allowed` is the default."""
    return field(default=allowed[0], metadata={"allowed": allowed})


def at_least(low: float, default: Any) -> Any:
    """A number field that is never below `low`."""
    return field(default=default, metadata={"low": low})


def between(low: float, high: float, default: Any) -> Any:
    """A number field within the closed interval `[low, high]`."""
    return field(default=default, metadata={"low": low, "high": high})


MOST = 100_000
"""Processes, nodes or samples: no run has more."""


@dataclass
class RunConfig:
    """Where a run lives and how long it goes."""

    name: str = "run"
    """The run's name; its folder is `<directory>/<name>`."""
    directory: str = "runs"
    """The folder that holds runs."""
    seed: int = between(0, 2**32 - 1, 0)
    """Seeds data order, initial weights that are built, and sampling."""
    steps: Optional[int] = at_least(0, None)
    """RL steps at most; None goes on until `epochs` are done."""
    epochs: int = at_least(1, 1)
    """Passes over the training prompts."""
    restarts: int = at_least(0, 3)
    """Times that a run in which a policy rank or a node failed starts again, from its newest checkpoint and in the same
    allocation. One that has not completed a step yet ends at once."""
    patience: Optional[int] = at_least(0, 25)
    """Steps one after another from which the policy cannot learn (docs/health.md), after which the run ends with exit
    code 1, if they had `patience_groups` too; null or 0 never ends it. A single step to learn from starts the count
    again. The policy stays as it is in
    such steps, so that only other prompts can help: with 512 a step, 25 steps are 12,800, more than a whole pass over
    most data sets, and of a run of days they are hours."""
    patience_groups: int = at_least(0, 917)
    """Groups of answers that these steps have together before it is no bad luck that none was of use: where rewards
    differ in one of a hundred groups, 917 have none with a probability of 1e-4. 0 counts steps alone."""


@dataclass
class TopologyConfig:
    """How fast a node's links are, for the transfer plan. The defaults are an H100 node's; GB is 10⁹ bytes."""

    nics_per_node: Optional[int] = at_least(1, None)
    """Network cards of one node, at most its GPUs; None counts one for each GPU."""
    nic_gb_s: float = at_least(0.001, 50.0)
    """GB/s of one network card, each way."""
    fabric_gb_s: float = at_least(0.001, 450.0)
    """GB/s between one GPU and the others of its node, each way."""
    device_gb_s: float = at_least(0.001, 1500.0)
    """GB/s of a copy within one GPU's memory."""


@dataclass
class RatesConfig:
    """How fast a GPU is, and how long texts become: what a dry run estimates times from. Defaults: an H100 SXM."""

    tflops: float = at_least(0.001, 989.0)
    """Dense bfloat16 TFLOP/s of one GPU (NVIDIA's data sheet)."""
    tflops_share: float = between(0.01, 1, 0.2)
    """Share of `tflops` that a layer's matrix products reach, communication not counted."""
    memory_gb_s: float = at_least(0.001, 3350.0)
    """GB/s of one GPU's memory (NVIDIA's data sheet)."""
    memory_share: float = between(0.01, 1, 0.4)
    """Share of `memory_gb_s` that decoding reaches."""
    host_gb_s: float = at_least(0.001, 50.0)
    """GB/s from host memory to one GPU."""
    layer_us: float = at_least(0, 100.0)
    """Microseconds of launches and small collectives in one layer of one forward pass, of the policy and of engines
    with CUDA graphs; an eager engine takes at least 400."""
    length_share: float = between(0.01, 1, 0.5)
    """Mean length of prompts and responses over their limits."""


@dataclass
class ClusterConfig:
    """What the run may use."""

    device: str = one_of("auto", "cpu", "cuda")
    """Where policy and engines compute; auto takes CUDA when a device is visible."""
    nodes: int = between(1, MOST, 1)
    """Nodes of the allocation."""
    gpus_per_node: int = between(1, 1024, 8)
    """GPUs of one node (ignored on CPU)."""
    shared: bool = False
    """Policy and engines share the GPUs instead of having some each. Both stay in memory all the time: what
    `rollout.memory_fraction` leaves is the policy's."""
    gpu_memory_gib: Optional[float] = at_least(1, None)
    """Memory of one GPU; None asks the GPU in a run, and is 79.1 in a dry run, what an H100 of 80 GB has."""
    gpu_reserve_gib: float = at_least(0, 3.0)
    """What CUDA, NCCL and libraries take of it in a policy process. What its allocator cannot use, and what an engine
    worker takes beside its share, are counted apart (docs/dry-run.md)."""
    host_memory_gib: Optional[float] = at_least(1, None)
    """Memory of one node; None does not check it."""
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    """Links between GPUs and nodes."""
    rates: RatesConfig = field(default_factory=RatesConfig)
    """What a dry run's times are estimated from."""
    start_timeout_s: float = at_least(1, 600.0)
    """Seconds for all actors to be up; past it the run ends and names who did not answer."""
    call_timeout_s: float = at_least(1, 3600.0)
    """Seconds that one call of an actor may take."""
    preflight: str = one_of("auto", "always", "never")
    """Looks at every node before the run, and ends it where one is not fit; auto does so on CUDA."""
    preflight_timeout_s: float = at_least(1, 60.0)
    """Seconds that one question of the preflight to a node may take."""


@dataclass
class BuildConfig:
    """A small model with random weights. Where `model.path` exists already, it must have these sizes."""

    architecture: str = one_of("qwen3_moe", "qwen3", "qwen2", "llama")
    """Which architecture's config.json is written."""
    hidden: int = at_least(8, 64)
    """Hidden size."""
    layers: int = between(1, 1000, 2)
    """Decoder layers."""
    heads: int = at_least(1, 4)
    """Attention heads."""
    kv_heads: int = at_least(1, 2)
    """Key/value heads."""
    head_dim: int = at_least(4, 32)
    """Width of one head."""
    ffn: int = at_least(8, 128)
    """Intermediate size of a dense layer."""
    experts: int = at_least(0, 8)
    """Experts of a MoE layer."""
    experts_per_token: int = at_least(1, 2)
    """Experts that see one token."""
    expert_ffn: int = at_least(8, 64)
    """Intermediate size of one expert."""
    tied: bool = False
    """The output projection is the embedding."""
    max_length: int = at_least(8, 256)
    """Longest sequence (max_position_embeddings)."""
    tokenizer: str = one_of("characters", "none")
    """`characters`: one token per printable ASCII character, with a chat template."""


@dataclass
class ModelConfig:
    """The model that is trained."""

    path: str = ""
    """A Hugging Face directory: config.json, safetensors, tokenizer."""
    dtype: str = one_of("bfloat16", "float32")
    """Type of parameters and activations, in the policy and in the engines."""
    max_length: Optional[int] = at_least(1, None)
    """Longest sequence, where it is another than config.json's max_position_embeddings."""
    build: Optional[BuildConfig] = None
    """Builds the directory when it is not there; one that is there and has other sizes is refused."""


@dataclass
class LayoutConfig:
    """How Megatron cuts the model. Data parallelism is what remains: ranks / (tensor · pipeline · context)."""

    tensor: int = at_least(1, 1)
    """Tensor parallel size; sequence parallel is on whenever it is above 1."""
    pipeline: int = at_least(1, 1)
    """Pipeline stages."""
    virtual_pipeline: int = at_least(1, 1)
    """Model chunks per pipeline stage (interleaved schedule)."""
    first_stage_layers: Optional[int] = at_least(1, None)
    """Layers of the first pipeline stage; None gives it as many as the stages between."""
    last_stage_layers: Optional[int] = at_least(1, None)
    """Layers of the last pipeline stage; None gives it as many as the stages between."""
    context: int = at_least(1, 1)
    """Context parallel size."""
    expert: int = at_least(1, 1)
    """Expert parallel size."""
    expert_tensor: Optional[int] = at_least(1, None)
    """Tensor parallel size inside an expert; None takes 1 with expert > 1, else `tensor`."""


@dataclass
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = at_least(0, 1e-6)
    """Peak learning rate."""
    min_lr: float = at_least(0, 0.0)
    """Where a decaying schedule ends."""
    schedule: str = one_of("constant", "linear", "cosine")
    """After the warm-up."""
    warmup_steps: int = at_least(0, 0)
    """Optimizer steps of linear warm-up from zero."""
    warmup_from_zero: bool = False
    """The first optimizer step of a warm-up has learning rate 0, and step i has (i − 1) / warmup_steps of `lr`, as with
    the schedulers of torch and in SkyRL; false gives it i / warmup_steps."""
    decay_steps: Optional[int] = at_least(1, None)
    """Optimizer step at which `min_lr` is reached; needed by linear and cosine."""
    beta1: float = between(0, 1, 0.9)
    """Adam's first moment decay."""
    beta2: float = between(0, 1, 0.999)
    """Adam's second moment decay."""
    eps: float = at_least(0, 1e-8)
    """Adam's epsilon."""
    weight_decay: float = at_least(0, 0.01)
    """Decoupled weight decay; norms and biases are exempt."""
    clip_grad: float = at_least(0, 1.0)
    """Largest global gradient norm; 0 does not clip."""
    options: dict[str, Any] = field(default_factory=dict)
    """More fields of megatron-core's OptimizerConfig, by their own names. Memory that they save or take is not
    planned."""


@dataclass
class MoeConfig:
    """Router settings of a MoE policy."""

    aux_loss: float = at_least(0, 0.0)
    """Coefficient of the load-balancing loss."""
    freeze_router: bool = False
    """Keeps the router's weights as loaded."""


@dataclass
class PolicyConfig:
    """The Megatron policy."""

    ranks: Optional[int] = between(1, MOST, None)
    """Processes (GPUs) of the policy; None takes nodes · gpus_per_node."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """How the model is cut."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    """Router settings."""
    spec: str = one_of("auto", "te", "local")
    """Modules of a layer. te: Transformer Engine's, which compute on CUDA alone. local: megatron-core's own, with this
    project's attention and norm. auto: te on CUDA, local on a CPU."""
    overlap: Optional[bool] = None
    """Sums gradients over the data-parallel ranks while the backward pass computes, and gathers the parameters that an
    optimizer step changed while the next forward pass does; None does so on CUDA."""
    micro_tokens: int = at_least(1, 8192)
    """Token budget of one packed micro-batch on one rank (a longer sequence has one of its own)."""
    logit_chunk: int = at_least(1, 1024)
    """Tokens whose logits exist at once while log-probs are computed."""
    recompute: bool = False
    """Recomputes every layer's activations in the backward pass."""
    threads: int = between(1, 4096, 1)
    """CPU threads of one rank (CPU only)."""
    options: dict[str, Any] = field(default_factory=dict)
    """More fields of megatron-core's TransformerConfig, by their own names (`recompute_granularity: selective`); a
    reference with a layout of its own has them too. Fields that another setting or the run decides are refused; memory
    that the others save or take is not planned."""
    ddp_options: dict[str, Any] = field(default_factory=dict)
    """More fields of megatron-core's DistributedDataParallelConfig, by their own names (`bucket_size: 40000000`)."""


@dataclass
class ReferenceConfig:
    """The frozen policy that KL is measured against. It exists only while `algorithm.kl.coefficient` is above 0."""

    path: Optional[str] = None
    """Its weights; None takes `model.path`."""
    layout: Optional[LayoutConfig] = None
    """None shares the policy's ranks and layout; otherwise actors of its own in this layout."""
    ranks: Optional[int] = between(1, MOST, None)
    """Processes of a reference with a layout of its own."""


@dataclass
class SamplingConfig:
    """How tokens are drawn."""

    temperature: float = at_least(0, 1.0)
    """Softmax temperature; 0 is greedy."""
    top_p: float = between(0, 1, 1.0)
    """Nucleus mass."""
    top_k: int = at_least(-1, -1)
    """Most likely tokens kept; -1 keeps all."""
    max_tokens: int = at_least(1, 1024)
    """Tokens generated in one turn at most."""
    stop: list[str] = field(default_factory=list, metadata={"empty": False})
    """Strings that end a turn; they stay in the output."""


@dataclass
class RolloutConfig:
    """vLLM engines and the agent loop."""

    engines: int = between(1, MOST, 1)
    """Engines, each in an actor of its own."""
    tensor: int = at_least(1, 1)
    """Tensor parallel size of one engine."""
    memory_fraction: float = between(0, 1, 0.6)
    """Share of a GPU's memory that vLLM may take (CUDA)."""
    kv_cache_gib: float = between(0.01, 10_000, 1.0)
    """KV cache of one engine worker (CPU)."""
    max_length: Optional[int] = at_least(1, None)
    """Longest sequence of an engine; None takes prompt + response limits."""
    max_prompt_tokens: int = at_least(1, 2048)
    """Longer prompts are left out of the data, counted."""
    max_input_tokens: Optional[int] = at_least(1, None)
    """Tokens before a turn at most: where there are more, the trajectory ends before it. None lets a turn begin while
    `max_length` and `max_response_tokens` leave room for one token."""
    max_response_tokens: Optional[int] = at_least(1, None)
    """Tokens after the prompt over all turns; None takes turns · sampling.max_tokens."""
    max_turns: int = at_least(1, 1)
    """Turns of one trajectory at most."""
    concurrency: int = between(1, MOST, 256)
    """Sequences that one engine runs at once at most. It is given no more requests than fill its KV cache twice, were
    all as long as they may become."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How training samples are drawn."""
    conversation: str = one_of("messages", "one_message")
    """How several turns become tokens. messages: each turn is a message of the assistant, each observation one of its
    own role, as the chat template writes them. one_message: all turns and observations are inside one message of the
    assistant, observations as they are, without the template; an end token behind a turn that goes on is taken back,
    and a last turn that a stop string ended gets one, which is trained on (docs/environments.md). SearchR1 and
    SkyRL-SQL were published so."""
    chat_template_options: dict[str, Any] = field(default_factory=dict)
    """More variables of the model's chat template, such as `{enable_thinking: false}` of Qwen3's. Every rendering has
    them: prompts, observations, the warm-up, evaluations."""
    env_timeout_s: float = at_least(0.1, 60.0)
    """Seconds for one environment step."""
    trajectory_timeout_s: Optional[float] = at_least(0.1, None)
    """Seconds for one trajectory, from its first request on, waiting for an engine included: below the seconds that the
    whole generation takes, it truncates the trajectories that come last. Past it the trajectory is truncated: what was
    generated until then is kept and judged. None has no end; another machine, another end."""
    step_wise: str = one_of("off", "turns", "merged")
    """What one training sample is. off: a trajectory. turns: a turn, with all that the policy saw before it; for
    environments that rewrite the conversation. merged: the same, with turns that only continue one another in one."""
    request_timeout_s: float = at_least(1, 600.0)
    """Seconds that an engine may leave all of its requests without a new token; past it, it is started again and others
    take them. A request has no limit but `sampling.max_tokens`: however long it waits, and however slow its tokens are.
    Of an endpoint that is evaluated: seconds for one attempt."""
    restarts: int = at_least(0, 10)
    """Engines that are started again after a fault, in one run; past it the run ends and names the root cause."""
    threads: int = between(1, 4096, 1)
    """CPU threads of one engine worker (CPU only)."""
    eager: Optional[bool] = None
    """Runs the engine without compilation and CUDA graphs: every token then pays for thousands of launches from Python,
    an estimated two to four times as slow on an H100. None does so on a CPU only. SkyRL's script for DAPO is eager, for
    an instability of the vLLM of its day; weights are updated in place here, so graphs keep reading them. Give true to
    rule graphs out where `mismatch` figures or a loss look wrong."""
    options: dict[str, Any] = field(default_factory=dict)
    """More vLLM engine arguments, by their own names."""


@dataclass
class WeightsConfig:
    """Weight sync from policy to engines."""

    wire: str = one_of("auto", "fp8")
    """auto: as `model.dtype`. fp8: linear weights travel as E4M3 with a scale for every 128×128 block, half the bytes;
    an engine that stores another type gets them back in it, with FP8's precision."""
    bucket_mib: float = between(0.001, 65536, 64.0)
    """Size of one message; a process has three of them at most."""
    checksum_every: int = at_least(0, 10)
    """Syncs from one to the next of which every part is proved where it has arrived; 0 proves none."""
    timeout_s: float = at_least(1, 300.0)
    """Seconds for one sync; past it the error names rank and tensor."""


@dataclass
class KlConfig:
    """KL to the reference, in the loss."""

    coefficient: float = at_least(0, 0.0)
    """0 needs no reference."""
    estimator: str = one_of("k3", "k1", "k2")
    """Schulman's estimators (joschu.net/blog/kl-approx.html)."""
    mean: str = one_of("loss", "tokens", "sequences")
    """What the KL term is the mean over. loss: as `algorithm.loss_mean`; tokens and sequences: as there. SkyRL's KL
    term is a mean over sequences, whatever the policy loss is."""


@dataclass
class DynamicSamplingConfig:
    """DAPO: resample until every group of the batch has rewards that differ."""

    enabled: bool = False
    """Whether groups with zero variance are replaced."""
    max_rounds: int = at_least(1, 10)
    """Generation rounds for one step at most; past it the step takes the groups it has, and says so where that
    is at most half of them."""


@dataclass
class OverlongConfig:
    """DAPO: what happens to responses near or past the length limit."""

    filter: bool = False
    """Truncated trajectories are masked out of the loss."""
    buffer: int = at_least(0, 0)
    """Tokens before the limit over which the punishment grows linearly; 0 turns it off."""
    penalty: float = at_least(0, 1.0)
    """Punishment at the limit."""


@dataclass
class GspoConfig:
    """The clip range of `loss: gspo` (arXiv:2507.18071, section 5.1), whose ratio is a mean over an answer's tokens."""

    clip_low: float = between(0, 1, 3e-4)
    """An answer's ratio is clipped below 1 - clip_low."""
    clip_high: float = at_least(0, 4e-4)
    """An answer's ratio is clipped above 1 + clip_high."""


@dataclass
class AlgorithmConfig:
    """From rewards to a loss."""

    advantage: str = one_of("grpo", "rloo", "reinforce")
    """How a trajectory's advantage comes from its group."""
    normalize: bool = True
    """GRPO divides by the group's standard deviation."""
    loss: str = "ppo"
    """What is minimised: ppo, gspo (one ratio for all tokens of an answer), or your own function of (LossInputs,
    AlgorithmConfig) by import path (`package.module:function` or `path/to/file.py:function`)."""
    gspo: GspoConfig = field(default_factory=GspoConfig)
    """The clip range of gspo, which does not look at `clip_low` and `clip_high`."""
    clip_low: float = between(0, 1, 0.2)
    """Ratio is clipped below 1 - clip_low."""
    clip_high: float = at_least(0, 0.2)
    """Ratio is clipped above 1 + clip_high."""
    dual_clip: Optional[float] = at_least(1, None)
    """Bound c of dual-clip PPO (arXiv:1912.09729) for negative advantages; None is off."""
    loss_mean: str = one_of("tokens", "sequences", "micro_batches")
    """tokens: over all tokens of the mini-batch; sequences: per-sequence token mean, then over sequences;
    micro_batches: token mean over every `loss_mean_samples` samples, then over these groups. That is what programs
    compute that take the token mean of each micro-batch (SkyRL's `token_mean` of 2025, `token_mean_legacy` today). Here
    the groups are fixed: the loss does not depend on `policy.micro_tokens`."""
    loss_mean_samples: Optional[int] = at_least(1, None)
    """Of `loss_mean=micro_batches`, which needs it: samples of one group, the micro-batch of the run that is
    reproduced. Samples that follow one another in the mini-batch make a group; a trajectory is one sample, also with
    `rollout.step_wise`. A group without a token to learn from counts as one whose loss is 0."""
    importance_cap: Optional[float] = at_least(0, None)
    """Token-level truncated importance sampling of the engine's mismatch, capped here; None is off."""
    kl: KlConfig = field(default_factory=KlConfig)
    """KL to the reference."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Resampling of groups without signal."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Length limit handling."""


@dataclass
class DataConfig:
    """Prompts."""

    folder: Optional[str] = None
    """Read by nothing: other settings name the recipe's files with `${data.folder}`, so that one key moves them all."""
    train: list[str] = field(default_factory=list)
    """Parquet files of training prompts."""
    eval: list[str] = field(default_factory=list)
    """Parquet files of evaluation prompts."""
    prompts_per_step: int = at_least(1, 512)
    """Prompts (groups) of one RL step."""
    mini_batch_prompts: Optional[int] = at_least(1, None)
    """Prompts of one optimizer step; None takes all of the RL step's."""
    samples_per_prompt: int = between(1, MOST, 8)
    """Trajectories of one prompt."""
    shuffle: bool = True
    """New order every epoch."""
    prepare: Optional[str] = None
    """Arguments of `python -m skyrl_mega.data` that make the files when they are not there."""


@dataclass
class RetrieverConfig:
    """What environment `search` asks: a retrieval service that runs (`url`), or one of the run's own (`index`)."""

    url: Optional[str] = None
    """Address of a service that runs; None starts one for this run on loopback, which ends with it."""
    index: Optional[str] = None
    """Index folder of the run's own service."""
    build: Optional[str] = None
    """Arguments of `python -m skyrl_mega.retriever build`, to make `index` when it is not there or no longer theirs."""
    serve: str = ""
    """More arguments of `python -m skyrl_mega.retriever serve` for the run's own service."""
    topk: int = at_least(1, 3)
    """Passages that a search shows."""
    passage_chars: int = at_least(1, 4000)
    """Characters of a passage that a search shows; what follows is left out."""
    timeout_s: float = at_least(0.1, 30.0)
    """Seconds for one search with all its retries; past it the policy is told that the search failed."""
    token_variable: str = "SKYRL_MEGA_RETRIEVER_TOKEN"
    """Environment variable that holds the service's token, where it wants one."""


@dataclass
class EnvironmentConfig:
    """Environments."""

    default: Optional[str] = None
    """Environment of rows whose `env_class` is empty."""
    classes: dict[str, str] = field(default_factory=dict)
    """Name → import path (`package.module:Class` or `path/to/file.py:Class`) of your own environments."""
    options: dict[str, Any] = field(default_factory=dict)
    """Environment name → options passed to its constructor."""
    workers: int = between(1, MOST, ENVIRONMENT_WORKERS)
    """Calls of environments at once, each in a thread; the others wait, and waiting does not count as their time."""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """The retrieval service that environment `search` asks."""


@dataclass
class EvaluationConfig:
    """Scores on held-out prompts."""

    every: int = at_least(0, 10)
    """RL steps between evaluations; 0 never evaluates between start and end."""
    before: bool = True
    """Also before the first RL step."""
    samples: int = between(1, MOST, 1)
    """Samples per prompt: pass@n and average."""
    limit: Optional[int] = at_least(1, None)
    """Prompts of each set at most."""
    temperature: Optional[float] = at_least(0, None)
    """None takes rollout.sampling.temperature."""
    top_p: Optional[float] = between(0, 1, None)
    """None takes rollout.sampling.top_p."""
    max_tokens: Optional[int] = at_least(1, None)
    """Tokens of one turn at most; None takes rollout.sampling.max_tokens."""


@dataclass
class CheckpointConfig:
    """Saving and coming back."""

    every: int = at_least(0, 10)
    """RL steps between checkpoints; 0 saves none."""
    keep: int = at_least(1, 2)
    """Newest checkpoints kept."""
    resume: bool = True
    """Goes on from the newest whole checkpoint of the run's folder."""
    export: bool = False
    """Writes the final weights as a Hugging Face directory."""


@dataclass
class WarmupConfig:
    """A supervised warm-up on demonstrations before RL, for models that start from nothing."""

    steps: int = at_least(0, 0)
    """Optimizer steps; 0 has no warm-up."""
    files: list[str] = field(default_factory=list)
    """Parquet files whose `extra_info.demonstration` is the response to learn, or a conversation after the prompt."""
    batch: int = at_least(1, 256)
    """Demonstrations per step."""
    lr: float = at_least(0, 1e-3)
    """Peak learning rate of the warm-up; the optimizer starts afresh for RL."""


@dataclass
class TelemetryConfig:
    """What is written while the run goes."""

    trackers: list[str] = field(default_factory=lambda: ["jsonl", "tensorboard"], metadata={"empty": False})
    """Where the metrics go, in addition to `metrics.jsonl`, which is always written: names of docs/trackers.md, or the
    import path of your own class (`package.module:Class` or `path/to/file.py:Class`)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Tracker → its options; the name of your own tracker is that of its class."""
    trajectories_every: int = at_least(0, 1)
    """RL steps between trajectory files; 0 writes none."""
    tracked_trajectories: int = between(0, 1000, 8)
    """Trajectories that trackers are given whenever such a file is written, the first of the step; 0 gives none."""


@dataclass
class Config:
    """A run."""

    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
