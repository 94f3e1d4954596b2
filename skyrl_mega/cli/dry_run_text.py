"""Tables of a dry run for people: equal ranks share a line, GiB with two decimals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from skyrl_mega.cli import dry_run_time_text
from skyrl_mega.common.tables import aligned, as_ranges

GIB = 2**30
SHOWN = 32
"""Maximum lines of a table; --json prints all."""
COLUMNS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "logits": "logits",
    "forward": "forward",
    "reference": "refer",
    "sync": "sync",
    "reserve": "reserve",
    "gaps": "gaps",
    "peak": "peak",
}
GPU = {
    "policy": {
        "weights": ("weights",),
        "grads": ("gradients",),
        "optim": ("optimizer",),
        "work": ("reference", "forward", "activations", "logits"),
        "rest": ("sync", "reserve", "gaps"),
    },
    "engine": {
        "weights": ("weights",),
        "KV cache": ("kv_cache",),
        "its work": ("working", "staged"),
        "its rest": ("reserve", "beside"),
    },
}
"""Columns of a shared GPU with the kinds of memory in each; --json prints every kind separately."""
TRAINED = ("policy", "reference", "critic")
ENGINE = "an engine worker"
Values = Mapping[str, Any]


def text(v: Values) -> str:
    """Returns the report of `--dry-run` as text for a terminal.

    Args:
        v: Result of `dry_run.values`.
    """
    trained = [table(name, v[name], v) for name in TRAINED if v[name] for table in (_ranks, _rank_memory)]
    sections = [[_first_line(v), *_run_lines(v)], _model(v), *trained, _engines(v), _shared(v), _nodes(v)]
    sections += [[*_batch(v), *_containers(v)]]
    sections += [_sync(v)] if v["sync"] else []
    sections += dry_run_time_text.sections(v["time"]) if v["time"] else []
    return "\n\n".join("\n".join(lines) for lines in (*sections, _notes(v)) if lines)


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun in singular or plural: `1 rank`, `2 ranks`, `1,024 trajectories`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _first_line(v: Values) -> str:
    """Returns the first line: whether the run fits, free memory and step time."""
    ranks = counted(len(v["policy"]), "rank")
    if v["gpu_memory"] is None:
        host = max(node["host_memory_total"] for node in v["nodes"])
        need = f"about {_gib(host)} GiB of memory on the fullest node"
        step = f"; about {v['seconds']['step']:.1f} s a step" if v["seconds"] else ""
        return f"it can run on {'this CPU' if len(v['nodes']) == 1 else 'CPUs'}: {ranks}, {need}{step}"
    free, where, memory = _tightest(v)
    node_count, size = counted(len(v["nodes"]), "node"), f"{_gib(memory)} GiB"
    step = f"about {v['seconds']['step']:.0f} s a step"
    if free < 0:
        return f"tight on {node_count}: by the estimates {where} lacks {-free / GIB:.1f} of {size}; {step}"
    return f"it fits {node_count}: of {size} of a GPU, {free / GIB:.1f} GiB are left beside {where}; {step}"


def _run_lines(v: Values) -> list[str]:
    """Returns the lines with steps and duration of the run; no line without times."""
    return dry_run_time_text.summary(v["time"]) if v["time"] else []


def _tightest(v: Values) -> tuple[int, str, int]:
    """Returns the free bytes, the name and the memory of the GPU that lacks most, or else of the GPU considered first;
    with engines on GPUs of another kind, of the GPU with least free memory."""
    peaks = {name: max((rank["memory"]["peak"] for rank in v[name]), default=0) for name in TRAINED}
    free = {f"the fullest {name} rank ({_gib(peak)} GiB)": v["gpu_memory"] - peak for name, peak in peaks.items()}
    if v["shared"]:
        free = {"the fullest shared GPU": v["shared"]["margin"]} | free
    elif v["engines"]["count"]:
        worker = max(row["memory"]["peak"] for row in v["engines"]["workers"])
        free[f"{ENGINE} ({_gib(worker)} GiB)"] = v["engines"]["gpu_memory"] - worker
    first, apart = next(iter(free)), v["engines"]["gpu_memory"] != v["gpu_memory"]
    where = min(free, key=lambda name: (free[name] if apart else min(free[name], 0), name != first))
    return free[where], where, (v["engines"] if where.startswith(ENGINE) else v)["gpu_memory"]


def _model(v: Values) -> list[str]:
    m = v["model"]
    experts = f", {m['experts']} experts ({m['experts_per_token']} for a token)" if m["experts"] else ""
    active = f" ({_count(m['active'])} for a token)" if m["experts"] else ""
    return [
        f"model\n  {m['path']}\n  {_count(m['parameters'])} parameters{active}, {m['layers']} layers{experts}, "
        f"{m['dtype']}: {_gib(m['bytes'])} GiB"
    ]


def _shares(row: Values) -> tuple[str, ...]:
    """Returns the names of columns with the layers, heads and experts of a rank or worker."""
    return tuple(key for key, value in row.items() if isinstance(value, str))


def shape(sizes: Mapping[str, int]) -> str:
    """Returns the parallel sizes above 1 as text, such as `TP2 EP8`; `alone` for a single rank."""
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "alone"


def _ranks(name: str, ranks: Sequence[Values], v: Values) -> list[str]:
    """Returns the table of the ranks' places."""
    where = ("tp", "pp", "ep", "etp") if "experts" in ranks[0] else ("tp", "pp")
    places = (*where, *_shares(ranks[0]))
    layout = v["config"][name]["layout"] or v["config"]["policy"]["layout"]
    context = "CP" if layout["context_exchange"] == "ring" else "Ulysses"
    titles = {"tp": "TP", "cp": context, "dp": "DP", "pp": "PP", "ep": "EP", "etp": "ETP", "edp": "EDP"}
    sizes = {title: 1 + max(rank[key] for rank in ranks) for key, title in titles.items()}
    return [
        f"{name}: {counted(len(ranks), 'rank')}, {shape(sizes)}",
        *_table(places, ranks, lambda rank: [str(rank[key]) for key in places]),
    ]


