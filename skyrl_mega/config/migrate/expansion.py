"""Expansion of shell words by the script's variables; no command is run and no file is read."""

from __future__ import annotations

import ast
import operator
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.migrate.shell_words import Assignment, Word, WordPiece, changed_names, tokens

ENVIRONMENT = "${{oc.env:{}}}"
"""Format of a reference to an environment variable in our configuration, resolved at the start of a run."""
_PARAMETER = re.compile(
    r"(?P<name>\w+|[@*])(?P<all>\[[@*]\])?(?:(?P<operation>:?[-=+?]|%%?|\#\#?)(?P<operand>.*))?", re.DOTALL
)
_INTEGER = re.compile(r"[-+]?\d+")
_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}
LARGEST = 10**15
"""Largest number in the arithmetic of a script."""
LONGEST = 2**24
"""Maximum number of characters of all expanded values of a script together."""
LONGEST_TRIMMED = 10_000
"""Maximum number of characters of a value shortened by `${X%pattern}`."""
DEEPEST = 50
"""Maximum depth of expansions inside of expansions."""
LONGEST_LIST = 10_000
"""Maximum words of `$(seq …)`."""


class Unresolved(Exception):
    """A value unknown without running the shell script; the text is the reason."""


class Unset(str):
    """Value of a variable removed by the script: empty, and replaced by a default such as `${X:-1}` or `${X-1}`."""


class Unknown(str):
    """A word with an unknown value, as written."""

    reason: str
    """Reason why the value is unknown."""

    def __new__(cls, source: str, reason: str) -> Unknown:
        """Returns the word with the reason."""
        word = super().__new__(cls, source)
        word.reason = reason
        return word


Value = str | list[str] | Unresolved
"""A variable: text, an array, or the reason why the value is unknown."""


