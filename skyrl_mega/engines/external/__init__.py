"""Engines outside of the run: inference servers reached over HTTP, or by a class of the user (docs/endpoints.md)."""
