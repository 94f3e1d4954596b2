"""vLLM engines and the agent loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from skyrl_mega.config.schema.fields import MOST, at_least, between, one_of


@dataclass
class SamplingConfig:
    """How tokens are drawn."""

    temperature: float = at_least(0, 1.0)
    """Softmax temperature; 0 is greedy."""
    top_p: float = between(0, 1, 1.0)
    """Nucleus mass."""
    top_k: int = at_least(-1, -1)
    """Most likely tokens kept; -1 keeps all."""
    max_tokens: int = at_least(1, 1024)
    """Tokens generated in one turn at most."""
    stop: list[str] = field(default_factory=list, metadata={"empty": False})
    """Strings that end a turn; they stay in the output."""


@dataclass
class RolloutConfig:
    """vLLM engines and the agent loop."""

    engines: int = between(1, MOST, 1)
    """Engines, each in an actor of its own."""
    tensor: int = at_least(1, 1)
    """Tensor parallel size of one engine."""
    memory_fraction: float = between(0, 1, 0.6)
    """Share of a GPU's memory that vLLM may take (CUDA)."""
    kv_cache_gib: float = between(0.01, 10_000, 1.0)
    """KV cache of one engine worker (CPU)."""
    max_length: Optional[int] = at_least(1, None)
    """Longest sequence of an engine; None takes prompt + response limits."""
    max_prompt_tokens: int = at_least(1, 2048)
    """Longer prompts are left out of the data, counted."""
    max_input_tokens: Optional[int] = at_least(1, None)
    """Tokens before a turn at most: where there are more, the trajectory ends before it. None lets a turn begin while
    `max_length` and `max_response_tokens` leave room for one token."""
    max_response_tokens: Optional[int] = at_least(1, None)
    """Tokens after the prompt over all turns; None takes turns · sampling.max_tokens."""
    max_turns: int = at_least(1, 1)
    """Turns of one trajectory at most."""
    concurrency: int = between(1, MOST, 256)
    """Sequences that one engine runs at once at most. It is given no more requests than fill its KV cache twice, were
    all as long as they may become."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How training samples are drawn."""
    conversation: str = one_of("messages", "one_message")
    """How several turns become tokens. messages: each turn is a message of the assistant, each observation one of its
    own role, as the chat template writes them. one_message: all turns and observations are inside one message of the
    assistant, observations as they are, without the template; an end token behind a turn that goes on is taken back,
    and a last turn that a stop string ended gets one, which is trained on (docs/environments.md). SearchR1 and
    SkyRL-SQL were published so."""
    chat_template_options: dict[str, Any] = field(default_factory=dict)
    """More variables of the model's chat template, such as `{enable_thinking: false}` of Qwen3's. Every rendering has
    them: prompts, observations, the warm-up, evaluations."""
    env_timeout_s: float = at_least(0.1, 60.0)
    """Seconds for one environment step."""
    trajectory_timeout_s: Optional[float] = at_least(0.1, None)
    """Seconds for one trajectory, from its first request on, waiting for an engine included: below the seconds that the
    whole generation takes, it truncates the trajectories that come last. An answer that it cuts is kept and given to
    the environment, whose own time it does not bound. An environment that is not done with it, or that was to speak or
    to be spoken to when time was over, judges what there is if it can (`out_of_time`); else the trajectory has the
    rewards that it was given until then. None has no end; another machine, another end."""
    step_wise: str = one_of("off", "turns", "merged")
    """What one training sample is. off: a trajectory. turns: a turn, with all that the policy saw before it; for
    environments that rewrite the conversation. merged: the same, with turns that only continue one another in one."""
    request_timeout_s: float = at_least(1, 600.0)
    """Seconds that an engine may leave all of its requests without a new token; past it, it is started again and others
    take them. A request has no limit but `sampling.max_tokens`: however long it waits, and however slow its tokens are.
    Of an endpoint that is evaluated: seconds for one attempt."""
    restarts: int = at_least(0, 10)
    """Engines that are started again after a fault, in one run; past it the run ends and names the root cause. As many
    of `environment.processes` are, counted by themselves."""
    threads: int = between(1, 4096, 1)
    """CPU threads of one engine worker (CPU only)."""
    eager: Optional[bool] = None
    """Runs the engine without compilation and CUDA graphs: every token then pays for thousands of launches from Python,
    an estimated two to four times as slow on an H100. None does so on a CPU only. SkyRL's script for DAPO is eager, for
    an instability of the vLLM of its day; weights are updated in place here, so graphs keep reading them. Give true to
    rule graphs out where `mismatch` figures or a loss look wrong."""
    options: dict[str, Any] = field(default_factory=dict)
    """More vLLM engine arguments, by their own names."""
