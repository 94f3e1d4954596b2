"""Environments: the contract, the registry, the built-in environments and the preparation of their data."""

from skyrl_mega.envs.agent import AgentEndpoint, AgentEnv, AgentStopped
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Message
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.envs.registry import make
from skyrl_mega.envs.tools import Tool, ToolEnv, ToolError

__all__ = [
    "AgentEndpoint",
    "AgentEnv",
    "AgentStopped",
    "BaseTextEnv",
    "BaseTextEnvStepOutput",
    "InfrastructureFault",
    "Message",
    "Prompt",
    "Tool",
    "ToolEnv",
    "ToolError",
    "make",
]
