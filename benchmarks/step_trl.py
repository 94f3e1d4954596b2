"""The peer of `benchmarks.step`: TRL's GRPOTrainer on a CPU, run by an interpreter of TRL's environment.

    PYTHON -P benchmarks/step_trl.py FILE.json

FILE.json holds the fields of `benchmarks.step.Case` shared by both sides. The last line of the output is JSON: seconds
and CPU seconds of each step, generation to optimizer step, and TRL's version. Nothing of `skyrl_mega` is imported here.

Settings of TRL, on two cores: a single process with both cores, float32, no gradient checkpointing (the default is on),
no logging or saving, generation by transformers for the whole batch at once, an optimizer step per generation (hence no
separate log-prob pass), and no load-balancing loss (this project's run uses none either).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Steps(TrainerCallback):  # type: ignore[misc]
    """A callback recording the time and the CPU time at the ends of steps."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Records the begin of the first step."""
        self.ends.append((time.perf_counter(), time.process_time()))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Records the end of an optimizer step."""
        self.ends.append((time.perf_counter(), time.process_time()))


def parity(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Returns 1 if the sum of the letters' code points is odd, as in `benchmarks.fault_env.ParityEnv`."""
    return [float(sum(map(ord, answer[0]["content"])) % 2) for answer in completions]


def train(case: dict[str, Any]) -> list[tuple[float, float]]:
    """Trains; returns seconds and CPU seconds of each step."""
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.pad_token  # required by TRL; `min_new_tokens` rules it out
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
    return [(end - start, cpu - cpu_start) for (start, cpu_start), (end, cpu) in pairwise(steps.ends)]


if __name__ == "__main__":
    seconds, cpu_seconds = zip(*train(json.loads(Path(sys.argv[1]).read_text())), strict=True)
    versions = {name: version(name) for name in ("trl", "transformers")}
    print(json.dumps({**versions, "seconds": seconds, "cpu_seconds": cpu_seconds}))
