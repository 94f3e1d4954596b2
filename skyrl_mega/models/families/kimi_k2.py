"""Kimi-K2 (arXiv:2507.20534): DeepSeek-V3's layers, with more experts, fewer heads and no groups."""

from __future__ import annotations

from skyrl_mega.models.families import deepseek_v3

CLASS = deepseek_v3.CLASS
describe = deepseek_v3.describe
small = deepseek_v3.small