def _rank_memory(name: str, ranks: Sequence[Values], v: Values) -> list[str]:
    """Returns the table of the ranks' memory."""
    keys = [key for key in COLUMNS if key == "peak" or any(rank["memory"][key] for rank in ranks)]

    def cells(rank: Values) -> list[str]:
        return [*(_gib(rank["memory"][key]) for key in keys), rank["memory"]["phase"]]

    exact = ", ".join(COLUMNS[key] for key in keys if key in v["counted"])
    room = "of host memory" if v["gpu_memory"] is None else f"of a GPU's {_gib(v['gpu_memory'])}"
    return [
        f"memory of {name} ranks, GiB {room}",
        *_table((*(COLUMNS[key] for key in keys), "in"), ranks, cells),
        f"  counted: {exact}; the others are estimates, ±{100 * v['margin']:.0f} %",
    ]


def _engines(v: Values) -> list[str]:
    e = v["engines"]
    workers = e["workers"]
    places = _shares(workers[0])
    staged = ("staged",) if any(worker["memory"]["staged"] for worker in workers) else ()
    keys = ("weights", "working", "reserve", "kv", "budget", "beside", *staged, "sync")
    names = ("KV cache" if key == "kv" else key for key in keys)

    def cells(worker: Values) -> list[str]:
        memory = worker["memory"]
        return [*(str(worker[key]) for key in places), *(_gib(memory[key]) for key in keys), f"{memory['tokens']:,}"]

    longest = counted(e["at_once"], "sequence")
    servers = f", beside {counted(e['servers'], 'server')} outside of the run" * bool(e["servers"])
    stands = "" if e["count"] else ", of an engine that stands for each server"
    apart = v["engines"]["gpu_memory"] != v["gpu_memory"]
    gpu = f" of a GPU's {_gib(v['engines']['gpu_memory'])}" if apart else ""
    return [
        f"engines: {e['count']} × {counted(len(workers), 'worker')}, tensor parallel {e['tensor']}{servers}; GiB of "
        f"one worker{gpu}{stands}",
        *_table((*places, *names, "KV tokens"), workers, cells, "worker"),
        f"  at once: {longest} of maximum length, {e['usual']} of mean length; "
        f"rollout.concurrency is {e['concurrency']}; {e['waiting']:,} more wait",
        *_states(v),
    ]


