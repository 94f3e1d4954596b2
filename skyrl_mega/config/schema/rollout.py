"""Settings of the vLLM engines and the agent loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from skyrl_mega.config.schema.drafts import DraftsConfig
from skyrl_mega.config.schema.elastic import ElasticConfig
from skyrl_mega.config.schema.endpoints import refusals as endpoint_refusals
from skyrl_mega.config.schema.fields import MOST, Refusal, Refusals, at_least, between, one_of


@dataclass
class SamplingConfig:
    """Sampling of tokens by the engines."""

    temperature: float = at_least(0, 1.0)
    """Softmax temperature; 0 is greedy."""
    top_p: float = between(0, 1, 1.0)
    """Nucleus mass."""
    top_k: int = at_least(-1, -1)
    """Number of most likely tokens to keep; -1 keeps all."""
    max_tokens: int = at_least(1, 1024)
    """Maximum number of tokens per turn."""
    stop: list[str] = field(default_factory=list, metadata={"empty": False})
    """Strings that end a turn; kept in the output."""

    def refusals(self) -> Refusals:
        """Yields refusals of `top_k` 0 and `top_p` 0, which keep no token."""
        if self.top_k == 0:
            yield "rollout.sampling.top_k", "allowed is -1 (all) or at least 1"
        if self.top_p == 0:
            yield "rollout.sampling.top_p", "allowed is a number above 0 and at most 1"


@dataclass
class RolloutConfig:
    """Settings of the vLLM engines, and limits of trajectories in the agent loop."""

    engines: int = between(0, MOST, 1)
    """Number of engines; each runs in a separate actor. 0 is possible with `endpoints`."""
    endpoints: list[dict[str, Any]] = field(default_factory=list, metadata={"mappings": True})
    """Inference servers that the run uses and does not start (docs/endpoints.md). Keys of an entry: `url`; `kind`:
    `vllm` (the default), `sglang` or `path:Class`; `sync`, the way of new weights: `group`, `files` or `directory`;
    `token_env`, the environment variable with the API key; `concurrency`, most requests at once; `max_difference`, the
    largest mean difference of log-probs after a weight sync, in nats; `options`, further fields of requests."""
    tensor: int = at_least(1, 1)
    """Tensor parallel size of an engine."""
    memory_fraction: float = between(0, 1, 0.6)
    """Share of a GPU's memory that vLLM may use (CUDA)."""
    kv_cache_gib: float = between(0.01, 10_000, 1.0)
    """KV cache size per engine worker (CPU)."""
    max_length: Optional[int] = at_least(1, None)
    """Maximum sequence length of an engine; null uses prompt limit + response limit."""
    max_prompt_tokens: int = at_least(1, 2048)
    """Maximum prompt length. Longer prompts are dropped from the data and counted."""
    max_input_tokens: Optional[int] = at_least(1, None)
    """Maximum number of tokens before a turn; a trajectory with more ends before this turn. null starts a turn as long
    as `max_length` and `max_response_tokens` leave space for a token."""
    max_response_tokens: Optional[int] = at_least(1, None)
    """Maximum number of tokens after the prompt, over all turns; null uses max_turns · sampling.max_tokens. Of an
    agent, the limit holds for each conversation."""
    max_turns: int = at_least(1, 1)
    """Maximum number of turns per trajectory; of an agent (docs/agents.md), the maximum number of requests."""
    concurrency: int = between(1, MOST, 256)
    """Maximum number of running sequences per engine, shared by data-parallel replicas. The router also limits an
    engine's requests to twice the KV cache, with every request counted at maximum length."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling of training trajectories."""
    conversation: str = one_of("messages", "one_message")
    """Encoding of several turns as tokens. messages: each turn is an assistant message and each observation a message
    with a separate role, written by the chat template. one_message: all turns and observations form a single assistant
    message; observations are inserted verbatim, without the template. In `one_message`, an end token before the last
    turn is removed, and a last turn ended by a stop string gets an end token, included in the loss
    (docs/environments.md). SearchR1 and SkyRL-SQL were published with `one_message`."""
    chat_template_options: dict[str, Any] = field(default_factory=dict)
    """Additional variables for the model's chat template, such as `{enable_thinking: false}` for Qwen3. Applied to
    every rendering: prompts, observations, the warm-up, evaluations."""
    env_timeout_s: float = at_least(0.1, 60.0)
    """Time limit per environment step in seconds."""
    trajectory_timeout_s: Optional[float] = at_least(0.1, None)
    """Time limit per trajectory in seconds, from the first request on, including time spent waiting for an engine; null
    is no limit. A limit below the duration of the whole generation truncates the last trajectories. The environment
    still receives a truncated answer, and environment calls are not cut by this limit. If the environment is not
    finished with the answer, or time runs out between turns, the environment can grade the unfinished trajectory
    (`out_of_time`); otherwise the trajectory keeps the rewards received so far. An agent gets no further reply, and has
    `env_timeout_s` to end and grade its work. The effect depends on the speed of the machine."""
    step_wise: str = one_of("off", "turns", "merged")
    """Unit of a training sample. off: a trajectory. turns: a turn with everything the policy saw before, for
    environments with rewritten conversations. merged: like turns, but a turn that only extends the previous turn is
    merged into the same sample."""
    generator: Optional[str] = None
    """Generator of the training trajectories (docs/generators.md): best_of_n, tree_search, branching, refinement, or
    the import path of your own class (`package.module:Class` or `path/to/file.py:Class`). null is the agent loop:
    `data.samples_per_prompt` independent trajectories. Evaluations and greedy answers always use the agent loop."""
    generator_options: dict[str, Any] = field(default_factory=dict)
    """Options of the generator."""
    request_timeout_s: float = at_least(5, 600.0)
    """Seconds in which no request of an engine gets a token; then the engine is restarted and the requests move to the
    remaining engines. At least 5, since an engine on a CPU sends tokens once a second. A single request has no time
    limit, only `sampling.max_tokens`. When an endpoint is evaluated: seconds per attempt."""
    restarts: int = at_least(0, 10)
    """Number of engine restarts after faults in a run; the next fault ends the run and the error names the root cause.
    Rollout workers (`environment.processes`) have a separate restart budget of the same size."""
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    """Engines that join and leave while the run trains."""
    threads: int = between(1, 4096, 1)
    """CPU threads per engine worker (CPU only)."""
    eager: Optional[bool] = None
    """Runs the engine without compilation and CUDA graphs. Every token then launches thousands of kernels from Python,
    an estimated two to four times slower on an H100. null is eager on a CPU only. SkyRL's DAPO script runs eagerly
    because of an instability of the vLLM version of the time; here weights are updated in place, so CUDA graphs stay
    valid. Set true to rule out CUDA graphs if `mismatch` metrics or a loss look wrong."""
    drafts: DraftsConfig = field(default_factory=DraftsConfig)
    """Draft tokens (speculative decoding)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Additional vLLM engine arguments, under vLLM's names."""

    def refusals(self) -> Refusals:
        """Yields refusals of a run without engines, of entries of `endpoints`, of token limits that leave no space for
        a prompt of maximum length or for a turn, and of options without a generator."""
        if not self.engines and not self.endpoints:
            yield "rollout.engines", "nothing would generate; give at least 1, or rollout.endpoints"
        yield from endpoint_refusals(self.endpoints)
        if self.generator is None and self.generator_options:
            yield "rollout.generator_options", "there is no generator; give rollout.generator, or leave the options out"
        if self.sampling.max_tokens > (self.max_response_tokens or self.sampling.max_tokens):
            why = f"allowed is at most rollout.max_response_tokens = {self.max_response_tokens}"
            yield Refusal("rollout.sampling.max_tokens", why, settings=("rollout.max_response_tokens",))
        if self.max_input_tokens is not None and self.max_input_tokens < self.max_prompt_tokens:
            yield Refusal(
                "rollout.max_input_tokens",
                f"allowed is at least rollout.max_prompt_tokens = {self.max_prompt_tokens}, or a prompt would have no "
                "turn; or null",
                settings=("rollout.max_prompt_tokens",),
            )
        if self.max_length is not None and self.max_length <= self.max_prompt_tokens:
            yield Refusal(
                "rollout.max_length",
                f"allowed is more than rollout.max_prompt_tokens = {self.max_prompt_tokens}; or null, which takes "
                "prompt + response",
                settings=("rollout.max_prompt_tokens",),
            )
