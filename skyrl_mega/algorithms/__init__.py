"""From rewards to a loss: pure functions on tensors, independent of Megatron, vLLM and Ray."""
