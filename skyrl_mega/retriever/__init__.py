"""Retrieval: an index over passages, an HTTP service for searches, and its client."""

from skyrl_mega.retriever.client import Hit, RetrievalError, SearchClient

__all__ = ["Hit", "RetrievalError", "SearchClient"]
