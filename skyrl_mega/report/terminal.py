"""Trajectories as text: a line of figures, then the conversation.

The policy's turns have a thick bar on the left, other messages a thin bar, so that the difference is visible without
colour. Colours appear only on a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from skyrl_mega.common.terminal import printable
from skyrl_mega.report.records import Part, Record
from skyrl_mega.telemetry.table import duration
from skyrl_mega.trajectories.trajectory import GREEDY

WIDEST = 120
"""Most columns of a line, for comfortable reading."""
MARGIN = 10
"""Columns for the speaker's name."""
ROLES = {"system": "magenta", "user": "blue", "tool": "yellow"}
POLICY, JUDGED, FAILED = "green", "bright_black", "bold red"


@dataclass(frozen=True)
class FigureColumn:
    """A column in the lines of trajectories."""

    title: str
    show: Callable[[Record], str]
    """Returns the cell of a trajectory."""
    left: bool = False
    """True to align cells to the left."""


COLUMNS = (
    FigureColumn("run", lambda r: r.run, left=True),
    FigureColumn("step", lambda r: "–" if r.step is None else str(r.step)),
    FigureColumn("prompt", lambda r: str(r.uid)),
    FigureColumn("sample", lambda r: "greedy" if r.sample == GREEDY else str(r.sample)),
    FigureColumn("reward", lambda r: f"{r.reward:.3f}"),
    FigureColumn("status", lambda r: r.status, left=True),
    FigureColumn("turns", lambda r: str(r.turns)),
    FigureColumn("tokens", lambda r: f"{r.prompt_length} + {r.response_length}"),
    FigureColumn("generate", lambda r: _seconds(r, "generate")),
    FigureColumn("env", lambda r: _seconds(r, "env")),
    FigureColumn("weights", lambda r: r.weights, left=True),
)


class View:
    """A printer of trajectories with aligned columns.

    Args:
        console: The output.
        records: All trajectories to print; these determine the column widths.
    """

    def __init__(self, console: Console, records: Sequence[Record]) -> None:
        self._console = console
        self._width = min(console.width, WIDEST)
        several = len({r.run for r in records}) > 1
        self._columns = [column for column in COLUMNS if several or column.title != "run"]
        self._widths = [max([len(column.title), *(len(column.show(r)) for r in records)]) for column in self._columns]

    def titles(self) -> None:
        """Prints a line with the titles of the columns."""
        self._line(self._row([column.title for column in self._columns]), "bright_black")

    def figures(self, record: Record) -> None:
        """Prints the line of a trajectory: step, reward, status, lengths and times, without its messages."""
        text = Text()
        for i, (column, cell) in enumerate(zip(self._columns, self._cells(record), strict=True)):
            text.append("  " if i else "")
            text.append(cell, Style.parse(_colour(column.title, record) or "bold"))
        self._print(text)

    def whole(self, record: Record) -> None:
        """Prints a trajectory: figures, error, tools, conversation, metadata of the environment, and ground truth."""
        self._line("─" * self._width, "bright_black")
        self.titles()
        self.figures(record)
        for speaker, content, style, bar, note in self._speeches(record):
            self._line("")
            for i, line in enumerate(self._wrapped(content)):
                label = speaker[: MARGIN - 1] if i == 0 else ""
                self._print(Text.assemble((label.ljust(MARGIN), style), (f"{bar} ", style), line))
            for line in self._wrapped(note) if note else ():
                self._line(" " * (MARGIN + 2) + line.plain, "bright_black")
        self._line("")

    def _speeches(self, record: Record) -> Iterator[tuple[str, str, str, str, str]]:
        """Yields speaker, text, style, bar and note of each message, and of the facts around the conversation."""
        turn = conversation = 0
        if record.error:
            yield "error", record.error, FAILED, "!", ""
        if record.tools:
            yield "tools", "\n".join(map(tool_text, record.tools)), JUDGED, "·", ""
        for part in record.parts:
            turn += part.by_policy
            conversation += part.kind == "prompt"
            if part.kind == "prompt" and conversation > 1:
                yield "", f"conversation {conversation}: the policy sees nothing of the above", JUDGED, "·", ""
            for message in part.messages:
                if part.by_policy:
                    yield f"policy {turn}", message["content"], POLICY, "┃", _note(part)
                else:
                    yield printable(message["role"]), message["content"], ROLES.get(message["role"], "cyan"), "│", ""
        if record.metadata:
            yield "judged", json.dumps(record.metadata, ensure_ascii=False), JUDGED, "·", ""
        if record.truth is not None:
            truth = record.truth
            yield "truth", truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False), JUDGED, "·", ""

    def _wrapped(self, content: str) -> list[Text]:
        """Returns the text wrapped to the width."""
        lines: list[Text] = []
        for line in content.strip("\n").split("\n"):
            lines += Text(printable(line.expandtabs(4))).wrap(self._console, self._width - MARGIN - 2) or [Text()]
        return lines

    def _cells(self, record: Record) -> list[str]:
        return self._aligned([column.show(record) for column in self._columns])

    def _row(self, cells: list[str]) -> str:
        return "  ".join(self._aligned(cells)).rstrip()

    def _aligned(self, cells: list[str]) -> list[str]:
        return [
            cell.ljust(width) if column.left else cell.rjust(width)
            for column, cell, width in zip(self._columns, cells, self._widths, strict=True)
        ]

    def _line(self, text: str, style: str = "") -> None:
        self._print(Text(text, style))

    def _print(self, text: Text) -> None:
        text.rstrip()
        self._console.print(text, soft_wrap=True)


def tool_text(tool: Mapping[str, Any]) -> str:
    """Returns a tool of a chat template as a line: `search(query: string, topk: integer): Searches the corpus.`

    An unknown format is returned as JSON.
    """
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return json.dumps(tool, ensure_ascii=False)
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    arguments = [
        f"{name}: {kind}" if isinstance(of, dict) and isinstance(kind := of.get("type"), str) else name
        for name, of in (properties if isinstance(properties, dict) else {}).items()
    ]
    description = " ".join(str(function.get("description") or "").split())
    return f"{function['name']}({', '.join(arguments)})" + (f": {description}" if description else "")


def _note(part: Part) -> str:
    """Returns the known figures of a response, followed by tool calls on separate lines."""
    notes = []
    if part.start is not None and part.end is not None:
        notes.append(f"{part.end - part.start} tokens")
    if part.finish not in (None, "stop"):
        notes.append(f"ended by {part.finish}")
    if part.reward is not None:
        notes.append(f"reward {part.reward:g}")
    if part.generate_s is not None:
        notes.append(f"generate {_time(part.generate_s)}")
    if part.env_s is not None:
        notes.append(f"env {_time(part.env_s)}")
    calls = [call if isinstance(call, str) else json.dumps(call, ensure_ascii=False) for call in part.tool_calls]
    return "\n".join([" · ".join(notes), *(f"call {call}" for call in calls)])


def _seconds(record: Record, phase: str) -> str:
    return _time(record.seconds[phase]) if phase in record.seconds else "–"


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def _colour(title: str, record: Record) -> str | None:
    if title == "reward":
        return "bold green" if record.reward > 0 else "bold red" if record.reward < 0 else "bold"
    if title == "status" and record.status != "completed":
        return "bold yellow" if record.truncated else "bold red"
    return None
