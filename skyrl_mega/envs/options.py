"""`skyrl_mega.config.options` under the import name for environments (docs/environments.md)."""

from skyrl_mega.config.options import (
    Option,
    choice,
    filled,
    group,
    mapping,
    number,
    switch,
    text,
    texts,
    whole,
)

__all__ = ["Option", "choice", "filled", "group", "mapping", "number", "switch", "text", "texts", "whole"]
