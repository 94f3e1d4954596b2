"""AIME and DAPO-Math with DAPO's scoring: ±1, integers, the `Answer:` line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from skyrl_mega.envs.math.env import MathEnv
from skyrl_mega.envs.options import Option, number, switch


class AimeEnv(MathEnv):
    """`MathEnv` with DAPO's settings as defaults: rewards 1 and −1, answers compared as numbers or text, without
    algebra."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **MathEnv.OPTIONS,
        "wrong": number(-1.0, "reward of a wrong answer, or of none"),
        "algebra": switch(False, "compares expressions beyond their text"),
    }
