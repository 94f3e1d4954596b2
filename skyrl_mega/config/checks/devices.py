"""Rules of devices and time: GPUs of all processes, parts of the state on them, deterministic runs, profiled ranks."""

from __future__ import annotations

from skyrl_mega.common.limits import CONTAINER_LIFETIME_S
from skyrl_mega.config.checks.engines import check_topology
from skyrl_mega.config.containers import container_options, environment_slots, whole
from skyrl_mega.config.derived import (
    DETERMINISTIC,
    critic_ranks,
    engine_ranks,
    gpus_needed,
    has_critic,
    policy_ranks,
    reference_ranks,
)
from skyrl_mega.config.pools import engine_cluster
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.residency import CRITIC, ENGINE, kept
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusal, Refusals, duplicates

INCOMPATIBLE_ARGUMENTS = {
    "enable_lora": "no weight sync brings adapters",
    "kv_transfer_config": "a connector has memory of its own for the cache",
    "kv_offloading_size": "a connector has memory of its own for the cache",
    "cpu_offload_gb": "vLLM keeps weights in host memory itself",
    "offload_group_size": "vLLM keeps weights in host memory itself",
}
"""vLLM arguments that rule out dropping engine weights or KV cache → reason."""


@raising
def check_residency(c: Config) -> Refusals:
    """Raises a UserError for a useless entry in `residency.keep`, or a part that must leave the device but cannot.

    Useless are repeated entries, `critic` without a critic, and `optimizer` with a streamed optimizer. Some options of
    vLLM and DDP keep engine weights, KV cache or buffers from leaving.
    """
    keep, critic = c.residency.keep or (), has_critic(c)
    yield from duplicates("residency.keep", keep)
    if "critic" in keep and not critic:
        why = f"algorithm.advantage={c.algorithm.advantage} has no critic"
        yield "residency.keep", why, "leave critic out, or give algorithm.advantage=gae"
    if c.policy.optimizer.streamed and "optimizer" in keep:
        why = "policy.optimizer.streamed=true keeps the optimizer's state in host memory in every phase"
        yield "residency.keep", why, "leave optimizer out, or give policy.optimizer.streamed=false"
    dropped = [part for part in ENGINE if part not in kept(c.residency.keep)]
    for name, why in INCOMPATIBLE_ARGUMENTS.items() if dropped else ():
        if c.rollout.options.get(name):
            why = f"{why}, so an engine with it cannot drop {' and '.join(dropped)}"
            fix = "leave it out, or add engine_weights and kv_cache to residency.keep"
            yield f"rollout.options.{name}", why, fix, ""
    buffers = ("parameters", "gradients", *CRITIC[:critic])
    moved = [part for part in buffers if part not in kept(c.residency.keep)]
    if moved and c.policy.ddp_options.get("nccl_ub"):
        why = f"NCCL keeps the addresses of buffers, so {' and '.join(moved)} cannot leave the device"
        yield "policy.ddp_options.nccl_ub", why, f"leave it out, or add {', '.join(buffers)} to residency.keep", ""


@raising
def check_profile(c: Config) -> Refusals:
    """Raises a UserError if `telemetry.profile` names a step or rank that the run does not have, an entry twice, or
    ranks without steps."""
    profile, ranks, steps = c.telemetry.profile, policy_ranks(c), c.run.steps
    yield from profile.refusals()
    beyond = [rank for rank in profile.ranks if rank >= ranks]
    if profile.steps and beyond:
        why = f"there is no policy rank {beyond[0]}; allowed are 0 to {ranks - 1} (policy.ranks)"
        yield Refusal("telemetry.profile.ranks", why, settings=("policy.ranks",))
    late = [step for step in profile.steps if steps is not None and step > steps]
    if late:
        yield "telemetry.profile.steps", f"there is no step {late[0]}; allowed are 1 to {steps} (run.steps)"


@raising
def check_deterministic(c: Config) -> Refusals:
    """Raises a UserError for a deterministic run with a time limit on trajectories, or with Megatron's deterministic
    mode turned off."""
    fix = "leave it out, or give run.deterministic=false"
    if c.run.deterministic and c.rollout.trajectory_timeout_s is not None:
        why = "the clock would end trajectories, and run.deterministic=true allows null only"
        yield "rollout.trajectory_timeout_s", why, fix
    option = c.policy.options.get(DETERMINISTIC, True)
    if c.run.deterministic and option is not True:
        yield f"policy.options.{DETERMINISTIC}", "run.deterministic=true allows true only", fix, str(option)


