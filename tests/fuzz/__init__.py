"""Hostile input of every kind, drawn from a seed: `python -m tests.fuzz --seconds 3600 --seed 1 --only config,parquet`.

A target has `make(random)`, which draws a case that JSON can hold, and `run(case, folder)`, which may end well or with
the target's own errors and nothing else. A case that ends otherwise is kept in `cases/` and is a test from then on.
"""