@dataclass
class Variables:
    """Variables of a shell script, assigned while reading, with the assumptions about the environment."""

    values: dict[str, Value] = field(default_factory=dict)
    """Name → value of each variable assigned so far."""
    folder: str = "."
    """Folder of the script, for the usual expression with `BASH_SOURCE`."""
    absent: set[str] = field(default_factory=set)
    """Variables with a default in the script (`${X:-1}`) that was used, assuming the environment does not set them."""
    environment: set[str] = field(default_factory=set)
    """Variables used but not assigned; our configuration reads their values from the environment of the run."""
    arguments: list[str] | None = None
    """Arguments of the function being read; None outside of functions."""
    steps: int = 0
    """Commands read so far, in all scripts and functions."""
    sourced: int = 0
    """Scripts read with `source` so far."""
    spent: int = 0
    """Number of characters of all values expanded so far."""
    depth: int = 0
    """Depth of nested expansions at the moment."""
    missing: set[str] = field(default_factory=set)
    """Paths of scripts read by `source` but absent on this machine."""

    @property
    def assumptions(self) -> list[str]:
        """Sentences for the user about assumed defaults, environment variables and missing files; empty without any."""
        lines = {
            "the script's defaults hold, as if the environment lacked": self.absent,
            "read from the environment when the run starts:": self.environment,
            "the script reads files that are not here, so their settings are missing:": self.missing,
        }
        return [f"{text} {', '.join(sorted(names))}" for text, names in lines.items() if names]

    def words(self, word: Word) -> list[str]:
        """Expands a word as a shell does: replaces variables and splits unquoted values; returns any number of words,
        [] for an unquoted empty value.

        A variable that the script does not assign becomes a reference to the environment, `${oc.env:NAME}`. Notes used
        defaults and variables of the environment for `assumptions`; `${X:=…}` also assigns the variable.

        Raises:
            Unresolved: The value depends on a command, or on a variable with an unknown value.
            UserError: The script's values exceed `LONGEST` characters.
        """
        results, lists = list[str](), False
        for piece in word.pieces:
            values = self._piece(piece)
            lists = lists or isinstance(values, list)
            if isinstance(values, str):
                values = [values] if piece.quoted or piece.kind == "text" else values.split()
            elif not piece.quoted:
                values = [p for v in values for p in ([v] if isinstance(v, Unknown) else v.split())]
            if values and results:
                last = results.pop()
                results.append(values[0] if last == "" else last + values[0])
                values = values[1:]
            results += values
        return [] if lists and results == [""] else results  # "$@" and "${ARRAY[@]}" without entries are no word

    def known_words(self, word: Word) -> list[str]:
        """Expands a word as a shell does (`words`) and returns any number of words; a word with an unknown value
        becomes a single `Unknown`.

        Raises:
            UserError: The script's values exceed `LONGEST` characters.
        """
        try:
            return self.words(word)
        except Unresolved as reason:
            return [Unknown(word.source, str(reason))]

    def text(self, word: Word) -> str:
        """Expands a word to a single text without splitting, as on the right of an assignment; otherwise like `words`.

        Raises:
            Unresolved: The value depends on a command, or on a variable with an unknown value.
            UserError: The script's values exceed `LONGEST` characters.
        """
        values = (self._piece(piece) for piece in word.pieces)
        return "".join(" ".join(value) if isinstance(value, list) else value for value in values)

    def quoted(self, source: str) -> str:
        """Expands a text as if between double quotes and returns a single text; quotes around the text are removed
        first.

        Raises:
            Unresolved: The value depends on a command, or on a variable with an unknown value.
            UserError: The script's values exceed `LONGEST` characters.
        """
        bare = source[1:-1] if len(source) > 1 and source[0] == source[-1] and source[0] in "'\"" else source
        token = next(tokens('"' + bare.replace('"', '\\"') + '"'), None)
        return self.text(token) if isinstance(token, Word) else ""

    def assign(self, assignment: Assignment) -> None:
        """Sets or extends a variable in `values`; for an unknown value, stores the `Unresolved` with the reason.

        Raises:
            UserError: The script's values exceed `LONGEST` characters.
        """
        name = assignment.name
        before = self.values.get(name, "")
        try:
            if isinstance(assignment.value, tuple):
                entries = [text for word in assignment.value for text in self.known_words(word)]
                old = before if isinstance(before, list) else []
                self.values[name] = [*old, *entries] if assignment.appends else entries
            else:
                text = self.text(assignment.value)
                self.values[name] = f"{before}{text}" if assignment.appends and isinstance(before, str) else text
        except Unresolved as reason:
            self.values[name] = reason

    def _piece(self, piece: WordPiece) -> str | list[str]:
        """Returns the value of a piece.

        Raises:
            Unresolved: The piece needs a running shell, or nests too deep.
            UserError: All values together are too long.
        """
        if self.depth > DEEPEST:
            raise Unresolved(f"it nests deeper than {DEEPEST} levels")
        self.depth += 1
        try:
            value = self._value(piece)
        finally:
            self.depth -= 1
        self.spent += sum(len(text) + 1 for text in value) if isinstance(value, list) else len(value)
        if self.spent > LONGEST:
            raise UserError(f"the script's values have more than {LONGEST} characters", fix="give the arguments")
        return value

    def _value(self, piece: WordPiece) -> str | list[str]:
        if piece.kind == "variable":
            return self._parameter(piece.content)
        if piece.kind == "arithmetic":
            return str(self.arithmetic(piece.content))
        return self._command(piece.content) if piece.kind == "command" else piece.content

    def _parameter(self, source: str) -> str | list[str]:
        """Returns the value of `$source`: a name, with or without an operation such as `:-default`."""
        found = _PARAMETER.fullmatch(source)
        if found is None:
            raise Unresolved(f"${{{source}}} needs a running shell")
        name, operation, operand = found["name"], found["operation"], found["operand"] or ""
        if name in "@*":
            return [*self.arguments] if self.arguments else []
        value = self.values.get(name)
        if name.isdecimal() and self.arguments is not None and name != "0":
            value = "".join(self.arguments[int(name) - 1 : int(name)])
            if any(isinstance(each, Unknown) for each in self.arguments[int(name) - 1 : int(name)]):
                raise Unresolved(f"${name} needs a running shell")
        if isinstance(value, Unresolved):
            raise value
        if operation in (":-", "-", ":=", "="):
            if value is None and not name.isdigit():
                self.absent.add(name)
            value = (
                value
                if value or (value == "" and operation in "-=" and not isinstance(value, Unset))
                else self.quoted(operand)
            )
            if operation in (":=", "="):
                self.values[name] = value
        elif operation in (":+", "+"):
            value = self.quoted(operand) if value else ""
        elif operation and operation[0] in "%#":
            return _trimmed(self._known(name, value), operation, self.quoted(operand))
        return self._known(name, value)

    def _known(self, name: str, value: str | list[str] | None) -> str | list[str]:
        """Returns a value, or for an unassigned variable the text that reads the environment at the run's start."""
        if value is not None:
            return value
        if name.isdigit() or not name.isidentifier():
            raise Unresolved(f"${name} is an argument of the script")
        self.environment.add(name)
        return ENVIRONMENT.format(name)

    def arithmetic(self, source: str) -> int:
        """Evaluates `$((source))` with whole numbers.

        Raises:
            Unresolved: The expression has other operations than + - * / %, an unknown or unassigned variable, a result
                beyond `LARGEST`, or an assignment; the assigned variables then become unknown.
        """
        if names := changed_names(source):
            self.values.update({name: Unresolved(f"{name} is set by arithmetic of the shell") for name in names})
            raise Unresolved(f"$(({source.strip()})) needs a running shell")
        replaced = re.sub(r"\$\{?(\w+)\}?|\b([A-Za-z_]\w*)\b", self._number, source)
        try:
            return _evaluated(ast.parse(replaced.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError) as error:
            raise Unresolved(f"$(({source.strip()})) needs a running shell") from error

    def _number(self, name: re.Match[str]) -> str:
        value = self._parameter(name[1] or name[2])
        if not isinstance(value, str) or not _INTEGER.fullmatch(value.strip() or "0"):
            raise Unresolved(f"{name[1] or name[2]} is no number in this script")
        return f"({value.strip() or 0})"

    def _command(self, source: str) -> str | list[str]:
        """Returns the output of `$(source)` for a few commands with an output known in advance."""
        if re.search(r"BASH_SOURCE|\$0", source) and "dirname" in source:
            return self.folder
        words = [token for token in tokens(source) if isinstance(token, Word)]
        if len(words) == len([*tokens(source)]) and words:
            name, *arguments = [text for word in words for text in self.words(word)]
            if name == "pwd" and not arguments:
                return self._known("PWD", None)
            if name == "seq" and 1 <= len(arguments) <= 3 and all(map(_INTEGER.fullmatch, arguments)):
                return _sequence([int(number) for number in arguments])
            if name in ("basename", "dirname") and len(arguments) == 1:
                return getattr(posixpath, name)(arguments[0].rstrip("/"))
            if name == "echo":
                return " ".join(arguments)
        raise Unresolved(f"$({' '.join(source.split())[:60]}) needs a running shell")


def _sequence(numbers: list[int]) -> list[str]:
    """Returns the output of `seq LAST`, `seq FIRST LAST` or `seq FIRST STEP LAST`."""
    first, step = (numbers[0] if len(numbers) > 1 else 1), (numbers[1] if len(numbers) == 3 else 1)
    if step == 0 or abs(numbers[-1] - first) // abs(step) > LONGEST_LIST:
        raise Unresolved("a `seq` without end or with too many numbers")
    return [str(number) for number in range(first, numbers[-1] + (1 if step > 0 else -1), step)]


def _trimmed(value: str | list[str], operation: str, pattern: str) -> str:
    """Returns a text without the shortest (`%`, `#`) or longest (`%%`, `##`) end or start that matches a pattern."""
    if isinstance(value, list) or set(pattern) & set("?[") or len(value) > LONGEST_TRIMMED:
        raise Unresolved(f"${{…{operation}{pattern}}} needs a running shell")
    sizes = range(len(value) + 1) if len(operation) == 1 else range(len(value), -1, -1)
    for size in sizes:
        start, end = (0, size) if operation[0] == "#" else (len(value) - size, len(value))
        if _matches(value[start:end], pattern):
            return value[size:] if operation[0] == "#" else value[: len(value) - size]
    return value


def _matches(text: str, pattern: str) -> bool:
    """True if a pattern with `*` matches the whole text; the first place of every part is enough."""
    first, *parts = pattern.split("*")
    if not parts:
        return text == first
    last, at = parts.pop(), len(first)
    for part in parts:
        place = text.find(part, at)
        if place < 0:
            return False
        at = place + len(part)
    return text.startswith(first) and text.endswith(last) and at + len(last) <= len(text)


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return -_evaluated(node.operand) if isinstance(node.op, ast.USub) else _evaluated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        result = _ARITHMETIC[type(node.op)](_evaluated(node.left), _evaluated(node.right))
        if abs(result) <= LARGEST:
            return result
    raise ValueError("no arithmetic")
