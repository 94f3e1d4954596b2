"""Proofs on a host with one GPU: `python -m benchmarks.gpu`, or `make gpu` (README.md)."""
