"""What the other programs call offloading, sleeping and sharing of GPUs: `residency.keep` lists what stays."""

from __future__ import annotations

from skyrl_mega.config.other_programs.entry import Entry, Table, none, several, to
from skyrl_mega.config.residency import CRITIC, ENGINE, PARTS, POLICY

KEEP_NOTHING = "residency.keep=[]"
FRACTION = to(
    "rollout.memory_fraction",
    note="the published value may stay with residency.keep=[]; with everything kept it is what the policy leaves, and "
    "--dry-run says what fits",
)
"""An engine's share of a GPU's memory."""
ALL_STREAMED = none("policy.optimizer.streamed has all of it in host memory, and overlaps its copies; leave it out")


def streamed(group: str) -> Entry:
    """An optimizer on the host, whose settings here are in `group`."""
    note = "its state is in host memory, and steps on the GPU piece by piece (docs/residency.md)"
    return to(f"{group}.streamed", note=note)


def moments(group: str) -> Entry:
    """What its moments are kept in."""
    return to(
        f"{group}.moments",
        note="float32 or bfloat16, of both, which then needs beta1 and beta2 of at most 0.99; master weights and their "
        "gradients are float32",
        values={"bf16": to(f"{group}.moments=bfloat16"), "fp32": to(f"{group}.moments=float32")},
    )


def of_types(group: str) -> Entry:
    """The switch without which megatron-core has no such types, and which alone changes none."""
    return none(f"{group}.moments alone says what moments are kept in; leave it out")


def optimizer(group: str) -> Table:
    """megatron-core's fields of an optimizer that is on the host, or whose moments are smaller."""
    return {
        "optimizer_cpu_offload": streamed(group),
        **several(
            ALL_STREAMED,
            "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d use_torch_optimizer_for_cpu_offload "
            "pin_cpu_grads pin_cpu_params",
        ),
        **several(moments(group), "exp_avg_dtype exp_avg_sq_dtype"),
        "use_precision_aware_optimizer": of_types(group),
    }


ACTIVATIONS = to(
    "policy.offload_layers",
    note="of how many layers; recomputing takes less time unless single sequences are long (docs/speed.md)",
    values={"false": to("policy.offload_layers=0")},
)
"""What layers keep for the backward pass."""


def staying(*parts: str, note: str = "") -> Entry:
    """These parts stay, and all others take turns."""
    return to(f"residency.keep=[{','.join(parts)}]", note=note)


def offload(*leaving: str, note: str = "") -> Entry:
    """A switch by which these parts leave their device; where it is false, they stay as all do."""
    rest = [part for part in PARTS if part not in (*leaving, *CRITIC)]
    said = f"the list has what stays; {KEEP_NOTHING} has all take turns" + (f"; {note}" if note else "")
    names = " and ".join(leaving)
    stay = to("residency.keep=null", note=f"all stay; beside another such switch, its list with {names}")
    return Entry((f"residency.keep=[{','.join(rest)}]",), said, {"false": stay})


ENGINES_SLEEP = offload(*ENGINE)
POLICY_LEAVES = offload(*POLICY)
CRITIC_LEAVES = offload(*CRITIC, note="a critic leaves whole")
POLICY_STAYS = staying(*POLICY, note="the list has what stays, and critic where there is one")
ENGINES_STAY = staying(*ENGINE, note="the list has what stays")
SHARED = to(
    "cluster.shared",
    note=f"{KEEP_NOTHING} lets policy and engines take turns in memory",
    values={
        "true": to("cluster.shared=true", KEEP_NOTHING),
        "false": to("cluster.shared=false", note="with policy.ranks"),
    },
)
"""Policy and engines on the same GPUs, where that means that they take turns too."""
