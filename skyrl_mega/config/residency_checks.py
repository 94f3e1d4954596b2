"""What is refused of `residency`."""

from __future__ import annotations

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.residency import PARTS
from skyrl_mega.config.schema import Config


def check_residency(c: Config) -> None:
    """Raises UserError for a part that there is not."""
    unknown = [part for part in c.residency.keep or () if part not in PARTS]
    if unknown:
        raise UserError(
            f"residency.keep = {unknown[0]}: no such part; allowed are {', '.join(PARTS)}, [] for none, null for all"
        )
