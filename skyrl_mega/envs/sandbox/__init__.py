"""Sandbox for untrusted code: a subprocess without network, host files or access to other processes."""

from skyrl_mega.envs.sandbox.guarantees import CONFINEMENTS
from skyrl_mega.envs.sandbox.run import CommandLimits, Sandbox, SandboxResult, confinements
from skyrl_mega.envs.sandbox.workspace import Workspace

__all__ = ["CONFINEMENTS", "CommandLimits", "Sandbox", "SandboxResult", "Workspace", "confinements"]
