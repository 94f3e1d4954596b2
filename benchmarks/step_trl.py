"""The peer of `benchmarks.step`: TRL's GRPOTrainer on a CPU, run by an interpreter of TRL's own environment.

    PYTHON -P benchmarks/step_trl.py FILE.json

FILE.json has the fields of `benchmarks.step.Case` that both sides share. The last line of the output is JSON: seconds
of each step, generation to optimizer step, and TRL's version. Nothing of `skyrl_mega` is imported here.

TRL is given, on two cores: one process with both cores, float32, no gradient checkpointing
(its default is on), no logging or saving, generation by transformers for the whole batch at once, one optimizer step
for each generation, hence no separate log-prob pass, and no load-balancing loss (ours has none either).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Steps(TrainerCallback):  # type: ignore[misc]
    """When steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first step begins."""
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """An optimizer step is done."""
        self.ends.append(time.perf_counter())


def parity(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """1 where the sum of the letters' numbers is odd, as `benchmarks.fault_env.ParityEnv` has it."""
    return [float(sum(map(ord, answer[0]["content"])) % 2) for answer in completions]


def train(case: dict[str, Any]) -> list[float]:
    """Takes the steps; seconds of each."""
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.pad_token  # it wants one; `min_new_tokens` rules it out
    count = case["prompts"] * case["samples"]
    prompts = [[{"role": "user", "content": text}] for text in case["questions"]]
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            model_init_kwargs={"dtype": "float32", **case["trl_model"]},
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            per_device_train_batch_size=case["trl_micro"],
            gradient_accumulation_steps=count // case["trl_micro"],
            num_generations=case["samples"],
            max_completion_length=case["length"],
            generation_kwargs={"min_new_tokens": case["length"]},
            temperature=1.0,
            beta=0.0,
            router_aux_loss_coef=0.0,
            max_steps=case["steps"],
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            case["model"],
            reward_funcs=parity,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[steps],
        )
        trainer.train()
    return [end - start for start, end in zip(steps.ends, steps.ends[1:], strict=False)]


if __name__ == "__main__":
    taken = train(json.loads(Path(sys.argv[1]).read_text()))
    print(json.dumps({"trl": version("trl"), "transformers": version("transformers"), "seconds": taken}))
