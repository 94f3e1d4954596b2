"""Environments in the form of SkyRL's public examples; they import `skyrl_gym` alone."""
