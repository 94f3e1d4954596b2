"""What the other programs call offloading, sleeping and sharing of GPUs: `residency.keep` lists what stays."""

from __future__ import annotations

from skyrl_mega.config.other_programs.entry import Entry, none, to
from skyrl_mega.config.residency import CRITIC, ENGINE, PARTS, POLICY

KEEP_NOTHING = "residency.keep=[]"
FRACTION = to(
    "rollout.memory_fraction",
    note="the published value may stay with residency.keep=[]; with everything kept it is what the policy leaves, and "
    "--dry-run says what fits",
)
"""An engine's share of a GPU's memory."""
NO_OPTIMIZER_ON_CPU = none(
    "the optimizer steps on its GPUs; residency.keep without optimizer has its state in host memory in all other "
    "phases (docs/residency.md)"
)
NO_ACTIVATION_OFFLOAD = none("activations stay on their GPU; policy.recompute computes them once more (docs/speed.md)")


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
