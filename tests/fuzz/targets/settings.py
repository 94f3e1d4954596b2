"""Input written by a person: configuration files, arguments, options of environments."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose, dump
from skyrl_mega.config.keys import keys
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import registry
from tests.fuzz.target import Target
from tests.fuzz.values import packed, real, spoilt, unpacked, value

FILE = b"""\
defaults: [_self_]
run: {name: a, seed: 1, steps: 3}
model: {path: m}
policy: {ranks: 4, layout: {tensor: 2}}
rollout: {sampling: {stop: ["</answer>"]}, options: {block_size: 16}}
data: {train: [t.parquet], prompts_per_step: 8}
environment: {options: {math: {tail: 5}}}
"""


def _config(random: Random) -> Any:
    arguments = []
    for _ in range(random.randrange(3)):
        shown = random.choice((str, json.dumps))(value(random))
        arguments.append(f"{random.choice((*keys(), 'x.y', '', '..'))}={shown}")
    return {"file": packed(FILE if random.random() < 0.3 else spoilt(random, FILE)), "arguments": arguments}


def _run_config(case: Any, folder: Path) -> None:
    (folder / "it.yaml").write_bytes(unpacked(case["file"]))
    config = compose(folder / "it.yaml", case["arguments"])
    check(config, planned=True)
    registry.check(config.environment)
    (folder / "again.yaml").write_text(dump(config))
    assert compose(folder / "again.yaml") == config


def _options(random: Random) -> Any:
    name = random.choice(list(registry.BUILT_IN))
    declared = list(registry.resolve(name, EnvironmentConfig()).OPTIONS or {})
    return {name: {random.choice([*declared, "x"]): value(random) for _ in range(random.randrange(1, 4))}}


def _run_options(case: Any, folder: Path) -> None:
    registry.check(EnvironmentConfig(options=real(case)))


TARGETS = {"config": Target(_config, _run_config), "options": Target(_options, _run_options)}
