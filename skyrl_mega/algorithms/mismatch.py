"""How far the engine's log-probs lie from the policy's, for the tokens that the engine drew."""

from __future__ import annotations

from torch import Tensor

from skyrl_mega.algorithms.kl import kl


def mismatch(engine_T: Tensor, policy_T: Tensor, mask_T: Tensor) -> dict[str, float]:
    """The mismatch of a step's tokens, both sides at the same weights.

    Args:
        engine_T: The engine's log-probs, natural log.
        policy_T: The policy's log-probs of the same tokens.
        mask_T: 1 where the policy (as engine) produced the token; other entries are not read.

    Returns:
        `mismatch/logprob_abs_mean` and `mismatch/logprob_abs_max` of |engine - policy|, and `mismatch/kl`, the k3
        estimate of KL(engine ‖ policy): the tokens are the engine's, so it is the sampling distribution. All 0
        without tokens.
    """
    chosen = mask_T.bool()
    engine, policy = engine_T[chosen].double(), policy_T[chosen].double()
    if engine.numel() == 0:
        return {"mismatch/logprob_abs_mean": 0.0, "mismatch/logprob_abs_max": 0.0, "mismatch/kl": 0.0}
    distance = (engine - policy).abs()
    return {
        "mismatch/logprob_abs_mean": distance.mean().item(),
        "mismatch/logprob_abs_max": distance.max().item(),
        "mismatch/kl": kl(engine, policy, "k3").mean().item(),
    }
