"""Commands of a shell script with their variables replaced. Nothing is run: conditions are read, loops are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.migrate.expansion import Unknown, Unresolved, Variables
from skyrl_mega.config.migrate.shell_words import Assignment, Operator, Token, Word, tokens

LARGEST = 2**20
"""Maximum bytes of a script."""
DEEPEST = 5
"""Maximum depth of scripts that read other scripts with `source`."""
_ENDS = {"\n", ";", ";;", "&", "|", "&&", "||"}
_ASSIGNING = ("export", "declare", "local", "readonly", "typeset")
_LOOPS = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
_COMPARISONS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}


@dataclass(frozen=True)
class Argument:
    """A word of a command."""

    text: str
    """The word with variables replaced, or as written if `unresolved`."""
    unresolved: str = ""


Command = list[Argument]


@dataclass
class _Branch:
    """An open `if`: the truth of the branch being read, and of an earlier branch."""

    now: bool | None = None
    earlier: bool | None = False
    condition: bool = True
    """True between `if` or `elif` and `then`."""


@dataclass
class Script:
    """Reader of a script and of the scripts that it sources."""

    variables: Variables
    commands: list[Command] = field(default_factory=list)
    depth: int = 0
    _branches: list[_Branch] = field(default_factory=list)
    _last: bool | None = True
    """Result of the last test, for `if` and `&&`; None if unknown."""
    _skip_until: list[str] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Reads a script's text; appends its commands and sets its variables."""
        current: list[Token] = []
        joined = ""  # the operator before the current command
        for token in tokens(text):
            if isinstance(token, Operator) and token.sign in _ENDS:
                self._command(current, joined)
                current, joined = [], token.sign
            else:
                current.append(token)
        self._command(current, joined)

    def _command(self, parts: list[Token], joined: str) -> None:
        """Reads one command: a keyword, a test, an assignment or a program with arguments."""
        while parts and isinstance(parts[0], Word) and (word := parts[0].source) in _KEYWORDS:
            if self._skip_until and word != self._skip_until[-1] and word not in _LOOPS:
                parts = parts[1:]
                continue
            parts = parts[1:]
            if self._keyword(word):
                self._forget(parts)
                return
        if not parts:
            return
        if self._skip_until or self._uncertain():
            self._forget(parts)
        elif self._active() and not ((joined == "&&" and self._last is False) or (joined == "||" and self._last)):
            self._plain(parts)
        else:
            for part in parts:
                if isinstance(part, Assignment):  # the script decides this variable, not the environment
                    self.variables.values.setdefault(part.name, "")

    def _keyword(self, word: str) -> bool:
        """Notes a keyword; returns True if the rest of the command belongs to a loop or a choice."""
        if word in _LOOPS:
            self._skip_until.append(_LOOPS[word])
            return True
        if self._skip_until:
            if word == self._skip_until[-1]:
                self._skip_until.pop()
        elif word == "if":
            self._branches.append(_Branch())
        elif self._branches and word == "fi":
            self._branches.pop()
        elif self._branches and word in ("then", "elif", "else"):
            branch = self._branches[-1]
            if word == "then":
                branch.now = _both(_not(branch.earlier), self._last)
                branch.condition = False
            else:
                branch.earlier = _not(_both(_not(branch.earlier), _not(branch.now)))
                branch.now = _not(branch.earlier)
                branch.condition = word == "elif"
        return False

    def _active(self) -> bool:
        return all(branch.condition or branch.now for branch in self._branches)

    def _uncertain(self) -> bool:
        """True in a branch whose condition is unknown, inside of branches that are taken."""
        states = [True if branch.condition else branch.now for branch in self._branches]
        return None in states and False not in states

    def _forget(self, parts: Iterable[Token]) -> None:
        """Marks the variables of a command as unknown: a loop or an unknown condition decides them."""
        for part in parts:
            if isinstance(part, Assignment):
                self.variables.values[part.name] = Unresolved(f"{part.name} is set in a loop or under a condition")

    def _plain(self, parts: list[Token]) -> None:
        """Reads an assignment, a test, `source`, or a program with its arguments."""
        if isinstance(parts[0], Operator):
            self._last = None if parts[0].sign.startswith("((") else self._last
            return
        while parts and isinstance(parts[0], Assignment):
            self.variables.assign(parts[0])
            parts = parts[1:]
        if not parts or not isinstance(parts[0], Word):
            return
        name = parts[0].source
        if name in _ASSIGNING:
            for part in parts[1:]:
                if isinstance(part, Assignment):
                    self.variables.assign(part)
            return
        arguments = [*self._arguments(parts)]
        if name in ("[", "[[", "test"):
            self._last = _truth([argument for argument in arguments[1:] if argument.text not in ("]", "]]")])
        elif name in ("source", "."):
            self._source(arguments[1:])
        elif name == "printf" and len(arguments) > 2 and arguments[1].text == "-v":
            self.variables.values[arguments[2].text] = Unresolved(f"{arguments[2].text} is set by printf")
        elif name != ":":
            self._last = None
            self.commands.append(arguments)

    def _arguments(self, parts: Iterable[Token]) -> Iterator[Argument]:
        for part in parts:
            if isinstance(part, Operator):
                return  # a redirection
            word = part if isinstance(part, Word) else None
            prefix = ""
            if isinstance(part, Assignment):
                if isinstance(part.value, tuple):
                    continue
                word, prefix = part.value, f"{part.name}{'+' if part.appends else ''}="
            assert word is not None
            try:
                texts = [self.variables.text(word)] if prefix else self.variables.known_words(word)
            except Unresolved as reason:
                texts = [Unknown(word.source, str(reason))]
            for text in texts:
                yield Argument(prefix + text, text.reason if isinstance(text, Unknown) else "")

    def _source(self, arguments: list[Argument]) -> None:
        """Reads a sourced script, if the file is present."""
        if not arguments or arguments[0].unresolved or self.depth >= DEEPEST:
            return
        path = Path(arguments[0].text)
        if not path.is_file():
            self.variables.missing.add(arguments[0].text)
            return
        inner = Script(self.variables, depth=self.depth + 1)
        inner.read(script_text(path))


