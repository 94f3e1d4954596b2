"""Prefixes shared by sequences of a micro-batch, such as the prompt of a group's samples.

Under a causal mask the hidden states of first tokens depend on these tokens alone. So equal first tokens pass through
the layers once (Prefix Grouper, arXiv:2506.05433), and log-probs and gradients stay the same but for rounding. A
sequence keeps all tokens that predict a counted token, of equal tokens too.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from skyrl_mega.models.routes import COLUMN
from skyrl_mega.trajectories.sequences import Sequences


class SharedPrefix(NamedTuple):
    """First tokens of a sequence that another sequence has too."""

    sequence: int
    """Number of the sequence that leaves the tokens out."""
    source: int
    """Number of the other sequence, which may itself leave first tokens out."""
    tokens: int
    """Number of these tokens, at least 1."""


def shared_prefixes(batch: Sequences) -> list[SharedPrefix]:
    """Returns the longest prefix that each sequence may leave out, in an order in which a sequence's source comes
    before the sequence; [] without common prefixes.

    Counted tokens are those with a weight (column `weights`). Without the column all tokens count, and nothing is
    shared. If the batch has routes to replay, sequences without routes do not take part.
    """
    if "weights" not in batch:
        return []
    takes_part = torch.ones(len(batch), dtype=torch.bool)
    if COLUMN in batch:
        takes_part = batch[COLUMN][batch.starts.clamp(max=len(batch.tokens) - 1)].flatten(1).any(1)
    tokens, weights = (values.split(batch.lengths.tolist()) for values in (batch.tokens, batch["weights"]))
    most = [_before_first_counted(of_tokens) for of_tokens in weights]
    contents = [ids.numpy().tobytes() for ids in tokens]
    # Sorted by content, no earlier sequence has more in common with a sequence than the one just before it.
    order = sorted(takes_part.nonzero()[:, 0].tolist(), key=contents.__getitem__)
    shared = []
    for source, sequence in pairwise(order):
        common = _common(tokens[source], tokens[sequence], most[sequence])
        if common > 0:
            shared.append(SharedPrefix(sequence, source, common))
    return shared


def common_with_previous(batch: Sequences) -> Tensor:
    """Returns int64 [N]: the number of first tokens that each sequence may leave out if the sequence before it is in
    the same micro-batch; 0 for the first. See `shared_prefixes` for the column `weights`."""
    common = torch.zeros(len(batch), dtype=torch.int64)
    if "weights" in batch:
        tokens, weights = (values.split(batch.lengths.tolist()) for values in (batch.tokens, batch["weights"]))
        for i in range(1, len(batch)):
            common[i] = _common(tokens[i - 1], tokens[i], _before_first_counted(weights[i]))
    return common


def _before_first_counted(weights: Tensor) -> int:
    """Returns the number of first tokens that predict no counted token, one token less than the whole sequence at
    most."""
    counted = weights.nonzero()
    return (int(counted[0]) if len(counted) else len(weights)) - 1


def _common(first: Tensor, second: Tensor, most: int) -> int:
    """Returns the number of equal tokens at the beginning of two sequences, at most `most`."""
    most = max(0, min(most, len(first)))
    differs = torch.ne(first[:most], second[:most]).nonzero()
    return int(differs[0]) if len(differs) else most
