"""Untrusted code in a subprocess without network, files, neighbours or much of anything."""

from skyrl_mega.envs.sandbox.run import CONFINEMENTS, Limits, Outcome, Sandbox, confinements
from skyrl_mega.envs.sandbox.workspace import Workspace

__all__ = ["CONFINEMENTS", "Limits", "Outcome", "Sandbox", "Workspace", "confinements"]