def _states(v: Values) -> list[str]:
    """Returns lines about the states of a sequence; empty for a model with attention only."""
    e, config = v["engines"], v["config"]
    if not e["state"]:
        return []
    kept = counted(e["states"], "state")
    lines = [f"  a sequence also keeps {kept} of {e['state'] / 2**20:.1f} MiB in each worker, whatever its length"]
    if e["cached_prefixes"] and config["rollout"]["max_turns"] == 1 and config["policy"]["moe"]["replay"] != "rollout":
        lines.append("  with one turn, rollout.options.enable_prefix_caching=false saves one of them (docs/models.md)")
    return lines


def _shared(v: Values) -> list[str]:
    """Returns the table of a shared GPU's memory by phase; empty if no GPU is shared."""
    shared = v["shared"]
    if not shared:
        return []
    head = (
        "phase",
        "rank",
        *GPU["policy"],
        *(f"engine's {name}" if name == "weights" else name for name in GPU["engine"]),
    )
    rows: list[tuple[str, ...]] = [(*head, "left")]
    for phase, parts in shared["parts"].items():
        sizes = (sum(parts[of].get(kind, 0) for kind in kinds) for of in GPU for kinds in GPU[of].values())
        rows.append((phase, str(shared["ranks"][phase]), *map(_gib, sizes), f"{shared['left'][phase] / GIB:.2f}"))
    idle = f"while engines generate, gradients and optimizer state stay there unused: {_gib(shared['idle'])} GiB"
    least = f"at least {_gib(shared['margin'])} GiB are left"
    if shared["margin"] < 0:
        least = f"{-shared['margin'] / GIB:.2f} GiB are lacking in phase {shared['phase']}"
    residency = "parts not needed in a phase are in host memory, or dropped (residency.keep)"
    return [
        f"a shared GPU by phase of a step, GiB of {_gib(v['gpu_memory'])}; rank: the policy rank on the fullest",
        *aligned(rows),
        f"  {least}; {residency if shared['keep'] is not None else idle}",
    ]


def _nodes(v: Values) -> list[str]:
    kinds = [kind for kind in v["nodes"][0]["host_memory"] if any(node["host_memory"][kind] for node in v["nodes"])]
    trained = [name for name in TRAINED if v[name]]

    def alike(numbered: tuple[int, Values]) -> tuple[list[int], list[str]]:
        """Returns the numbers of ranks and engines, and the cells of host memory."""
        _, node = numbered
        memory = (*(node["host_memory"][kind] for kind in kinds), node["host_memory_total"])
        return [len(node[name]) for name in (*trained, "engines")], [f"{size / GIB:.1f}" for size in memory]

    rows = [("node", *trained, "engines", *kinds, "total")]
    for (_, memory), same in groupby(enumerate(v["nodes"]), alike):
        numbers, nodes = zip(*same, strict=True)
        ranks = (as_ranges([rank for node in nodes for rank in node[kind]]) for kind in trained)
        engines = as_ranges(sorted({int(engine) for node in nodes for engine in node["engines"]}))
        rows.append((as_ranges(numbers), *ranks, engines, *memory))
    disk = v["disk"]
    files = f"{_gib(disk['checkpoint'])} GiB a checkpoint, {_gib(disk['kept'])} with those kept and one being written"
    if disk["export"]:
        files += f", {_gib(disk['export'])} the export"
    limit = v["config"]["cluster"]["host_memory_gib"]
    checked = "what a node has is not known, nor checked (cluster.host_memory_gib is null)"
    if limit is not None:
        checked = f"a node has {limit:,.0f} (cluster.host_memory_gib)"
    lines = [f"nodes, and estimated GiB of host memory; {checked}", *_cut(aligned(rows)), f"  disk: {files}"]
    if (share := disk["largest_share"])["rank"]:
        lines.append(f"  a rank writes {_gib(share['rank'])} GiB of a checkpoint at most, a node {_gib(share['node'])}")
    return lines


