"""The rows of `benchmarks.learning_table`: every advantage with PPO's loss, every loss with GRPO's advantages, and
related settings. Names come from the registries; a new name automatically becomes a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from skyrl_mega.algorithms.advantages import ADVANTAGES
from skyrl_mega.algorithms.losses import LOSSES
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config

RECIPE = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
FOLDER = "runs/learning_table"
START = f"{FOLDER}/start"
"""Hugging Face directory with the initial weights of every run."""
START_SEED = 0
"""Seed of the model, the warm-up and the data, shared by all seeds."""
STEPS = 16
SAMPLES = 4
"""Samples per held-out prompt."""
COMMON = (
    "algorithm=grpo",
    "algorithm.kl.coefficient=0",
    "algorithm.loss_mean=tokens",
    "data.prompts_per_step=32",
    "data.mini_batch_prompts=16",
    "data.samples_per_prompt=8",
    "policy.optimizer.lr=2.5e-4",
    "policy.optimizer.warmup_steps=3",
    "evaluation.every=1000",  # the last step is always evaluated
    "evaluation.before=false",
    "evaluation.limit=250",
    f"evaluation.samples={SAMPLES}",
    "checkpoint.every=0",
    "run.patience=null",
    "telemetry.trackers=[jsonl]",
    "telemetry.trajectories_every=0",
    f"run.directory={FOLDER}",
)
"""Settings of every row over the recipe: GRPO with PPO's clip, without KL and without dynamic sampling. A step takes
two mini-batches: in the second, ratios differ from 1."""
NEEDS: Mapping[str, tuple[str, ...]] = {
    "gae": (
        "algorithm.whiten=batch",
        "critic.ranks=1",
        "critic.layout.expert=1",
        "critic.optimizer.lr=5e-4",
        "critic.optimizer.beta2=0.95",
    )
}
"""Name of an advantage or a loss → settings needed."""
KL = ("algorithm.kl.coefficient=0.02", f"reference.path={START}")
WARMUP = 550
"""Supervised steps of the start, as in the recipe."""


@dataclass(frozen=True)
class Row:
    """A way to train."""

    name: str
    kind: str
    """Heading of the table."""
    settings: tuple[str, ...]
    """Settings over `COMMON`."""

    def config(self, seed: int, steps: int) -> Config:
        """Returns all settings of the row's run. The seed determines the order of prompts and the samples."""
        fixed = (f"run.seed={START_SEED}", "run.name=session", f"run.steps={steps}", "warmup.steps=0")
        config = compose(RECIPE, [*COMMON, *fixed, *self.settings])
        return replace(config, run=replace(config.run, seed=seed))


EXTRAS = (
    Row("dapo", "recipes", ("algorithm=dapo", "algorithm.loss_mean=tokens")),
    Row(
        "dr_grpo",
        "recipes",
        ("algorithm.normalize=false", "algorithm.loss_mean=constant", "algorithm.loss_mean_length=8"),
    ),
    Row("mean of sequences", "means", ("algorithm.loss_mean=sequences",)),
    Row("mean of prompts", "means", ("algorithm.loss_mean=prompts",)),
    Row("kl k3", "KL to the start", (*KL, "algorithm.kl.estimator=k3")),
    Row("kl k3 unbiased", "KL to the start", (*KL, "algorithm.kl.estimator=k3", "algorithm.kl.unbiased=true")),
    Row("kl k3+", "KL to the start", (*KL, "algorithm.kl.estimator=k3+")),
    Row("tis", "the engine's log-probs", ("algorithm.importance_cap=2",)),
    Row(
        "icepop",
        "the engine's log-probs",
        ("algorithm.importance_cap=5", "algorithm.importance_floor=0.5", "algorithm.importance_outside=mask"),
    ),
    Row("ratios to the engine", "the engine's log-probs", ("algorithm.old_logprobs=engine",)),
)
"""Rows beyond the names of the registries."""


def rows() -> dict[str, Row]:
    """Returns all rows by name, in the order of the table. The row `grpo` is GRPO's advantages with PPO's loss."""
    advantages = [Row(n, "advantages, with ppo", (f"algorithm.advantage={n}", *NEEDS.get(n, ()))) for n in ADVANTAGES]
    losses = [Row(n, "losses, with grpo", (f"algorithm.loss={n}", *NEEDS.get(n, ()))) for n in LOSSES if n != "ppo"]
    return {row.name: row for row in (*advantages, *losses, *EXTRAS)}
