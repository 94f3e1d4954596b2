"""Impossible settings: exit code 2 and a suggested fix that works.

The list follows reports of users of such programs: memory running out, on GPUs and on hosts; indivisible sizes; hanging
groups; silently dropped settings; sequences without room; engines larger than a node.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyrl_mega.cli import dry_run
from skyrl_mega.cli.train import main
from skyrl_mega.config.compose import compose
from tests.cli import large

IMPOSSIBLE: list[tuple[str, str, list[str]]] = [
    # ---- memory of a GPU
    ("experts on every rank", "policy.layout.expert=1", ["rank 0 needs about", "at least", "policy.layout.expert=4"]),
    ("long rows without recomputation", "policy.recompute=none policy.micro_tokens=65536", ["activations"]),
    ("rows that nobody has", "policy.micro_tokens=1000000000", ["activations", "work: policy.micro_tokens=65536"]),
    (
        "logits of a whole row",
        "policy.head=chunked policy.logit_chunk=65536 policy.micro_tokens=65536",
        ["logits", "policy.logit_chunk=8192"],
    ),
    (
        "a model that is too large",
        "model.path=m/Qwen3-235B-A22B rollout.memory_fraction=0.9",
        ["optimizer", "a GPU has 79.1", "--suggest searches further"],
    ),
    ("a smaller GPU", "cluster.gpu_memory_gib=40", ["a GPU has 40.0 (cluster.gpu_memory_gib)", "policy.layout."]),
    ("buckets of the sync", "weights.bucket_mib=30000", ["sync 87.9", "weights.bucket_mib=7500"]),
    ("an engine's weights", "rollout.tensor=1 rollout.memory_fraction=0.5", ["weights of rollout.tensor 1 take 56.9"]),
    (
        "no room for the KV cache",
        "rollout.memory_fraction=0.1",
        ["KV cache of", "for a sequence of 8,192 tokens:", "rollout.memory_fraction=0.15"],
    ),
    (
        "policy and engines on the same GPUs",
        "cluster.shared=true cluster.nodes=4 rollout.memory_fraction=0.9",
        ["rollout.memory_fraction = 0.9", "72.5 GiB", "more than the 79.1", "rollout.memory_fraction=0.4"],
    ),
    (
        "a policy that keeps too much beside engines that sleep",
        "cluster.shared=true cluster.nodes=4 rollout.memory_fraction=0.75 "
        "residency.keep=[parameters,optimizer,gradients]",
        [
            "in phase generate, an engine worker's 60.6 GiB (weights 7.2, kv_cache",
            "the largest fraction that fits is 0.48; with residency.keep=[optimizer] it fits",
            "rollout.memory_fraction=0.45",
        ],
    ),
    (
        "a policy and engines that all stay",
        "cluster.shared=true cluster.nodes=4 rollout.memory_fraction=0.6",
        [
            "with residency.keep=[engine_weights,parameters,optimizer] it fits; --suggest",
            "work: rollout.memory_fraction=0.4; or ",
            "; or residency.keep=[]",
        ],
    ),
    (
        "engines that may not drop their weights",
        "cluster.shared=true cluster.nodes=4 rollout.memory_fraction=0.6 rollout.options.cpu_offload_gb=10",
        ["whatever residency.keep may leave out, it does not fit at this fraction", "rollout.memory_fraction=0.4;"],
    ),
    (
        "a critic and engines on GPUs of the policy",
        "cluster.shared=true cluster.nodes=4 rollout.memory_fraction=0.3 policy.ranks=null algorithm=gae",
        ["at most 32: policy.ranks=16 rollout.engines=2, or more nodes", "work: policy.ranks=16 rollout.engines=2"],
    ),
    (
        "hosts without memory for what leaves",
        "cluster.shared=true cluster.nodes=4 residency.keep=[] cluster.host_memory_gib=250",
        ["parked 150.", "95% on Ray", "residency.keep="],
    ),
    (
        "an engine's context beside its share",
        "rollout.memory_fraction=0.99",
        ["an engine worker takes 78.3 GiB and, beside that, about 1.3", "rollout.memory_fraction=0.95"],
    ),
    (
        "a reference on one GPU",
        "model.path=m/Qwen3-235B-A22B reference.layout={expert: 4} reference.ranks=4 cluster.nodes=65 "
        + " ".join(large.HUGE[2:]),
        ["reference: rank 0 needs about", "reference.layout."],
    ),
    # ---- memory of a host
    ("pinned references", "cluster.host_memory_gib=76", ["reference 65.6", "95% on Ray"]),
    # ---- indivisible sizes
    ("heads", "policy.layout.tensor=8", ["4 key/value heads", "policy.layout.tensor=4"]),
    ("experts", "policy.layout.expert=6 policy.ranks=24", ["does not divide the model's 128 experts", ".expert=8"]),
    ("layers", "policy.layout.pipeline=32 policy.layout.tensor=1 policy.layout.expert=1", ["48 layers", ".pipeline="]),
    ("chunks", "policy.layout.pipeline=2 policy.layout.virtual_pipeline=5", ["48 layers", "virtual_pipeline=4"]),
    ("ranks", "policy.layout.pipeline=5", ["does not divide the 32 ranks", "policy.layout.pipeline=4"]),
    ("uneven stages", "policy.layout={pipeline: 4, expert: 8, first_stage_layers: 11}", ["37 of 48 layers"]),
    ("an engine's heads", "rollout.tensor=3", ["32 attention heads", "rollout.tensor=2"]),
    (
        "blocks of an FP8 checkpoint",
        "rollout.tensor=8 weights.wire=fp8 rollout.options={hf_overrides: {quantization_config: {quant_method: fp8, "
        "activation_scheme: dynamic, weight_block_size: [128, 128]}}}",
        ["leaves 96 columns of an expert", "multiples of 128; allowed is rollout.tensor 1, 2, or", "rollout.tensor=2"],
    ),
    ("mini-batches", "data.mini_batch_prompts=100", ["512", "data.mini_batch_prompts=128"]),
    # ---- settings with a hang or wrong training
    (
        "experts replicated without their gradients summed",
        "policy.layout={tensor: 4, expert: 1, expert_tensor: 1} policy.layout.pipeline=4",
        ["trains wrong", "expert_tensor=4"],
    ),
    (
        "gradients of different columns summed",
        "policy.layout={tensor: 2, expert: 1, expert_tensor: 4} policy.layout.pipeline=8",
        ["4 above tensor 2", "trains wrong", "expert_tensor=2"],
    ),
    ("more GPUs than there are", "cluster.nodes=4", ["policy 32 + engines 32", "at most 32", "cluster.nodes=8"]),
    (
        "pieces of nodes that hold no engine",
        "reference.layout={tensor: 2, expert: 2} reference.ranks=4 policy.ranks=4 policy.layout.expert=4 "
        "policy.layout.tensor=4 cluster.nodes=2 rollout.engines=1 cluster.gpu_memory_gib=1000 "
        "cluster.host_memory_gib=4000",
        ["cluster.nodes = 2: policy 4 + reference 4 + 1 engines of 8 GPUs", "give cluster.nodes=3"],
    ),
    ("an engine larger than a node", "rollout.tensor=12", ["cluster.gpus_per_node = 8", "rollout.tensor=8"]),
    (
        "a sync that cannot end in time",
        "weights.timeout_s=1 cluster.topology.nic_gb_s=2",
        ["weights.timeout_s = 1", "the planned sync takes 3.8 s", "give 8 or more"],
    ),
    # ---- sequences
    ("longer than the model", "rollout.max_prompt_tokens=60000", ["40960", "rollout.max_prompt_tokens=30000"]),
    # ---- values out of range
    (
        "no bucket",
        "weights.bucket_mib=0",
        [
            "weights.bucket_mib = 0.0: allowed is a number from 0.001 to 65536",
            "nearest that work: weights.bucket_mib=64;",
        ],
    ),
    (
        "no nodes",
        "cluster.nodes=0",
        ["cluster.nodes = 0: allowed is a whole number from 1 to 100000", "cluster.nodes=8"],
    ),
    (
        "the 30B on two nodes, without recomputation",
        "cluster.nodes=2 cluster.shared=true policy.ranks=16 rollout.engines=2 policy.recompute=none "
        "rollout.memory_fraction=0.35",
        [
            "--suggest searches further",
            "--suggest searches further",
            "policy.recompute=full rollout.memory_fraction=0.",
        ],
    ),
    ("less than no expert", "policy.layout.expert=-2", ["at least 1", "policy.layout.expert=8"]),
    (
        "ranks of a reference without a layout",
        "reference.ranks=4",
        ["reference.ranks = 4: it needs reference.layout; without one the policy's ranks are shared"],
    ),
    ("groups of one", "data.samples_per_prompt=1", ["at least 2", "or give algorithm.advantage=reinforce"]),
    (
        "generating ahead on GPUs that take turns",
        "cluster.nodes=4 cluster.shared=true asynchrony.mode=full algorithm.importance_cap=null",
        ["cluster.shared gives them the same GPUs", "cluster.shared=false residency.keep=null", "asynchrony.mode=off"],
    ),
    (
        "fewer GPUs than policy and engines need, where fewer of both do",
        "cluster.nodes=8 policy.ranks=64 rollout.engines=16",
        ["policy.ranks=32 rollout.engines=4"],
    ),
    # ---- settings dropped silently by other programs
    ("an unknown key", "policy.optimizer.betas=0.95", ["did you mean policy.optimizer.beta"]),
    ("an unknown model", "model.path=models/GPT-5", ["Qwen3-30B-A3B", "config.json"]),
]

ALONE = (
    "--suggest searches further",
    "give 8 or more",
    "give cluster.nodes=3",
    "or give algorithm.advantage=reinforce",
    "did you mean policy.optimizer.beta",
    "config.json",
    "reference.ranks = 4: it needs reference.layout; without one the policy's ranks are shared",
)
"""Fixes without settings to paste."""


def test_the_settings_that_are_spoilt_below_are_good(file: Path) -> None:
    dry_run.checked(compose(file))


def test_there_are_enough() -> None:
    assert len(IMPOSSIBLE) >= 20


@pytest.mark.parametrize(("spoilt", "says"), [case[1:] for case in IMPOSSIBLE], ids=[case[0] for case in IMPOSSIBLE])
def test_it_is_refused_with_a_mend_that_works(
    file: Path, spoilt: str, says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = split(spoilt)
    assert main(["--config", str(file), *overrides, "--dry-run"]) == 2
    out, line = capsys.readouterr()
    assert out == "" and line.count("\n") == 1
    assert [part for part in says if part not in line] == [], line
    _, separator, offered = line.rstrip("\n").partition("; nearest that work: ")
    assert "nothing near" not in line or not any(word in line for word in ("; give ", "needs ref", "allowed"))
    nodes = [int(n) for n in re.findall(r"cluster\.nodes=(\d+)", offered)]
    assert max(nodes, default=0) <= 4 * 65, "nobody has so many"
    assert bool(separator) == (says[-1] not in ALONE)
    for mend in offered.split("; or ") if separator else []:
        dry_run.checked(compose(file, [*overrides, *split(mend)]))


def split(text: str) -> list[str]:
    """Splits a text like `a=1 b={c: 2, d: 3}` into settings."""
    parts: list[str] = []
    for word in text.split():
        if "=" in word:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    return parts
