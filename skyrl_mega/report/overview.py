"""The page of a run or of several runs: learning curves, times, settings and locations."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from skyrl_mega.common.secrets import hidden
from skyrl_mega.config.keys import keys
from skyrl_mega.report import estimate, gantt, header, incidents, plots, timeline
from skyrl_mega.report.document import document, save, table
from skyrl_mega.report.run_data import RunData, read
from skyrl_mega.telemetry.step_timeline import StepTimeline
from skyrl_mega.telemetry.table import duration, number

FILE = "report.html"
"""Name of the page in a run's folder."""


@dataclass(frozen=True)
class Plot:
    """A plot with a line for each metric."""

    title: str
    metrics: tuple[str, ...]
    """Names of metrics; `*` matches any text without `/`."""
    about: str = ""
    """Unit or explanation beside the title."""
    log: bool = False
    """True for a logarithmic axis."""


SECTIONS: tuple[tuple[str, tuple[Plot, ...]], ...] = (
    (
        "What it learned",
        (
            Plot("reward", ("reward/mean",), "mean of the step's trajectories"),
            Plot("evaluation", ("eval/*/mean",), "mean on held-out prompts"),
            Plot("solved at least once", ("reward/pass_at_n", "eval/*/pass_at_*"), "share of prompts"),
        ),
    ),
    (
        "Optimisation",
        (
            Plot("loss", ("policy/loss",)),
            Plot("entropy", ("policy/entropy",), "nats"),
            Plot("KL", ("policy/kl", "policy/kl_old"), "nats"),
            Plot("gradient norm", ("policy/grad_norm",), "before clipping"),
            Plot("clipped tokens", ("policy/clip_fraction", "policy/dual_clip_fraction"), "share"),
            Plot("learning rate", ("policy/lr",)),
        ),
    ),
    (
        "Engine against policy",
        (
            Plot(
                "log-prob mismatch",
                ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_p99", "mismatch/logprob_abs_max"),
                "nats: mean, p99, max",
                True,
            ),
            Plot("mismatch KL", ("mismatch/kl",), "engine ‖ policy", True),
            Plot("importance weight", ("policy/importance_weight",), "mean; 1 is no mismatch"),
            Plot("staleness", ("asynchrony/staleness_mean", "asynchrony/staleness_max"), "syncs: mean, max"),
        ),
    ),
    (
        "Trajectories",
        (
            Plot("response length", ("rollout/response_length_mean",), "tokens"),
            Plot("cut short or failed", ("rollout/truncated_fraction", "rollout/failed_fraction"), "share"),
            Plot("turns", ("rollout/turns_mean",)),
            Plot(
                "groups that differ", ("rollout/groups_differ", "rollout/answers_differ"), "share: in reward, in text"
            ),
            Plot("tokens written", ("rollout/tokens",), "a step"),
            Plot("dynamic sampling", ("rollout/groups_left_out", "rollout/groups_missing"), "groups"),
            Plot("ahead of training", ("asynchrony/groups_done", "asynchrony/groups_under_way"), "groups"),
        ),
    ),
    (
        "Speed",
        (
            Plot("idle", ("idle/engines", "idle/policy", "idle/environments"), "share of a step's time"),
            Plot("tokens per second", ("perf/tokens_per_s",)),
            Plot("weight sync", ("time/sync", "time/sync/transfer", "time/sync/pause"), "seconds"),
            Plot(
                "bytes of a sync",
                ("sync/bytes_in_max", "sync/bytes_in_ideal"),
                "into the busiest worker; the least possible",
            ),
            Plot("MFU", ("perf/mfu", "perf/mfu_logprobs"), "model FLOPs over the peak"),
            Plot("decoding", ("perf/decode_bandwidth_share",), "bytes read over the memory's rate"),
            Plot("memory of the policy", ("memory/policy_*_gib",), "GiB: the most in each phase"),
            Plot("memory of engines", ("memory/engine_*_gib",), "GiB: the most in each phase"),
            Plot("memory of GPUs and nodes", ("memory/device_*_gib", "memory/host_gib"), "GiB, by all programs"),
        ),
    ),
)
FLAT_STEPS = 3
"""Smallest number of points of a line shown small because the values are equal."""
PHASES = ("generate", "logprobs", "train", "sync", "eval", "checkpoint", "other")
"""Phases of a step's time, from the bottom of the stack; further phases of a run follow."""


