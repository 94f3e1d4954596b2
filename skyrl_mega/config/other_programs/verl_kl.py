"""verl's names of the estimates of KL, in the loss and in the reward.

A `+` at the end gives an estimate the gradient of k2. What is taken from a reward has no gradient, so that it changes
nothing there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from skyrl_mega.config.other_programs.entry import Entry, none, several, to

_KEY = "algorithm.kl.estimator"
_NO_GRADIENT = "with where=reward, where the + changes nothing"
_OF_ALL_TOKENS = none(f"{_KEY} is of the token that was drawn")
_PLAIN: Mapping[str, Entry] = {
    **several(to(f"{_KEY}=k1"), "kl k1"),
    **several(to(f"{_KEY}=k2"), "mse k2"),
    **several(to(f"{_KEY}=k3"), "low_var_kl k3"),
    "abs": to(f"{_KEY}=abs"),
    "full": _OF_ALL_TOKENS,
}

IN_LOSS: Mapping[str, Entry] = {
    **_PLAIN,
    **several(to(f"{_KEY}=k3+"), "low_var_kl+ k3+"),
    **several(to(f"{_KEY}=k2"), "mse+ k2+"),
    **several(to(f"{_KEY}=k2", note="its gradient is k2's; policy/kl then shows k2"), "kl+ k1+ abs+"),
    "full+": _OF_ALL_TOKENS,
}
"""Of `kl_loss_type`: its value → what it is here."""

IN_REWARD: Mapping[str, Entry] = {
    **{theirs: replace(entry, note=entry.note or "with where=reward") for theirs, entry in _PLAIN.items()},
    **{f"{theirs}+": replace(entry, note=entry.note or _NO_GRADIENT) for theirs, entry in _PLAIN.items()},
}
"""Of `kl_penalty`: its value → what it is here."""
