"""RL post-training for Mixture-of-Experts language models on multi-node GPU clusters."""

__version__ = "0.1.0"
