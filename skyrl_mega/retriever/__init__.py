"""Retrieval: an index over passages, an HTTP service for searches, and its client."""

from skyrl_mega.retriever.client import Client, Hit, RetrievalError

__all__ = ["Client", "Hit", "RetrievalError"]
