"""From prompts to micro-batches: what one RL step makes of its trajectories."""

from __future__ import annotations

import math
from dataclasses import dataclass

from skyrl_mega.config.derived import draws_greedy, length_limit, micro_tokens, planned_device, response_limit
from skyrl_mega.config.precision import row_multiple
from skyrl_mega.config.schema import Config
from skyrl_mega.models.megatron import layer_spec
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.activations import Row


@dataclass(frozen=True)
class Batch:
    """One RL step."""

    prompts: int
    samples: int
    """Trajectories of a prompt."""
    greedy: int
    """Greedy answers beside them, which engines write and nothing trains on: one to a prompt with ReMax, else 0."""
    mini_batches: int
    """Cuts of the RL step."""
    epochs: int
    """Optimizer steps on each of them."""
    trajectories: int
    """Of one optimizer step."""
    data: int
    """Data-parallel ranks that share them."""
    longest: int
    """Tokens of a sequence at its limits."""
    mean: float
    """… at `cluster.rates.length_share` of them."""
    generated: float
    """Tokens of it that an engine writes, on average."""
    budget: int
    """Tokens of a micro-batch over its context ranks."""
    most: int
    """Micro-batches of one optimizer step on one data-parallel rank when every sequence is at its limit."""
    usual: int
    """… at the mean length."""
    row: Row
    """The longest micro-batch, for the memory."""
    padding: float
    """Tokens of a usual micro-batch, over its context ranks, that are padding, on average."""

    @property
    def sequences(self) -> int:
        """Trajectories of the RL step that it trains on."""
        return self.prompts * self.samples

    @property
    def updates(self) -> int:
        """Optimizer steps of the RL step."""
        return self.mini_batches * self.epochs

    @property
    def oversize(self) -> bool:
        """Whether a sequence can be longer than the budget and has a micro-batch of its own."""
        return self.longest > self.budget


def batch(config: Config, parallel: ParallelDims) -> Batch:
    """The arithmetic of `megatron.group.TrainGroup` and `parallel.balance`, for sequences of one length."""
    data, share = config.data, config.cluster.rates.length_share
    prompts, samples = data.prompts_per_step, data.samples_per_prompt
    mini = data.mini_batch_prompts or prompts
    longest, answer = length_limit(config.rollout), response_limit(config.rollout)
    written = min(answer, config.rollout.max_turns * config.rollout.sampling.max_tokens, longest)
    if config.rollout.max_turns == 1:  # nothing of an environment's is in a sequence
        answer = written
    mean = share * min(longest, config.rollout.max_prompt_tokens + answer)
    budget = micro_tokens(config.policy) * parallel.context
    trajectories = mini * samples
    multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1

    def micros(length: float) -> int:
        each = max(1, int(budget // length))
        count = -(-trajectories // (parallel.data * each))
        return -(-count // multiple) * multiple

    # As `megatron.packing` pads: every sequence for the zigzag, then the row.
    spec = layer_spec(config.policy.spec, planned_device(config))
    chunks = 2 * parallel.context if parallel.context > 1 else 1
    rows = parallel.context * parallel.tensor * row_multiple(config.policy.precision, spec)
    unit = math.lcm(chunks * parallel.tensor, rows)
    share_of_rank = -(-trajectories // parallel.data)
    tokens = max(min(budget, share_of_rank * longest), longest)
    tokens += math.ceil(tokens / mean) * (chunks - 1)
    most, usual = micros(longest), micros(mean)
    in_one = trajectories / (parallel.data * usual)
    return Batch(
        prompts=prompts,
        samples=samples,
        greedy=prompts if draws_greedy(config.algorithm) else 0,
        mini_batches=-(-prompts // mini),
        epochs=data.epochs_per_step,
        trajectories=trajectories,
        data=parallel.data,
        longest=longest,
        mean=mean,
        generated=share * written,
        budget=budget,
        most=most,
        usual=usual,
        row=Row(-(-tokens // unit) * unit // parallel.context, most),
        padding=in_one * (chunks - 1) / 2 + (unit - chunks) / 2,
    )
