"""Hostile input of every kind, drawn from a seed: `python -m tests.fuzz --seconds 3600 --seed 1 --only config,parquet`.

A target draws a case that JSON can hold and feeds it. The case may end well or with the target's own errors, in one
line each; it may not take longer than its bound, leave anything behind, or earn another reward than it must. A case
that ends otherwise is kept in `cases/` and is a test from then on.
"""
