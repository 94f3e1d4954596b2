"""Data: preparing it (`python -m skyrl_mega.data`), reading it with every row checked, and the order of its prompts."""

from skyrl_mega.data.order import PromptStream
from skyrl_mega.data.rows import Demonstration, check_files, load_demonstrations, load_prompts

__all__ = ["Demonstration", "PromptStream", "check_files", "load_demonstrations", "load_prompts"]
