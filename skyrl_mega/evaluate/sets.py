"""The input of an evaluation: named sets of prompts, and the samples of each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config, EnvironmentConfig
from skyrl_mega.data.rows import load_prompts
from skyrl_mega.data.sources import set_names, source_of
from skyrl_mega.envs import registry
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent.renderer import Renderer

NAME = re.compile(r"[\w+-][\w.+-]*")


@dataclass(frozen=True)
class PromptSet:
    """A named set of prompts, scored together."""

    name: str
    """The set's name, also used for file names."""
    prompts: list[Prompt]
    left_out: int = 0
    """Number of prompts longer than `rollout.max_prompt_tokens`."""


@dataclass(frozen=True)
class SampleTask:
    """A sample to generate."""

    set: str
    """Name of the set."""
    prompt: Prompt
    sample: int
    """Number of the sample among the samples of the prompt, from 0."""
    name: str
    """Seed name from run seed, set, row and sample, so that a sample does not depend on earlier samples."""


def load_sets(config: Config, given: Sequence[str]) -> list[PromptSet]:
    """Returns the sets of an evaluation, each cut to its first `evaluation.limit` prompts; reads and checks the files.

    Args:
        config: The settings.
        given: `NAME=file.parquet`: all rows of the file form the set NAME. `file.parquet`: rows are split into sets by
            `data_source`. If empty, `data.eval` is split the same way.

    Raises:
        UserError: There is no set, a file is missing, a name is invalid or repeated, or a row is invalid.
    """
    if not given and not config.data.eval:
        raise UserError("data.eval is empty: allowed is a list of parquet files", fix="or give --set NAME=file.parquet")
    sets: dict[str, list[Prompt]] = {}
    sources: list[tuple[str, list[str], str]] = [_parse(text) for text in given] or [
        ("", config.data.eval, "data.eval")
    ]
    for name, files, key in sources:
        prompts = load_prompts(files, config.environment, key=key)
        for set_name, set_prompts in ({name: prompts} if name else _by_source(prompts)).items():
            if set_name in sets:
                raise UserError(
                    f"another input has a set of the same name {set_name}",
                    key=key,
                    fix=f"rename it: --set NAME={files[0]}",
                )
            sets[set_name] = set_prompts
    return [PromptSet(name, prompts[: config.evaluation.limit]) for name, prompts in sets.items()]


def drop_long_prompts(
    sets: Sequence[PromptSet], chat: Renderer, longest: int, environments: EnvironmentConfig | None = None
) -> list[PromptSet]:
    """Returns the sets without prompts of more than `longest` tokens; `left_out` is the number of removed prompts. The
    given sets stay unchanged.

    Args:
        sets: The sets.
        chat: Tokenizer and chat template.
        longest: `rollout.max_prompt_tokens`.
        environments: The environment settings: a prompt lists the environment's tools. None takes the defaults.

    Raises:
        UserError: A set would be empty, an environment is unknown, or the template rejects a prompt (`TemplateError`).
    """
    kept, config = [], environments or EnvironmentConfig()
    for s in sets:
        tools = {name: registry.tools(name, config) for name in {p.env_class for p in s.prompts}}
        place = f"the set {s.name}, row"
        prompts = [
            p for p in s.prompts if chat.prompt(p.messages, f"{place} {p.uid}", tools[p.env_class], longest) is not None
        ]
        if not prompts:
            raise UserError(
                f"all {len(s.prompts)} prompts of the set {s.name} are longer; give a larger number",
                key="rollout.max_prompt_tokens",
                value=longest,
            )
        kept.append(replace(s, prompts=prompts, left_out=len(s.prompts) - len(prompts)))
    return kept


def sample_tasks(sets: Sequence[PromptSet], samples: int, seed: int) -> Iterator[SampleTask]:
    """Yields every sample of every prompt, set by set, prompts in order, samples from 0; samples of the same prompt
    follow each other to share the engine's cached prefix.

    Args:
        sets: The sets.
        samples: Samples per prompt.
        seed: Seed of all samples, part of each sample's name.
    """
    for s in sets:
        for prompt in s.prompts:
            for sample in range(samples):
                yield SampleTask(s.name, prompt, sample, f"{seed}/evaluate/{s.name}/{prompt.uid}/{sample}")


def _parse(text: str) -> tuple[str, list[str], str]:
    name, sign, file = text.partition("=")
    if not sign:
        name, file = "", text
    elif not NAME.fullmatch(name):
        raise UserError("allowed is NAME=file.parquet, NAME of letters, digits and . _ + -", key="--set", value=text)
    if not Path(file).is_file():
        raise UserError(f"{file} does not exist; allowed is a parquet file", key="--set", value=text)
    return name, [file], f"--set {text}"


def _by_source(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    names = set_names(map(source_of, prompts), r"\w.+-")
    parts: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        parts[names[source_of(prompt)]].append(prompt)
    return dict(parts)
