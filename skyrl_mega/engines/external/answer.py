"""The answer of a server outside of the run to a request: nothing in it is believed without a check."""

from __future__ import annotations

from array import array
from itertools import pairwise

from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.engines.external.server import NewTokens, ServerGone

RISE = 1e-3
"""Largest log-prob of a token above 0, from rounding."""
LOWEST = -1e4
"""Smallest log-prob of a sampled token; float32 draws none below about -104."""
FREE = 2
"""Tokens below its maximum length at which a server may end a request: SGLang keeps two free."""
LONGEST_VALUE = 60
"""Characters of a server's value in a message."""
LONGEST_TEXT = 300
"""Characters of a server's text in a message."""


class ServerAnswer:
    """The tokens of a request so far, checked as they come.

    Args:
        request: The request.
        vocab: Number of token ids.
        max_length: Maximum length of a sequence.
    """

    def __init__(self, request: Request, vocab: int, max_length: int) -> None:
        self.request, self.vocab, self.max_length = request, vocab, max_length
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[tuple[int, int]] = []
        self.oldest = 0
        """Version delivered last when the request was sent."""
        self.finish: str | None = None
        self.stated = False
        """True if the server stated the version of each token."""

    def add(self, chunk: NewTokens, version: int) -> None:
        """Appends a chunk of new tokens.

        Args:
            chunk: The new tokens, with log-probs and perhaps the end of the request.
            version: Version of these tokens, unless the chunk itself states versions.

        Raises:
            ServerGone: A value is impossible, the end is neither `stop` nor `length`, tokens come after the end, or
                there are more tokens than requested. Nothing of the chunk is then added.
        """
        if len(chunk.tokens) != len(chunk.logprobs):
            raise ServerGone(f"{len(chunk.tokens)} tokens came with {len(chunk.logprobs)} log-probs")
        if chunk.tokens and self.finish is not None:
            raise ServerGone("tokens came after the end of a request")
        for token, logprob in zip(chunk.tokens, chunk.logprobs, strict=True):
            if type(token) is not int or not 0 <= token < self.vocab:
                raise ServerGone(f"token {_short(token)} is not in the vocabulary of {self.vocab}")
            if not isinstance(logprob, int | float) or not LOWEST <= logprob <= RISE:  # False for NaN
                raise ServerGone(f"{_short(logprob)} is no log-prob")
        if chunk.finish not in (None, "stop", "length"):
            raise ServerGone(f"a request ended with {_short(chunk.finish)}, not with stop or length")
        if len(self.tokens) + len(chunk.tokens) > self.request.max_tokens:
            raise ServerGone(f"more than {self.request.max_tokens} tokens came")
        if chunk.versions:
            self.stated, self.versions = True, [(stated, start) for stated, start in chunk.versions]
        elif chunk.tokens:
            self.stated = False
            if not self.versions or self.versions[-1][0] != version:
                self.versions.append((version, len(self.tokens)))
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.finish = self.finish or chunk.finish

    def problem(self, newest: int) -> str | None:
        """Returns a phrase about the first fault of a complete answer, to follow the server's name; None for an answer
        without a fault. Checked are the reason for the end, the number of tokens, and the stated versions.

        Args:
            newest: Version delivered last.
        """
        count = len(self.tokens)
        if self.finish is None:
            return "ended a request without a reason"
        if not count:
            return None if self.finish == "timeout" else f"ended a request with {self.finish} and no token"
        whole = min(self.request.max_tokens, self.max_length - FREE - len(self.request.tokens))
        if self.finish == "length" and count < whole:
            return f"ended a request with length after {count} of {self.request.max_tokens} tokens"
        return self._version_problem(newest)

    def _version_problem(self, newest: int) -> str | None:
        """Returns what is wrong with the versions of the tokens: each must have been delivered since the request was
        sent, the first must begin with the first token, and later ones must begin at later tokens."""
        shown = _short(self.versions)
        if not all(type(value) is int for pair in self.versions for value in pair):
            return f"states versions {shown}, which are no numbers"
        versions, starts = zip(*self.versions, strict=True)
        for version in versions:
            if not self.oldest <= version <= newest:
                delivered = f"{newest}" if self.oldest == newest else f"{self.oldest} to {newest}"
                return f"states version {_short(version)}, not {delivered}"
        rising = all(a < b for a, b in pairwise(starts)) and all(a <= b for a, b in pairwise(versions))
        if starts[0] != 0 or starts[-1] >= len(self.tokens) or not rising:
            return f"states versions {shown} for {len(self.tokens)} tokens"
        return None

    def completion(self) -> Completion:
        """Returns the answer as a completion. Call only if `problem` returned None."""
        tokens, logprobs = array("i", self.tokens), array("f", self.logprobs)
        versions = tuple(self.versions) if self.tokens else ()
        return Completion(self.request.id, tokens, logprobs, str(self.finish), versions)


def _short(value: object) -> str:
    """Returns the start of a server's value as text."""
    return ascii(value)[:LONGEST_VALUE]
