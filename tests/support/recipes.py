"""The recipes of `configs/`, for parametrised tests."""

from __future__ import annotations

from tests.conftest import ROOT

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
"""The files of all recipes."""
GPU_RECIPES = [file for file in RECIPES if not file.stem.endswith("_cpu") and file.stem != "quickstart"]
"""Recipes for GPUs, by name: composing all files takes a minute, and each of pytest's workers collects the tests."""