def write(folders: Sequence[Path], file: Path | None = None) -> Path:
    """Writes the HTML page of one or more runs and returns the path of the page.

    Args:
        folders: Folders of the runs; not empty.
        file: Path of the page; None writes `report.html` in the first folder. An older page is replaced.

    Raises:
        UserError: A folder does not belong to a run, a file in it cannot be read, or the page cannot be written, as
            over a file that is no such page.
    """
    runs = [read(folder) for folder in folders]
    file = file or folders[0] / FILE
    save(file, page(runs))
    return file


def write_timeline(folder: Path, steps: Sequence[StepTimeline], file: Path) -> Path:
    """Writes an HTML page with only the timeline picture of some steps, and returns the path.

    Args:
        folder: Folder of the run.
        steps: Timelines of the steps, in order; not empty.
        file: Path of the page. An older page is replaced.

    Raises:
        UserError: The folder does not belong to a run, or the file cannot be written.
    """
    run = read(folder)
    [name] = _names([run])
    body = f'<main class="report"><header><h1>{escape(name)}</h1></header>{timeline_figure(steps, _phases(run))}</main>'
    save(file, document(name, body, styles=["run.css"], programs=["run.js"], blocks={"points": {}}))
    return file


def write_at_end(folder: Path, say: Callable[[str], None]) -> None:
    """Writes `report.html` of a run at its end; never raises: an error is only reported by `say`. An older page is
    replaced."""
    try:
        write([folder])
    except Exception as error:
        say(f"{FILE} was not written: {error!r}")


def page(runs: Sequence[RunData], live: str = "") -> str:
    """Returns the HTML page of the runs, with secrets masked.

    Args:
        runs: The runs, at least one.
        live: Version of a page that asks its server for newer versions; empty for a file.

    Raises:
        UserError: The events, a timeline or `estimate.json` of a run cannot be read.
    """
    names, several = _names(runs), len(runs) > 1
    titled = [(run, name if several else "") for run, name in zip(runs, names, strict=True)]
    points: dict[str, Any] = {}
    body = [f"<header><h1>{escape(' · '.join(names))}</h1></header>", header.html(runs, names)]
    body += [_legend(names)] if several else []
    body += [incidents.html(run, name, several) for run, name in zip(runs, names, strict=True)]
    body.append(_comparison(runs, names) if several else _tiles(runs[0]))
    for title, section in SECTIONS:
        figures = [_time(run, name, points) for run, name in titled] if title == "Speed" else []
        flat = []
        for plot in section:
            lines = _lines(plot, runs, names)
            if _are_flat(lines):
                flat.append(_flat(plot, lines))
            else:
                figures.append(_figure(plot, lines, runs, points))
        if title == "Speed":
            body += [_timelines(run, name) for run, name in titled]
        if any(figures) or flat:
            small = f"<p class='flat num'><span class='soft'>unchanged</span>{''.join(flat)}</p>" if flat else ""
            body.append(f"<section><h2>{title}</h2><div class='plots'>{''.join(figures)}</div>{small}</section>")
    body += [header.story_html(run, name) for run, name in titled]
    body += [estimate.table(run, name) for run, name in titled]
    body.append(_settings(runs, names))
    body += [_places(run, name) for run, name in titled]
    main = f'<main class="report">{"".join(body)}</main>'
    return document(
        " · ".join(names),
        main,
        styles=["run.css", *(["live.css"] if live else [])],
        programs=["run.js", *(["live.js"] if live else [])],
        blocks={"points": points, **({"live": {"version": live}} if live else {})},
        served=bool(live),
    )


