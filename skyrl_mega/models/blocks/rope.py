"""Rotary positions (arXiv:2104.09864) and the scalings of their frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_mega.models.config_json import Hf, flag, integer, number, require, unsupported

ROPE_THETA = 10_000.0
"""Default base of rotary positions."""


def read_scaling(hf: Hf) -> tuple[str, Mapping[str, Any], float, Any]:
    """Returns the key with the description of the positions, `rope_parameters` (transformers 5) or `rope_scaling`
    (before), the description ({} without one), the base, and the kind of scaling ("default" without one).

    Raises:
        UserError: The description is no mapping, or the base is no positive number.
    """
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    values = hf.get(key) or {}
    if not isinstance(values, Mapping):
        raise unsupported(hf, key, "a mapping")
    bases = [keys for keys in (values, hf) if "rope_theta" in keys]
    base = number(bases[0], "rope_theta") if bases else ROPE_THETA
    return key, values, base, values.get("rope_type", values.get("type", "default"))


@dataclass(frozen=True)
class Yarn:
    """YaRN's scaling of rotary positions (arXiv:2309.00071). Field names as in config.json."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float | None = None
    """Weight of the length's logarithm in the factor of queries and keys; None: 0.1, and nothing for all dimensions."""
    mscale_all_dim: float | None = None
    truncate: bool = True
    """True if the bounds of the interpolated dimensions are rounded to whole numbers."""

    @classmethod
    def read(cls, hf: Hf, key: str) -> Yarn:
        """Returns the scaling of latent attention described by the mapping `key` of config.json, which is present.

        Raises:
            UserError: A value is missing or not supported: transformers, vLLM and megatron-core would compute different
                scalings.
        """
        values = {"beta_fast": 32, "beta_slow": 1, **hf[key]}
        for name in ("mscale", "mscale_all_dim"):
            if name not in values:  # each library then has a default of its own
                raise unsupported(hf, key, "a YaRN with mscale and mscale_all_dim above 0")
        for name, allowed in (("attention_factor", None), ("truncate", True)):
            require(values, name, allowed)
        return cls(
            number(values, "factor"),
            integer(values, "original_max_position_embeddings"),
            number(values, "beta_fast"),
            number(values, "beta_slow"),
            number(values, "mscale"),
            number(values, "mscale_all_dim"),
        )

    @classmethod
    def read_plain(cls, hf: Hf, key: str) -> Yarn:
        """Returns the scaling of grouped-query attention described by the mapping `key` of config.json, which is
        present.

        Raises:
            UserError: A value is missing or not supported. vLLM needs both betas, and reads no factor of attention.
        """
        values = {"truncate": True, **hf[key]}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            require(values, name, None)
        return cls(
            number(values, "factor"),
            integer(values, "original_max_position_embeddings"),
            number(values, "beta_fast"),
            number(values, "beta_slow"),
            truncate=flag(values, "truncate"),
        )

    def megatron_fields(self) -> dict[str, Any]:
        """Returns the fields of `megatron.config_classes.YarnConfig` for grouped-query attention."""
        return {
            "yarn_rotary_scaling_factor": self.factor,
            "yarn_original_max_position_embeddings": self.original_max_position_embeddings,
            "yarn_beta_fast": self.beta_fast,
            "yarn_beta_slow": self.beta_slow,
            "yarn_correction_range_round_to_int": self.truncate,
        }


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the base, the scaling of frequencies (`none`, `linear`, `llama3`, `yarn`), and the rotated
    part."""

    base: float
    scaling: str = "none"
    factor: float = 1.0
    part: float = 1.0
    """Fraction of a head's width, from its start, that is rotated."""
    yarn: Yarn | None = None
    """YaRN's values with the scaling `yarn`."""

    @classmethod
    def read(cls, hf: Hf, part: float | None = None, *, yarn: bool = False) -> Rope:
        """Returns the positions described by `rope_parameters` (transformers 5), or by `rope_theta` and `rope_scaling`
        (before).

        megatron-core 0.16 supports linear interpolation, and Llama 3's scaling with the constants of Llama 3.1. Without
        `rope_theta` the base is `ROPE_THETA`.

        Args:
            hf: Content of config.json.
            part: Default of `partial_rotary_factor`, the rotated fraction of a head; then no scaling is allowed. None:
                only 1 is allowed.
            yarn: True if the family's engine computes YaRN, and no other positions: YaRN is then required, and `part`
                must be None.

        Raises:
            UserError: The scaling or the fraction is not supported, or a value is no positive number.
        """
        key, values, base, kind = read_scaling(hf)
        if hf.get("rope_scaling") not in (None, {}, values):
            raise unsupported(hf, "rope_scaling", "the value of rope_parameters, or no value beside it")
        keys = values if "partial_rotary_factor" in values else {"partial_rotary_factor": part or 1.0, **hf}
        rotated = number(keys, "partial_rotary_factor")
        if rotated > 1 or (part is None and rotated != 1):
            raise unsupported(hf, key, f"a partial_rotary_factor of {'1' if part is None else 'at most 1'}")
        if yarn:
            if kind != "yarn":
                raise unsupported(hf, key, "rope_type yarn for this model_type")
            plain = Yarn.read_plain(hf, key)
            return cls(base, "yarn", plain.factor, yarn=plain)
        if kind == "default":
            return cls(base, part=rotated)
        if part is not None:
            raise unsupported(hf, key, "rope_type default for this model_type")
        if kind == "linear":
            return cls(base, "linear", number(values, "factor"))
        constants = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
        if kind == "llama3" and all(values.get(name) == value for name, value in constants.items()):
            return cls(base, "llama3", number(values, "factor"))
        allowed = ", ".join(f"{name} {value}" for name, value in constants.items())
        raise unsupported(hf, key, f"rope_type default, linear, or llama3 with {allowed}")

    def megatron_args(self) -> dict[str, Any]:
        """Returns the keyword arguments of megatron-core's `GPTModel` for these positions; YaRN's own values are not
        included (`Yarn.megatron_fields`)."""
        kind = "yarn" if self.yarn else "rope"
        args: dict[str, Any] = {"position_embedding_type": kind, "rotary_base": self.base}
        if self.part != 1.0:
            args["rotary_percent"] = self.part
        if self.scaling == "llama3":
            args |= {"rope_scaling": True, "rope_scaling_factor": self.factor}
        elif self.scaling == "linear":
            args["seq_len_interpolation_factor"] = self.factor
        return args