@raising
def check_environment(c: Config) -> Refusals:
    """Raises a UserError for more rollout workers than slots or threads, two environments for the same rows, a
    deterministic run with rollout workers, limited slots or containers, or containers that end before their
    trajectory."""
    yield from c.environment.refusals()
    waves = "run.deterministic=true has all trajectories wait for one another, turn by turn"
    fix = "leave it out, or give run.deterministic=false"
    if c.run.deterministic and c.environment.processes:
        yield "environment.processes", f"{waves}, in one process", fix
    if c.run.deterministic and c.environment.slots is not None:
        yield "environment.slots", f"{waves}, so that all have to be open", fix
    elif c.run.deterministic and environment_slots(c.environment) is not None:
        yield "run.deterministic", f"{waves}, and containers at once are limited", "give run.deterministic=false"
    for key, _, given in container_options(c.environment.options):
        lifetime, longest = whole(given, "lifetime_s", CONTAINER_LIFETIME_S), c.rollout.trajectory_timeout_s
        if longest is not None and lifetime <= longest:
            why = f"a container must outlive its trajectory, and rollout.trajectory_timeout_s is {longest:g}"
            yield f"{key}.lifetime_s", why, f"give {int(longest) + 1800}", str(lifetime)


@raising
def check_enough(c: Config, prompts: int, what: str) -> Refusals:
    """Raises a UserError if a step needs more prompts than all epochs together have; not if `run.steps` is 0.

    Args:
        c: The settings.
        prompts: Number of prompts in an epoch.
        what: Description of the prompts for the error message, such as `rows in data.train`.
    """
    if c.run.steps != 0 and prompts * c.run.epochs < c.data.prompts_per_step:
        yield (
            "data.prompts_per_step",
            f"there are {prompts} {what}, in all epochs (run.epochs = {c.run.epochs}) {prompts * c.run.epochs}, too "
            "few for a single step; give at most that number, more epochs or more data",
        )


def check_cluster(c: Config, planned: bool) -> None:
    """Checks settings of engines, of `policy.spec` and of the number of GPUs against `cluster.device`. The number of
    GPUs is checked for `cluster.device=cuda`, and for auto if `planned`. Looks at no hardware.

    Args:
        c: The settings.
        planned: True if nothing will be started: `cluster.device=auto` then means GPUs.

    Raises:
        UserError: A setting does not fit the device, or GPUs are too few.
    """
    check_topology(c)
    check_spec(c)
    if c.cluster.device == "cuda" or (planned and c.cluster.device == "auto"):
        check_gpus(c, planned=planned)


@raising
def check_spec(c: Config) -> Refusals:
    """Raises a UserError for `policy.spec=te` (Transformer Engine) with `cluster.device=cpu`."""
    if c.policy.spec == "te" and c.cluster.device == "cpu":
        why = "Transformer Engine computes on CUDA alone, and cluster.device is cpu; allowed there is local or auto"
        yield "policy.spec", why


@raising
def check_gpus(c: Config, training: bool = True, planned: bool = False) -> Refusals:
    """Raises a UserError if the cluster has too few GPUs, or a tensor parallel group or an engine would cross nodes.

    Policy, reference, critic and engines need separate GPUs, except engines colocated with policy ranks. Assumes a run
    on GPUs, whatever `cluster.device` is.

    Args:
        c: The settings.
        training: False to count only the engines, for an evaluation.
        planned: True if nothing will be started: an engine may then take several whole nodes.
    """
    node, total = c.cluster.gpus_per_node, c.cluster.nodes * c.cluster.gpus_per_node
    engines = c.rollout.engines * engine_ranks(c.rollout)
    yield from _engine_size_refusals(c, planned)
    if c.cluster.pools.engines is not None or not training:
        yield from _engine_count_refusals(c, engines)
    if not training:
        return
    policy, reference, critic = policy_ranks(c), reference_ranks(c), critic_ranks(c)
    for key, layout, ranks in (
        ("policy", c.policy.layout, policy),
        ("reference", c.reference.layout, reference),
        ("critic", c.critic.layout, critic),
    ):
        if layout is not None and ranks > node and node % layout.tensor:
            yield (
                f"{key}.layout.tensor",
                f"it does not divide cluster.gpus_per_node = {node}, so some tensor parallel group would lie on two "
                "nodes; choose a divisor",
            )
    if c.cluster.shared:
        yield from _shared_refusals(c, engines, policy)
    if c.cluster.shared or c.cluster.pools.engines is not None:
        engines = 0
    if gpus_needed(c) > total:
        remaining = {"reference": reference, "critic": critic, "engines": engines}
        parts = f"policy {policy}" + "".join(f" + {name} {count}" for name, count in remaining.items() if count)
        explicit = {"reference": c.reference.ranks, "critic": c.critic.ranks, "engines": engines}
        # roles without an explicit number use as many ranks as the policy
        following = sum(count > 0 and not explicit[name] for name, count in remaining.items())
        available = (total - sum(count for name, count in remaining.items() if explicit[name])) // (1 + following)
        fix, other = _fewer_gpus(c, available)
        yield Refusal(
            "policy.ranks",
            f"{parts} GPUs are more than cluster.nodes · gpus_per_node = {total}; allowed is a sum of at most {total}: "
            f"{fix}, or more nodes",
            settings=(*other, "cluster.nodes"),
            together=("policy.ranks", *other) if available > 0 else (),
        )


