"""Settings of full-sized runs, for tests of messages before the start of a run."""

from __future__ import annotations

from pathlib import Path

SETTINGS = """\
run: {name: large}
cluster: {nodes: 8, device: cuda}
model: {path: models/Qwen3-30B-A3B}
policy: {ranks: 32, layout: {tensor: 2, expert: 8}, recompute: full}
rollout:
  engines: 4
  tensor: 8
  max_turns: 4
  max_prompt_tokens: 4096
  max_response_tokens: 4096
  sampling: {max_tokens: 500}
algorithm: {kl: {coefficient: 0.001}}
data: {train: [train.parquet], prompts_per_step: 512, mini_batch_prompts: 256, samples_per_prompt: 5}
"""

HUGE = [
    "model.path=models/Qwen3-235B-A22B",
    "cluster.nodes=64",
    "policy.ranks=256",
    "policy.layout={tensor: 4, pipeline: 8, expert: 16, first_stage_layers: 11, last_stage_layers: 11}",
    "rollout.engines=32",
    "rollout.memory_fraction=0.9",
]
"""235B, 256 ranks and 32 engines of 8."""


def write(folder: Path) -> Path:
    """Writes settings of Qwen3-30B-A3B on 32 GPUs and four engines on 32 other GPUs; model and data do not exist."""
    file = folder / "large.yaml"
    file.write_text(SETTINGS)
    return file