def _names(runs: Sequence[RunData]) -> list[str]:
    """Returns the folders' names, or full paths if two names are equal."""
    names = [hidden(run.name) for run in runs]
    return names if len(set(names)) == len(names) else [hidden(str(run.folder)) for run in runs]


def _legend(names: Sequence[str]) -> str:
    return f'<p class="legend">{"".join(_key(f"s{i % plots.COLOURS}", name) for i, name in enumerate(names))}</p>'


def _key(style: str, name: str, value: str = "") -> str:
    """Returns an entry of a legend: the look of the line, the name and a value."""
    return f'<span><i class="key {style}"></i>{escape(name)}{f" <b>{value}</b>" if value else ""}</span>'


def _lines(plot: Plot, runs: Sequence[RunData], names: Sequence[str]) -> list[plots.Series]:
    """Returns the lines of a plot: for each run the metrics that the run contains."""
    several = len(runs) > 1
    lines = []
    metrics = list(dict.fromkeys(m for run in runs for m in _matching(run, plot.metrics)))
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        for k, metric in enumerate(metrics):
            xs, ys = run.series(metric)
            if xs:
                label = f"{name}: {metric}" if several and len(metrics) > 1 else name if several else metric
                lines.append(plots.Series(label, xs, ys, colour=i if several else k, dash=k if several else 0))
    return lines


def _are_flat(lines: Sequence[plots.Series]) -> bool:
    """Returns True if every line of a plot keeps its first value, over enough steps to say so."""
    return bool(lines) and all(len(line.ys) >= FLAT_STEPS and plots.is_flat(line.ys) for line in lines)


def _flat(plot: Plot, lines: Sequence[plots.Series]) -> str:
    """Returns a small entry for a plot of unchanged values."""
    values = "".join(_key(f"s{line.colour % plots.COLOURS}", line.name, number(line.ys[-1])) for line in lines)
    return f"<span class='unchanged'>{escape(plot.title)} {values}</span>"


def _figure(plot: Plot, lines: Sequence[plots.Series], runs: Sequence[RunData], points: dict[str, Any]) -> str:
    """Returns a plot with title, legend, last values and marks, or an empty text without lines."""
    if not lines:
        return ""
    if len(runs) == 1:
        labels = [_key(f"s{line.colour % plots.COLOURS}", line.name, number(line.ys[-1])) for line in lines]
    else:
        metrics = list(dict.fromkeys(m for run in runs for m in _matching(run, plot.metrics)))
        labels = [_key(f"d{min(2, k)}", metric) for k, metric in enumerate(metrics)] if len(metrics) > 1 else []
    marks = _marks(runs)
    return _card(plot.title, plot.about, plots.lines(lines, plot.log, marks), labels, lines, points)


def _marks(runs: Sequence[RunData]) -> list[plots.Mark]:
    """Returns the marks of a plot; for several runs in the colours of the runs."""
    several = len(runs) > 1
    names = _names(runs)
    return [
        plots.Mark(
            mark.step, hidden(f"{name}: {mark.text}" if several else mark.text), mark.kind, i if several else None
        )
        for i, (run, name) in enumerate(zip(runs, names, strict=True))
        for mark in run.marks
    ]


def _time(run: RunData, name: str, points: dict[str, Any]) -> str:
    """Returns a stacked plot of the seconds of each phase of a step."""
    phases = _phases(run)
    rows = [row for row in run.rows if "time/step" in row]
    if not rows or not phases:
        return ""
    xs = [row["step"] or 0.0 for row in rows]
    layers = [[max(0.0, row.get(f"time/{phase}") or 0.0) for row in rows] for phase in phases]
    total = sum(map(sum, layers)) or 1.0
    by_phase = list(enumerate(zip(phases, layers, strict=True)))
    labels = [_key(f"s{k % plots.COLOURS}", phase, f"{sum(layer) / total:.0%}") for k, (phase, layer) in by_phase]
    series = [plots.Series(phase, xs, layer, k) for k, (phase, layer) in by_phase]
    title = f"where a step's time goes{f': {name}' if name else ''}"
    return _card(title, "seconds", plots.stacked(phases, xs, layers, _marks([run])), labels, series, points)


