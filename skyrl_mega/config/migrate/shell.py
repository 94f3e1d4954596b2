"""Commands of a shell script, with variables replaced. Nothing is run: simple conditions are evaluated, loops are
skipped, and the variables set in loops become unknown."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from pathlib import Path

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.migrate.expansion import Unknown, Unresolved, Unset, Value, Variables
from skyrl_mega.config.migrate.shell_words import NAME, Assignment, Operator, Token, Word, changed_names, tokens

LARGEST = 2**20
"""Maximum bytes of a script."""
DEEPEST = 5
"""Maximum depth of scripts that read other scripts with `source`."""
DEEPEST_CALL = 20
"""Maximum depth of functions that call each other."""
MOST_STEPS = 20_000
"""Maximum number of commands read in a script, counting a function's commands at every call."""
MOST_SOURCED = 100
"""Maximum number of scripts read with `source`."""
_ENDS = {"\n", ";", ";;", "&", "|", "&&", "||"}
_READING = ("read", "mapfile", "readarray", "getopts")
"""Commands with variables as arguments, set from input."""
_ASSIGNING = ("export", "declare", "local", "readonly", "typeset")
_LOOPS = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
_COMPARISONS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "lt", "ge", "le")}


@dataclass(frozen=True)
class Argument:
    """A word of a command, after expansion of variables."""

    text: str
    """The word with variables replaced, or as written if `unresolved`."""
    unresolved: str = ""
    """Reason why the value is unknown without running the script; empty for a known value."""


Command = list[Argument]
"""Program and arguments of a command."""


@dataclass
class _Branch:
    """An open `if`: the truth of the branch being read, and of an earlier branch."""

    now: bool | None = None
    earlier: bool | None = False
    condition: bool = True
    """True between `if` or `elif` and `then`."""


