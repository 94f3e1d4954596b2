"""Data: preparation (`python -m skyrl_mega.data`), reading with every row checked, and the order of prompts."""

from skyrl_mega.data.order import PromptStream
from skyrl_mega.data.rows import Demonstration, check_files, load_demonstrations, load_prompts

__all__ = ["Demonstration", "PromptStream", "check_files", "load_demonstrations", "load_prompts"]