def _phases(run: RunData) -> list[str]:
    """Returns the phases of a run's steps; the position selects the colour."""
    phases = [
        m.removeprefix("time/") for m in run.names if m.startswith("time/") and m.count("/") == 1 and m != "time/step"
    ]
    return [*(p for p in PHASES if p in phases), *(p for p in phases if p not in PHASES)]


def _timelines(run: RunData, name: str) -> str:
    """Returns the timeline picture of the newest steps, or an empty text without timelines."""
    steps = timeline.read(run.folder, last=run.steps)
    if not steps:
        return ""
    command = f"python -m skyrl_mega.report timeline {hidden(str(run.folder))} --trace trace.json.gz"
    title = f"Who did what when{f': {escape(name)}' if name else ''}"
    return (
        f"<section><h2>{title} <small class='soft'>the newest steps</small></h2>{timeline_figure(steps, _phases(run))}"
        f"<p class='soft'>For Perfetto: <code>{escape(command)}</code></p></section>"
    )


def timeline_figure(steps: Sequence[StepTimeline], phases: Sequence[str]) -> str:
    """Returns the timeline picture of some steps, with title, legend and mean idle shares, as an HTML figure.

    Args:
        steps: Timelines of the steps, in order; not empty.
        phases: Phases of the whole run; the position of a phase selects its colour.
    """
    shown_phases = list(dict.fromkeys(span.name for step in steps for span in step.phases))
    ordered = [*(p for p in phases if p in shown_phases), *(p for p in shown_phases if p not in phases)]
    places = [*phases, *(p for p in shown_phases if p not in phases)]
    colours = {name: places.index(name) for name in ordered}
    keys = "".join(_key(f"s{k % plots.COLOURS}", name) for name, k in colours.items())
    idle = [step.idle() for step in steps]
    shares = "".join(f"<span>{n} <b>{sum(of[n] for of in idle) / len(idle):.0%}</b></span>" for n in idle[0])
    about = "height: requests and calls under way; washed: with any; grey: a sync or a move of memory"
    return (
        f'<figure class="broad"><figcaption>phases, ranks, engines, environments <small class="soft">{about}</small>'
        f'</figcaption>{gantt.picture(steps, colours)}<p class="labels num">{keys}{shares}</p></figure>'
    )


def _card(
    title: str,
    about: str,
    drawing: plots.Drawing,
    labels: Sequence[str],
    series: Sequence[plots.Series],
    points: dict[str, Any],
) -> str:
    """Returns a plot with title and legend. The points are passed to the page's program, for display at the mouse."""
    key = f"plot-{len(points)}"
    points[key] = {
        "low": drawing.low,
        "high": drawing.high,
        "marks": [[mark.x, mark.text] for mark in drawing.marks],
        "series": [
            {"name": s.name, "colour": s.colour % plots.COLOURS, "xs": s.xs, "ys": [_plain(y) for y in s.ys]}
            for s in series
        ],
    }
    note = f' <small class="soft">{escape(about)}</small>' if about else ""
    legend = f'<p class="labels num">{"".join(labels)}</p>' if labels else ""
    return f'<figure id="{key}"><figcaption>{escape(title)}{note}</figcaption>{drawing.svg}{legend}</figure>'


def _tiles(run: RunData) -> str:
    """Returns the most important figures of a run."""
    of = f" of {run.planned}" if run.planned else ""
    tiles = [("steps", f"{run.steps}{of}", "")]
    for metric in _matching(run, ("reward/mean", "eval/*/mean")):
        ys = run.values(metric)
        if ys:
            tiles.append((metric, f"{number(ys[0])} → {number(ys[-1])}", f"best {number(max(ys))}"))
    seconds = run.values("time/step")
    tokens = run.values("rollout/tokens")
    if seconds:
        tiles.append(("time of all steps", duration(sum(seconds)), f"{duration(sum(seconds) / len(seconds))} a step"))
    if seconds and tokens:
        tiles.append(("tokens per second", number(sum(tokens) / sum(seconds)), f"{sum(tokens):,.0f} written"))
    if run.checkpoints:
        tiles.append(
            ("newest checkpoint", run.checkpoints[-1][0].name.removeprefix("step_").lstrip("0") or "0", "step")
        )
    cells = "".join(
        f"<div class='tile'><span class='soft'>{escape(name)}</span><b class='num'>{escape(value)}</b>"
        f"<small class='soft num'>{escape(note)}</small></div>"
        for name, value, note in tiles
    )
    return f"<div class='tiles'>{cells}</div>"