@dataclass
class Script:
    """Reader of a shell script and of scripts read with `source`."""

    variables: Variables
    """Variables of the script; changed while reading."""
    commands: list[Command] = field(default_factory=list)
    """Commands read so far, without those of branches not taken."""
    depth: int = 0
    """Number of enclosing scripts, for a script read with `source`."""
    functions: dict[str, list[tuple[list[Token], str]]] = field(default_factory=dict)
    """Commands of each function, read when the function is called."""
    _calls: int = 0
    _locals: dict[str, Value | None] = field(default_factory=dict)
    """Values before the function being read made them local."""
    _branches: list[_Branch] = field(default_factory=list)
    _last: bool | None = True
    """Result of the last test, for `if` and `&&`; None if unknown."""
    _skip_until: list[str] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Reads the text of a script: appends to `commands`, and updates `variables` and `functions`. A second call
        continues with the variables of the first.

        Raises:
            UserError: The script has too many commands, sourced scripts or characters in its values, or a sourced
                script cannot be read.
        """
        self._read([*_separated(text)])

    def _read(self, commands: Sequence[tuple[list[Token], str]]) -> None:
        """Reads commands; the body of a function is kept for its calls.

        Raises:
            UserError: The script calls its functions too often.
        """
        at = 0
        while at < len(commands):
            name, body, end = _function(commands, at)
            if name:
                self.functions[name], at = body, end
                continue
            self.variables.steps += 1
            if self.variables.steps > MOST_STEPS:
                raise UserError(f"the script runs more than {MOST_STEPS} commands", fix="give the arguments themselves")
            self._command(*commands[at])
            at += 1

    def _call(self, name: str, arguments: list[Argument]) -> None:
        """Reads the body of a function; the call itself counts as a command if the body does not pass its words on."""
        variables, before = self.variables, len(self.commands)
        if self._calls < DEEPEST_CALL:
            outer = variables.arguments, self._locals
            words = [Unknown(each.text, each.unresolved) if each.unresolved else each.text for each in arguments]
            variables.arguments, self._locals = words, {}
            self._calls += 1
            self._read(self.functions[name])
            self._calls -= 1
            for local, value in self._locals.items():
                if value is None:
                    variables.values.pop(local, None)
                else:
                    variables.values[local] = value
            variables.arguments, self._locals = outer
        texts = {argument.text for argument in arguments}
        if not any(texts <= {word.text for word in command} for command in self.commands[before:]):
            self.commands.append([Argument(name), *arguments])
        self._last = None

    def _declare(self, name: str, parts: Iterable[Token]) -> None:
        """Reads `export`, `local` and the like; in a function, all but `export` and `readonly` are local."""
        for part in parts:
            variable = part.name if isinstance(part, Assignment) else getattr(part, "source", "")
            if self._calls and name not in ("export", "readonly") and NAME.fullmatch(variable):
                self._locals.setdefault(variable, self.variables.values.get(variable))
                if not isinstance(part, Assignment):
                    self.variables.values[variable] = Unset()
            if isinstance(part, Assignment):
                self.variables.assign(part)

    def _command(self, parts: list[Token], joined: str) -> None:
        """Reads one command: a keyword, a test, an assignment or a program with arguments."""
        while parts and isinstance(parts[0], Word) and (word := parts[0].source) in _KEYWORDS:
            if self._skip_until and word != self._skip_until[-1] and word not in _LOOPS:
                parts = parts[1:]
                continue
            parts = parts[1:]
            if self._keyword(word):
                if word in ("for", "select") and parts and isinstance(parts[0], Word):
                    self._mark({parts[0].source}, "in a loop or under a condition")
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
        parts = [*parts]
        names = {part.name for part in parts if isinstance(part, Assignment)}
        name, _ = _operands(parts)
        for body, _ in self.functions.get(name, []):
            names |= {part.name for part in body if isinstance(part, Assignment)} | _set_by_command(body)
        self._mark(names | _set_by_command(parts) | _removed(parts), "in a loop or under a condition")

    def _mark(self, names: Iterable[str], how: str) -> None:
        """Marks variables as unknown; `how` ends the reason."""
        for name in names:
            self.variables.values[name] = Unresolved(f"{name} is set {how}")

    def _plain(self, parts: list[Token]) -> None:
        """Reads an assignment, a test, `source`, or a program with its arguments."""
        if isinstance(parts[0], Operator):
            self._last = None if parts[0].sign.startswith("((") else self._last
            self._mark(_set_by_command(parts), "by arithmetic of the shell")
            return
        while parts and isinstance(parts[0], Assignment):
            self.variables.assign(parts[0])
            parts = parts[1:]
        if not parts or not isinstance(parts[0], Word):
            return
        name = parts[0].source
        if name in _ASSIGNING:
            self._declare(name, parts[1:])
            return
        if name == "unset":
            self.variables.values.update(dict.fromkeys(_removed(parts), Unset()))
            return
        if names := _set_by_command(parts):
            self._mark(names, f"by {name}")
            self._last = None
            if name != "eval":
                return
        arguments = [*self._arguments(parts)]
        if name in ("[", "[[", "test"):
            self._last = _truth([argument for argument in arguments[1:] if argument.text not in ("]", "]]")])
        elif name in ("source", "."):
            self._source(arguments[1:])
        elif name in self.functions:
            self._call(name, arguments[1:])
        elif name == "shift" and self.variables.arguments:
            count = arguments[1].text if arguments[1:] else "1"
            self.variables.arguments = self.variables.arguments[int(count) if count.isdecimal() else 1 :]
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
        self.variables.sourced += 1
        if self.variables.sourced > MOST_SOURCED:
            raise UserError(f"more than {MOST_SOURCED} scripts are read with `source`", key=path)
        inner = Script(self.variables, depth=self.depth + 1, functions=self.functions)
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
    """Reads a script file and returns the reader with the script's commands and variables.

    Raises:
        UserError: The file or a sourced script cannot be read, or the script is too large.
    """
    script = Script(Variables(folder=str(path.parent)))
    script.read(script_text(path))
    return script


def _set_by_command(parts: Sequence[Token]) -> set[str]:
    """Returns the variables that a command sets without an assignment, such as `read X`, `let X=1` and `((X=1))`."""
    if parts and isinstance(parts[0], Operator):
        return changed_names(parts[0].sign)
    name, operands = _operands(parts)
    texts = [operand.source.strip("'\"") for operand in operands if isinstance(operand, Word)]
    if name in ("let", "eval"):
        assigned = {operand.name for operand in operands if isinstance(operand, Assignment)}
        return assigned.union(*map(changed_names, texts))
    if name in _READING:
        return {text for text in texts if NAME.fullmatch(text)} or {"REPLY", "MAPFILE"}
    return {text for text in texts[1:2] if NAME.fullmatch(text)} if name == "printf" and texts[0] == "-v" else set()


def _removed(parts: Sequence[Token]) -> set[str]:
    """Returns the variables that `unset` removes."""
    name, operands = _operands(parts)
    texts = {operand.source for operand in operands if isinstance(operand, Word)}
    return {text for text in texts if NAME.fullmatch(text)} if name == "unset" and "-f" not in texts else set()


def _operands(parts: Sequence[Token]) -> tuple[str, list[Token]]:
    """Returns the name of a command, and the words behind the name up to a redirection."""
    name, *rest = [*dropwhile(lambda part: isinstance(part, Assignment), parts)] or [Operator("")]
    if not isinstance(name, Word):
        return "", []
    return name.source, [*takewhile(lambda part: not isinstance(part, Operator), rest)]


def _separated(text: str) -> Iterator[tuple[list[Token], str]]:
    """Yields the commands of a script, each with the operator in front."""
    current, joined = list[Token](), ""
    for token in tokens(text):
        if isinstance(token, Operator) and token.sign in _ENDS:
            yield current, joined
            current, joined = [], token.sign
        else:
            current.append(token)
    yield current, joined


def _function(commands: Sequence[tuple[list[Token], str]], at: int) -> tuple[str, list[tuple[list[Token], str]], int]:
    """Returns name, body and end of the function defined at a position; an empty name if none is defined there."""
    parts = commands[at][0]
    signs = [part.sign if isinstance(part, Operator) else getattr(part, "source", "=") for part in parts[:4]]
    start = 1 if signs[:1] == ["function"] else 0
    header = start + 3 if signs[start + 1 : start + 3] == ["(", ")"] else start + 1
    if not start and header == 1:
        return "", [], at
    body, depth = list[tuple[list[Token], str]](), 0
    for n, (each, joined) in enumerate(commands[at:], at):
        inside = list[Token]()
        for part in each[header:] if n == at else each:
            sign = part.source if isinstance(part, Word) else ""
            depth += (sign == "{") - (sign == "}")
            if sign == "}" and not depth:
                return signs[start], [*body, (inside, joined)], n + 1
            if body or inside or sign != "{" or depth > 1:
                inside.append(part)
        if inside and not depth:
            break  # a body in other brackets
        body.append((inside, joined))
    return "", [], at


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
            return bool(_COMPARISONS[sign](int(left), int(right)))
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
