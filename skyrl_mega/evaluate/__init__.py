"""Scores of a model on several sets, beside published ones: `python -m skyrl_mega.evaluate`."""
