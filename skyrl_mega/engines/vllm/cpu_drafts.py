"""A repair of vLLM's check of draft tokens on a CPU.

For draft tokens vLLM repeats temperature, top-k and top-p of each sequence. Its kernel for a CPU (`expand_kernel_impl`)
rounds these numbers to whole numbers, and writes them into a copy: the check then uses undefined memory as temperature.
"""

from __future__ import annotations

from torch import Tensor


def expand(values: Tensor, ends: Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """Returns the value of each sequence repeated for its draft tokens, [tokens], as `expand_batch_to_tokens` of vLLM's
    rejection sampler does on a GPU.

    Args:
        values: A value for each sequence, [N].
        ends: Cumulative numbers of draft tokens, [N].
        tokens: Number of all draft tokens.
        replace_from: A value to be replaced.
        replace_to: The value to use instead.
    """
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    replaced = values.masked_fill(values == replace_from, replace_to)
    return replaced.repeat_interleave(counts, output_size=tokens)


def repair_expansion() -> None:
    """Makes vLLM's rejection sampler in this process use `expand`."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand
