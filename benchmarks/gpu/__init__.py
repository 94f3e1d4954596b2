"""Proofs on a machine with one GPU: `python -m benchmarks.gpu`, or `make gpu` (README.md)."""
