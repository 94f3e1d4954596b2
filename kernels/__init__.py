"""Triton kernels, each with a torch reference; imported as `skyrl_mega.kernels`.

The public functions choose by device: the Triton kernel for CUDA tensors, the reference otherwise. Both give the same
bits, except for `linear_logprobs`, with another order of summation. Triton is imported only to launch a kernel.
"""
