"""Triton kernels with a torch reference each; imported as `skyrl_mega.kernels`.

The public functions choose by device: a CUDA tensor goes to the Triton kernel, any other to the reference. Both give
the same bits, but for `linear_logprobs`, where sums have another order. Triton is imported only when a kernel is
launched.
"""