def _comparison(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Returns a table with a row for each run: first and last value of the main metrics."""
    metrics = list(dict.fromkeys(m for run in runs for m in _matching(run, ("reward/mean", "eval/*/mean"))))
    titles = ["run", "steps", *metrics, "seconds a step", "tokens per second", "state"]
    rows = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        cells = [f'<i class="key s{i % plots.COLOURS}"></i>{escape(name)}', str(run.steps)]
        for metric in metrics:
            ys = run.values(metric)
            cells.append(f"{number(ys[0])} → {number(ys[-1])}" if ys else "·")
        for metric in ("time/step", "perf/tokens_per_s"):
            ys = run.values(metric)
            cells.append(number(sum(ys) / len(ys)) if ys else "·")
        cells.append("ended by a fault" if run.fault and run.fault.last else "")
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return table(rows, titles, "num")


def _settings(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Returns a table of settings with other values than the defaults. For several runs, differing settings come
    first."""
    known = keys()
    changed = sorted(
        {key for run in runs for key in run.changed}, key=lambda k: (list(known).index(k) if k in known else 1e9, k)
    )

    def differs(key: str) -> bool:
        return len({json.dumps(_value(run, key), default=str, sort_keys=True) for run in runs}) > 1

    rows = []
    for key in sorted(changed, key=lambda k: not differs(k)):
        default = _code(known[key].default) if key in known else "<span class='soft'>unknown key</span>"
        cells = "".join(f"<td>{_code(_value(run, key))}</td>" for run in runs)
        mark = " class=differs" if differs(key) else ""
        rows.append(f"<th{mark}>{escape(key)}</th>{cells}<td class='soft'>{default}</td>")
    about = "not the defaults" if len(runs) == 1 else "not the defaults in some run; where the runs differ, marked"
    heads = ["key", *(names if len(runs) > 1 else ["value"]), "default"]
    return f"<section><h2>Settings <small class='soft'>{about}</small></h2>{table(rows, heads)}</section>"


def _places(run: RunData, name: str) -> str:
    """Returns a table of the run's files and checkpoints, and the command for viewing trajectories."""
    places = [(what, hidden(str(place)), "") for what, place in run.places if what != "report"]
    places += [("checkpoint", hidden(str(folder)), f"{size / 1e6:,.1f} MB") for folder, size in run.checkpoints]
    rows = [
        f"<th>{escape(what)}</th><td><code>{escape(place)}</code></td><td class='num soft'>{escape(size)}</td>"
        for what, place, size in places
    ]
    title = f"Where everything is{f': {escape(name)}' if name else ''}"
    command = f"python -m skyrl_mega.report trajectories {hidden(str(run.folder))} --html trajectories.html"
    return (
        f"<section><h2>{title}</h2>{table(rows)}"
        f"<p class='soft'>What the policy wrote: <code>{escape(command)}</code></p></section>"
    )


def _matching(run: RunData, patterns: Sequence[str]) -> list[str]:
    """Returns the metrics of a run matching the patterns; `*` does not match `/`."""
    return [
        name
        for pattern in patterns
        for name in run.names
        if fnmatch.fnmatchcase(name, pattern) and name.count("/") == pattern.count("/")
    ]


def _value(run: RunData, key: str) -> Any:
    known = keys()
    return run.settings.get(key, known[key].default if key in known else None)


def _code(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return f"<code>{escape(text)}</code>" if text else "<span class='soft'>(empty)</span>"


def _plain(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
