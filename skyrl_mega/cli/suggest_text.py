"""Table of suggested layouts beside the settings as they are, and the settings to paste."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import OmegaConf

from skyrl_mega.cli import suggest_changes_text as changes_text
from skyrl_mega.cli.dry_run_text import shape
from skyrl_mega.cli.simulate_text import dynamic_sampling_notes
from skyrl_mega.cli.suggest_changes import ChoiceComparison
from skyrl_mega.cli.suggest_changes_text import host, room
from skyrl_mega.cli.suggest_rows import SHOWN, Row, Rows, memory_warning
from skyrl_mega.cli.suggest_simulated import Simulated
from skyrl_mega.common.tables import aligned
from skyrl_mega.config.derived import engine_data, engine_ranks, expert_parallel, policy_ranks
from skyrl_mega.config.pools import engine_cluster
from skyrl_mega.config.schema import Config, RolloutConfig
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import dynamic
from skyrl_mega.planner.candidates import as_arguments
from skyrl_mega.planner.large_engines import no_engine_error
from skyrl_mega.planner.memory import GIB, gpu_bytes
from skyrl_mega.planner.search import SECONDS, TIE, SearchResult, Suggestion

COST = "GPU-h"
"""Column of GPU-hours, only in a table whose rows use different numbers of GPUs."""
PASTED = 3
"""Number of layouts with settings written out."""
HEAD = (
    "",
    "policy",
    "layout",
    "micro",
    "recompute",
    "engines",
    "share",
    "keep",
    "KV tokens",
    "room",
    "host",
    "s a step",
    "saves",
    COST,
)
ALWAYS = ("", "layout", "room", "s a step", "saves")
"""Columns of the table even if all rows agree."""
LETTERS = {"parameters": "p", "gradients": "g", "optimizer": "o", "engine_weights": "w", "kv_cache": "k"}
"""Letters for parts of `residency.keep` in the table."""

GPU_HOURS = f"{COST}: GPU-hours of a step, on all GPUs of the nodes; saves compares seconds only"
HOST = "behind / in recompute: layers of a rank whose activations lie in host memory (policy.offload_layers)"
WARNING = "close in room: memory may be missing within the estimates' margin; tight: it is missing by the estimates"
STREAMED = "s in keep: the optimizer's state is streamed from host memory (policy.optimizer.streamed)"
BLOCKS = "* after engines: their blocks of FP8 differ from the policy's"


@dataclass(frozen=True)
class Report:
    """Content of `--suggest`."""

    search: SearchResult
    """The layouts found."""
    rows: Rows
    """Rows of the table."""
    config: Config
    """The given settings."""
    decoder: Decoder
    """The model."""
    simulated: Simulated | None = None
    """Simulated rows; None after Ctrl-C or if nothing fits."""
    comparison: ChoiceComparison = field(default_factory=ChoiceComparison)
    """Comparison of row 1 with row 0."""


def text(report: Report) -> str:
    """Returns the report of `--suggest` as text for a terminal; without a fitting layout, the reason and a remedy."""
    search, choices = report.search, report.rows.choices
    if not search.suggestions:
        return "\n".join([_misfit_text(report), *(f"note: {note}" for note in notes(report.config))])
    lines = [
        f"{len(search.suggestions):,} layouts fit {search.gpus} GPUs, of {search.evaluated:,} settings tried; the "
        f"fastest first, within {TIE:.0%} the least cut:",
        *_table(_numbered(report.rows), report.rows.given),
        *_given_lines(report),
        f"{_counted(choices)}: any other is at most {TIE:.0%} faster than a row that costs as little",
        *_legend(report.rows),
        *changes_text.error_lines(report.rows, report.comparison),
        *changes_text.change_lines(report.rows, report.comparison.changes),
        *changes_text.phase_lines(report.rows, report.comparison),
        *_simulated_lines(report),
        *([] if search.complete else [cut_text(search)]),
        *(f"note: {note}" for note in notes(report.config, choices)),
        "",
        "settings for the file, in place of those that it has in the same groups (--json has them as arguments):",
    ]
    for number, row in enumerate(choices[:PASTED], start=1):
        written = OmegaConf.to_yaml(OmegaConf.from_dotlist(row.suggestion.overrides)).rstrip().splitlines()
        lines += ["", f"# {number}", *(written if number == 1 else (f"# {line}" for line in written))]
    lines += ["", f"# 1 as arguments: {shlex.join(choices[0].suggestion.overrides)}"]
    return "\n".join(lines)


def cut_text(search: SearchResult) -> str:
    """Returns the line about an incomplete search (`complete` is false): the reason, and the numbers of untried
    layouts.

    The numbers are grouped by policy ranks and tensor parallel size.
    """
    reason = "by Ctrl-C" if search.stopped else f"after {SECONDS:.0f} s of a core, its limit"
    tensors: dict[int, Counter[int]] = {}
    for parallel in search.untried:
        tensors.setdefault(parallel.ranks, Counter())[parallel.tensor] += 1
    groups = (
        f"of {ranks:,} policy ranks {', '.join(f'{count} with TP{tensor}' for tensor, count in sorted(counts.items()))}"
        for ranks, counts in sorted(tensors.items())
    )
    most = search.layouts + len(search.untried)
    missing = (
        f"{len(search.untried)} of {most} layouts ({'; '.join(groups)})" if tensors else f"no whole layout of {most}"
    )
    return f"the search was cut short {reason}; not tried: {missing}, and perhaps settings of the last layout"


def _counted(choices: Sequence[Row]) -> str:
    if len(choices) == SHOWN:
        return f"the first {SHOWN} distinct choices"
    return "a single distinct choice" if len(choices) == 1 else f"{len(choices)} distinct choices"


def _given_lines(report: Report) -> list[str]:
    """Returns lines on the settings as they are: the error if they do not fit, and other numbers of GPUs."""
    given, gpus = report.rows.given, report.search.gpus
    if given is None:
        return [f"0, the settings as they are, cannot run: {report.rows.why}"]
    if given.gpus != gpus:
        return [f"0: the settings as they are, on {given.gpus} GPUs"]
    first = report.rows.choices[0]
    better = "" if given.seconds > (1 + TIE) * first.seconds else f"; nothing is more than {TIE:.0%} faster"
    return [f"0: the settings as they are{better}"]


def _legend(rows: Rows) -> list[str]:
    shown = [row for row in (rows.given, *rows.choices) if row]
    policies = [row.suggestion.config.policy for row in shown]
    return [
        "saves: share of a step of row 0; room: GiB left on the fullest GPU; host: GiB used on the fullest node",
        "share: rollout.memory_fraction; KV tokens: of an engine; keep: parts kept on a GPU, by first letters",
        "no row changes what is learned, but for rounding",
        *([WARNING] if any(row.warning for row in shown) else []),
        *([GPU_HOURS] if _differ_in_gpus(shown) else []),
        *([HOST] if any(policy.offload_layers for policy in policies) else []),
        *([STREAMED] if any(policy.optimizer.streamed for policy in policies) else []),
        *([BLOCKS] if any(row.partial_blocks for row in shown) else []),
    ]


def _misfit_text(report: Report) -> str:
    """Describes that nothing fits, the nearest miss, and a sufficient number of GPUs."""
    search, given = report.search, report.rows.given
    instead = "more of cluster.host_memory_gib" if search.host_problem else "more GPUs or shorter sequences"
    enough = f"{search.enough_gpus} GPUs are enough" if search.enough_gpus else f"give {instead}"
    if search.stopped:
        enough = "let the search end to see what fits"
    message, nearest = f"nothing fits {search.gpus} GPUs, of {search.evaluated:,} settings tried", search.nearest
    if not search.complete:
        message = (
            f"nothing was found for {search.gpus} GPUs, of {search.evaluated:,} settings tried; {cut_text(search)}"
        )
    if given and given.gpus == search.gpus:
        return f"{message}, except the settings as they are: {given.seconds:,.1f} s a step"
    if search.host_problem:
        return f"{message}: some fit the GPUs, but none the host memory; {search.host_problem}; {enough}"
    if nearest and nearest.missing_bytes <= 0:
        return f"{message}: policy and engines would, but not the critic (critic.ranks, critic.layout); {enough}"
    if nearest:
        policy, size = nearest.config.policy, gpu_bytes(nearest.config) / GIB
        return (
            f"{message}; the nearest ({layout(nearest.ranks.parallel)}, policy.recompute={policy.recompute}, "
            f"policy.micro_tokens={policy.micro_tokens}) lacks {nearest.missing_bytes / GIB:.1f} GiB of a GPU's "
            f"{size:.1f}; {enough}"
        )
    if no_engine := no_engine_error(report.config, report.decoder):
        enough = f"{enough}; " if search.enough_gpus else ""
        return f"{message}; {enough}{no_engine.problem}; {no_engine.fix}"
    if not search.enough_gpus:
        enough = (
            "no engine has room for the model and a sequence (rollout.concurrency, rollout.max_length), or "
            "reference and critic leave it no GPU (reference.ranks, critic.ranks)"
        )
    return f"{message}; {enough}"


def notes(given: Config, choices: Sequence[Row] = ()) -> list[str]:
    """Returns notes for the user about given settings left out of all layouts, about engines with FP8 blocks other than
    the policy's, and about engines on several nodes; [] without any.

    Args:
        given: The given settings.
        choices: Suggested rows, numbered from 1 in the notes.
    """
    lines = [*filter(None, [dynamic.note(given)])]
    policy = given.policy
    if policy.optimizer.streamed and policy.precision.parameters == "fp8":
        lines.append(
            "policy.optimizer.streamed=true was left out: it does not work with policy.precision.parameters=fp8; "
            "policy.precision.parameters=model allows it"
        )
    if differing := [number for number, row in enumerate(choices, start=1) if row.partial_blocks]:
        lines.append(
            f"the engines of {', '.join(map(str, differing))} have other blocks of FP8 than policy and weight sync, "
            "and round differently (mismatch/*): so does every engine on so many GPUs; the layout's dry run says more"
        )
    large = [n for n, row in enumerate(choices, start=1) if _spans_nodes(row.suggestion.config)]
    if large:
        lines.append(
            f"engines of {', '.join(map(str, large))} lie on several nodes, as none inside a node holds the model and "
            "a sequence: they are planned alone, and a run refuses them"
        )
    return lines


def values(report: Report) -> dict[str, Any]:
    """Returns all suggestions as plain values, in bytes and seconds: `gpus`, `tried` (settings), `complete`, `stopped`
    (by Ctrl-C), `layouts` (tried), `untried` (layouts), `enough` (a sufficient number of GPUs or None), `notes`, and
    the values below.

    `room` (a memory warning) is given only for the first layouts, `why` only if nothing fits, `cut` only for an
    incomplete search; else they are missing or null. `rows` are the distinct choices, with the index in `found`;
    `given` are the settings as they are, `factors` the ends of the first row's error bar (factors of its seconds),
    `saves_between` the ends of the error bar of what this row saves, `changes` the changes from `given` to this row,
    each made alone, `phases` the seconds of a step by phase of the first rows (by number), `steps` the
    number of RL steps or null, and `simulated` is null without simulations.
    """
    search, rows, decoder = report.search, report.rows, report.decoder
    return {
        "gpus": search.gpus,
        "tried": search.evaluated,
        "complete": search.complete,
        "stopped": search.stopped,
        "layouts": search.layouts,
        "untried": [layout(parallel) for parallel in search.untried],
        "cut": None if search.complete else cut_text(search),
        "enough": search.enough_gpus,
        "why": None if search.suggestions else _misfit_text(report),
        "notes": notes(report.config, rows.choices),
        "given": {"why": rows.why} | (_row_values(rows.given, None) if rows.given else {}),
        "rows": [
            {"index": search.suggestions.index(row.suggestion), **_row_values(row, rows.given)} for row in rows.choices
        ],
        "factors": None if rows.bar is None else (rows.bar.low, rows.bar.high),
        "saves_between": changes_text.saved_between(rows, report.comparison.ratio),
        "changes": [
            {"change": dict(each.change), "error": each.error}
            | (_row_values(each.row, rows.given) if each.row else {"seconds": None})
            for each in report.comparison.changes
        ],
        "phases": {number: asdict(time) for number, time in report.comparison.phases.items()},
        "steps": report.comparison.steps,
        "simulated": None if report.simulated is None else _simulated_values(report.simulated, report.config),
        "found": [
            {"overrides": s.overrides, "peak": s.peak, "kv_tokens": s.kv_tokens, "seconds": s.seconds}
            | ({"room": memory_warning(s, decoder)} if i < SHOWN else {})
            for i, s in enumerate(search.suggestions)
        ],
    }


def _simulated_values(simulated: Simulated, config: Config) -> dict[str, Any]:
    given = dict(simulated.rows).get("0")
    return {
        "rows": [{"label": label, **_row_values(row, given)} for label, row in simulated.rows],
        "base": simulated.base,
        "settings": as_arguments(simulated.change) or None,
        "note": simulated.note,
        "notes": dynamic_sampling_notes(config),
    }


def _row_values(row: Row, given: Row | None) -> dict[str, Any]:
    s = row.suggestion
    return {
        "overrides": s.overrides,
        "gpus": row.gpus,
        "peak": s.peak,
        "kv_tokens": s.kv_tokens,
        "seconds": s.seconds,
        "gpu_hours": row.gpu_hours,
        "saves": row.saved(given),
        "free": row.free,
        "room": row.warning,
        "host": row.host,
        "recompute": s.config.policy.recompute,
        "offload_layers": s.config.policy.offload_layers,
        "streamed": s.config.policy.optimizer.streamed,
        "fp8_blocks_differ": row.partial_blocks,
    }


def _numbered(rows: Rows) -> list[tuple[str, Row]]:
    given = [("0", rows.given)] if rows.given else []
    return given + [(str(number), row) for number, row in enumerate(rows.choices, start=1)]


def _simulated_lines(report: Report) -> list[str]:
    """Returns the lines on simulated rows: a table, the change of the fastest asynchronous row, and notes."""
    simulated = report.simulated
    if simulated is None:
        return []
    note = [f"note: {simulated.note}"] if simulated.note else []
    if not simulated.rows:
        return note
    return [
        "simulated as by --simulate, trajectory by trajectory, so seconds differ from those above: compare rows of the",
        "same table only;",
        "synchronous rows beside asynchrony.mode with max_staleness in the best split:",
        *_table(simulated.rows, dict(simulated.rows).get("0")),
        f"for the fastest asynchronous row add to {simulated.base}: {as_arguments(simulated.change)}",
        *(f"note: {each}" for each in dynamic_sampling_notes(report.config)),
        *note,
    ]


def _table(rows: Sequence[tuple[str, Row]], given: Row | None) -> list[str]:
    """Returns the lines of a table; a last line has the columns in which all rows agree."""
    cells = [_cells(label, row, given if row is not given else None) for label, row in rows]
    agreeing = {
        i: name
        for i, name in enumerate(HEAD)
        if name not in ALWAYS and len(cells) > 1 and len({row[i] for row in cells}) == 1
    }
    hidden = () if _differ_in_gpus(row for _, row in rows) else (COST,)
    agreeing = {i: name for i, name in agreeing.items() if name not in hidden}
    shown = [i for i, name in enumerate(HEAD) if i not in agreeing and name not in hidden]
    same = ", ".join(f"{name} {cells[0][i]}" for i, name in agreeing.items())
    left = 2 if 1 in agreeing else 3
    lines = aligned([[row[i] for i in shown] for row in (HEAD, *cells)], left=left)
    return [*lines, *([f"in every row: {same}"] if same else [])]


def _cells(number: str, row: Row, given: Row | None) -> tuple[str, ...]:
    s, config = row.suggestion, row.suggestion.config
    policy, rollout, saved = config.policy, config.rollout, row.saved(given)
    return (
        number,
        str(policy_ranks(config)),
        layout(s.parallel),
        str(policy.micro_tokens),
        policy.recompute + (f"/{policy.offload_layers}" if policy.offload_layers else ""),
        f"{rollout.engines} × {_engine(rollout)}{' *' * row.partial_blocks}",
        f"{rollout.memory_fraction:g}",
        _keep(s),
        f"{s.kv_tokens:,}",
        room(row),
        host(row),
        f"{s.seconds:.{0 if s.seconds >= 1000 else 1}f}",
        "–" if saved is None else f"{saved:.0%}",
        f"{row.gpu_hours:,.0f}" if row.gpu_hours >= 100 else f"{row.gpu_hours:.3g}",
    )


def _differ_in_gpus(rows: Iterable[Row]) -> bool:
    """Returns True if some rows use more GPUs than others."""
    return len({row.gpus for row in rows}) > 1


def _spans_nodes(config: Config) -> bool:
    """Returns True if an engine has more GPUs than a node."""
    return engine_ranks(config.rollout) > engine_cluster(config).gpus_per_node


def _engine(rollout: RolloutConfig) -> str:
    """Returns the sizes of an engine, such as `TP8 DP4 EP`."""
    data = f" DP{engine_data(rollout)}" if engine_data(rollout) > 1 else ""
    return f"TP{rollout.tensor}{data}{' EP' * expert_parallel(rollout)}"


def _keep(s: Suggestion) -> str:
    """Returns letters for the parts that stay on the device in every phase, and `s` for a streamed optimizer."""
    keep, streamed = s.config.residency.keep, " s" * s.config.policy.optimizer.streamed
    if keep is None:
        return f"all{streamed}"
    return ("".join(LETTERS[part] for part in keep if part in LETTERS) or "none") + streamed


def layout(p: ParallelDims) -> str:
    """Returns the parallel sizes above 1 as text: `TP2 EP8 DP16`; `alone` for a single rank. `Ulysses2` is context
    parallelism of 2 with an all-to-all."""
    context = "Ulysses" if p.by_heads else "CP"
    sizes = {"TP": p.tensor, "PP": p.pipeline, "VPP": p.virtual_pipeline, context: p.context, "EP": p.expert}
    return shape(sizes | {"ETP": p.expert_tensor, "DP": p.data})