def _fewer_gpus(c: Config, ranks: int) -> tuple[str, tuple[str, ...]]:
    """Returns the change to `ranks` policy ranks as text, and the setting that must change too, if any. With `ranks` of
    0 or less, only engines can change."""
    if ranks <= 0:
        return "fewer rollout.engines", ("rollout.engines",)
    size, fix = engine_ranks(c.rollout), f"policy.ranks={ranks}"
    if not c.cluster.shared or ranks >= c.rollout.engines * size:
        return fix, ()
    if ranks < size:
        return f"{fix} with smaller engines (rollout.tensor)", ("rollout.tensor",)
    return f"{fix} rollout.engines={ranks // size}", ("rollout.engines",)  # a worker has the GPU of a policy rank


def _engine_count_refusals(c: Config, engines: int) -> Refusals:
    """Yields a reason if the engines' nodes have fewer GPUs than the engines have workers."""
    cluster, pool = engine_cluster(c), c.cluster.pools.engines
    total = cluster.nodes * cluster.gpus_per_node
    if engines > total:
        nodes = "cluster.pools.engines.nodes" if pool else "cluster.nodes"
        yield Refusal(
            "rollout.engines",
            f"with rollout.tensor = {c.rollout.tensor} they need {engines} GPUs, more than {nodes} · "
            f"gpus_per_node = {total}; give fewer",
            settings=("rollout.tensor", nodes),
        )


def _engine_size_refusals(c: Config, planned: bool) -> Refusals:
    """Yields a reason if an engine does not fit into a node.

    Args:
        c: The settings.
        planned: True if nothing will be started: an engine may then take several whole nodes.
    """
    node = engine_cluster(c).gpus_per_node
    group = "cluster.pools.engines" if c.cluster.pools.engines else "cluster"
    if c.rollout.tensor > node and (c.rollout.tensor % node or not planned):
        in_plan = f", and in --dry-run a multiple of {node}" if planned else ""
        yield "rollout.tensor", f"allowed is at most {group}.gpus_per_node = {node}{in_plan}"
    elif engine_ranks(c.rollout) > node and not planned:
        yield Refusal(
            "rollout.options.data_parallel_size",
            f"with rollout.tensor = {c.rollout.tensor} an engine has {engine_ranks(c.rollout)} GPUs, and in a run an "
            f"engine must fit into a node of {group}.gpus_per_node = {node}; allowed is at most "
            f"{node // c.rollout.tensor}",
            settings=("rollout.tensor",),
        )


def _shared_refusals(c: Config, engines: int, policy: int) -> Refusals:
    """Yields a reason if engine worker w cannot share the GPU of policy rank w."""
    if engines > policy:
        yield Refusal(
            "rollout.engines",
            "with cluster.shared the workers of all engines have GPUs of policy ranks, and these are "
            f"{engines} workers, more than policy.ranks = {policy}; allowed is at most "
            f"{policy // engine_ranks(c.rollout)} engines, or cluster.shared=false",
            settings=("policy.ranks", "cluster.shared"),
        )
    node, size = c.cluster.gpus_per_node, engine_ranks(c.rollout)
    if node % size and size % node:
        yield Refusal(
            "rollout.tensor" if size == c.rollout.tensor else "rollout.options.data_parallel_size",
            "with cluster.shared an engine has the GPUs of consecutive policy ranks, and some would lie in two nodes; "
            f"allowed are divisors of cluster.gpus_per_node = {node}",
            settings=("cluster.shared",),
        )
