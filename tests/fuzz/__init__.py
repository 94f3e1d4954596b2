"""Hostile input of every kind, generated from a seed.

Run `python -m tests.fuzz --seconds 3600 --seed 1 --only config,parquet`. A target generates a JSON-compatible case and
feeds the case to a reader or judge. A case may succeed or end with an error of the target, in a single line. A case
fails by exceeding its time limit, leaving anything behind, or earning a wrong reward. Failed cases are kept in `cases/`
and become tests.
"""