def _batch(v: Values) -> list[str]:
    sizes = v["batch"]
    row, usual = sizes["row"], counted(sizes["usual"], "micro-batch")
    updates = counted(sizes["mini_batches"] * sizes["epochs"], "optimizer step")
    greedy = f", beside {counted(sizes['greedy'], 'greedy answer')}" if sizes["greedy"] else ""
    return [
        "batch",
        f"  {counted(sizes['prompts'], 'prompt')} × {counted(sizes['samples'], 'sample')} = "
        f"{counted(sizes['sequences'], 'trajectory')} in {updates} of {sizes['trajectories']:,}{greedy}",
        f"  on {counted(sizes['data'], 'data-parallel rank')}: {usual} each at the mean of {sizes['mean']:,.0f} "
        f"tokens a trajectory, {sizes['most']} at the limit of {sizes['longest']:,}",
        f"  a micro-batch has up to {sizes['budget']:,} tokens, {row['tokens']:,} on one rank",
        f"  asynchrony.mode={sizes['mode']}: tokens are at most {counted(sizes['ahead'], 'sync')} old; up to "
        f"{counted(sizes['open'], 'environment')} open at once",
    ]


def _containers(v: Values) -> list[str]:
    """Returns the line about containers of environments; no line without containers."""
    if (planned := v["containers"]) is None:
        return []
    line = f"  up to {counted(planned['most'], 'container')} of {planned['runtime']} at once"
    if planned["nodes"]:
        memory, cores = planned["node_memory_mib"], planned["node_cores"]
        limits = [f"{memory / 1024:,.0f} GiB"] * (memory is not None) + [f"{cores:g} cores"] * (cores is not None)
        line += f", {planned['on_node']} on each of {counted(planned['nodes'], 'node')}"
        line += f": {' and '.join(limits)} at most" * bool(limits)
    return [line]


def _sync(v: Values) -> list[str]:
    sync = v["sync"]
    if "files" in sync:
        return list(sync["files"])
    slowest = max(sync["seconds"], key=lambda kind: sync["seconds"][kind])
    return [
        f"weight sync: plan {sync['digest']}, on the wire {sync['wire']}",
        f"  {sync['bytes']['network'] / 1e9:.2f} GB between nodes, {sync['bytes']['fabric'] / 1e9:.2f} within "
        f"nodes, {sync['bytes']['local'] / 1e9:.2f} within GPUs; {counted(sync['parts'], 'part')} on "
        f"{counted(sync['routes'], 'route')}",
        f"  predicted {sync['predicted_seconds']:.3f} s ({slowest.replace('_', ' ')}), no plan can beat "
        f"{sync['bound_seconds']:.3f} s; planned in {sync['planning_seconds']:.1f} s",
        f"  with the host's work {sync['sync_seconds']['first']:.2f} s the first time, "
        f"{sync['sync_seconds']['later']:.3f} s later, {sync['sync_seconds']['checksums']:.3f} s with checksums",
    ]


def _notes(v: Values) -> list[str]:
    notes = [*v["notes"], *(f"{path} is not here and was not checked" for path in v["absent"])]
    return [*(f"note: {note}" for note in notes), "nothing was started (--dry-run)"]


def _table(
    head: Sequence[str], rows: Sequence[Values], cells: Callable[[Values], Sequence[str]], key: str = "rank"
) -> list[str]:
    """Returns a table of ranks or workers; ranks with equal cells share a line, which begins with their numbers."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        groups.setdefault(tuple(cells(row)), []).append(row[key])
    return _cut(aligned([(f"{key}s", *head), *((as_ranges(members), *same) for same, members in groups.items())]))


def _cut(lines: list[str]) -> list[str]:
    """Returns the first lines, and a line with the number of omitted lines."""
    if len(lines) <= SHOWN + 1:
        return lines
    return [*lines[: SHOWN + 1], f"  … and {len(lines) - SHOWN - 1} more lines (--json has all)"]


def _gib(size: float) -> str:
    """Returns GiB with two decimals; values below 0.01 get a single significant digit."""
    return f"{size / GIB:.2f}" if size == 0 or size >= GIB / 100 else f"{size / GIB:.1g}"


def _count(number: int) -> str:
    """Returns a large number in units of a million or a billion."""
    return f"{number / 1e9:.2f} · 10⁹" if number >= 1e8 else f"{number / 1e6:.2f} · 10⁶"
