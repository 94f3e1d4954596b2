"""Quantised checkpoints, described by `quantization_config` in config.json: block FP8 is read, and MXFP4 for families
published in MXFP4; others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.models.config_json import Hf

BLOCK = 128
"""Rows and columns of a block with a common scale (`kernels.block_fp8`)."""
SCALE_SUFFIX = "_scale_inv"
"""Ending of the name of a tensor's scales."""
MXFP4_BLOCK = 32
"""Numbers of MXFP4 with a common scale (`kernels.mxfp4`)."""
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""Endings of the names of the two tensors that hold a tensor in MXFP4."""
_SUPPORTED = f"block FP8 (quant_method fp8, weight_block_size [{BLOCK}, {BLOCK}])"
_FIX = "give a checkpoint in BF16, or in this FP8"


@dataclass(frozen=True)
class BlockFp8:
    """A checkpoint with matrices in E4M3 and a scale for every block of 128 × 128."""

    powers_of_two: bool = False
    """True if every scale is a power of two."""


def block_fp8(hf: Hf) -> BlockFp8 | None:
    """Returns the block FP8 described by `quantization_config` of config.json; None without quantisation, and for
    MXFP4.

    Raises:
        UserError: The checkpoint is quantised in another way; names the method and the reason.
    """
    given = hf.get("quantization_config")
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise _refused("", given, "it is no object with a quant_method")
    method = given.get("quant_method")
    if method == "mxfp4":
        return None
    if method != "fp8":
        raise _refused(".quant_method", method, f"only {_SUPPORTED} is read, no other quantised weights")
    if given.get("weight_block_size") != [BLOCK, BLOCK]:
        reason = (
            f"FP8 is read with a scale for every block of {BLOCK} × {BLOCK}, not for a tensor, channel or other block"
        )
        raise _refused(".weight_block_size", given.get("weight_block_size"), reason)
    if given.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refused(".fmt", given["fmt"], "FP8 is read as e4m3")
    if given.get("activation_scheme", "dynamic") != "dynamic":
        reason = "the files hold scales of activations, which training would not update; dynamic is supported"
        raise _refused(".activation_scheme", given["activation_scheme"], reason)
    scales = given.get("scale_fmt")
    if scales not in (None, "float", "ue8m0"):
        raise _refused(".scale_fmt", scales, "scales are read as numbers, or as powers of two (ue8m0)")
    return BlockFp8(powers_of_two=scales == "ue8m0")


def mxfp4(hf: Hf) -> bool:
    """Returns True if `quantization_config` of config.json describes MXFP4; False for any other value, also without the
    key."""
    given = hf.get("quantization_config")
    return isinstance(given, Mapping) and given.get("quant_method") == "mxfp4"


def check_quantisation(hf: Hf, *, in_mxfp4: bool) -> None:
    """Raises an error unless the project reads the checkpoint's quantisation; accepts a checkpoint without
    quantisation.

    Args:
        hf: Content of config.json.
        in_mxfp4: True for a family published in MXFP4.

    Raises:
        UserError: Names the unsupported method and the reason.
    """
    block_fp8(hf)
    if mxfp4(hf) and not in_mxfp4:
        raise _refused(".quant_method", "mxfp4", f"only {_SUPPORTED} is read for this model_type")


def _refused(part: str, value: object, reason: str) -> UserError:
    return UserError(f"quantization_config{part} is {shown(value)}: {reason}", key="config.json", fix=_FIX)