_KEYWORDS = {"if", "then", "elif", "else", "fi", "do", "done", "esac", "in", "!", "{", "}", "time", "exec", *_LOOPS}


def script_text(path: Path) -> str:
    """Returns the text of a script.

    Raises:
        UserError: The file cannot be read, is too large or is not UTF-8.
    """
    try:
        return safe_read.read(path, "give a script that you may read", most=LARGEST).decode()
    except UnicodeDecodeError as error:
        raise UserError("is no text in UTF-8", key=path) from error


def read(path: Path) -> Script:
    """Returns the commands and variables of a script.

    Raises:
        UserError: The file cannot be read.
    """
    script = Script(Variables(folder=str(path.parent)))
    script.read(script_text(path))
    return script


def _truth(words: list[Argument]) -> bool | None:
    """Returns the result of a test such as `[ "$A" = "b" ]`; None if it needs a running shell."""
    if any(word.unresolved for word in words):
        return None
    match [_unset(word.text) for word in words]:
        case ["!", *rest]:
            inner = _truth([Argument(text) for text in rest])
            return None if inner is None else not inner
        case ["-z", text]:
            return text == ""
        case ["-n", text] | [text]:
            return text != ""
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case [left, sign, right] if sign in _COMPARISONS and left.isdigit() and right.isdigit():
            a, b = int(left), int(right)
            return {"==": a == b, "!=": a != b, ">": a > b, "<": a < b, ">=": a >= b, "<=": a <= b}[_COMPARISONS[sign]]
    return None


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _both(left: bool | None, right: bool | None) -> bool | None:
    """Returns `left and right`, None if an unknown value decides."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _unset(text: str) -> str:
    """Returns "" for a variable that only the environment could set."""
    return "" if text.startswith("${oc.env:") and text.endswith("}") else text
