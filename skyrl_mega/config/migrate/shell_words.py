"""Lexer of shell scripts: words, assignments and operators as plain values. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NAME = re.compile(r"[A-Za-z_]\w*")
_SPECIAL = re.compile(r"[@*#?$!0-9-]")
_OPERATOR = re.compile(r"&&|\|\||;;|<<<|<<-?|[<>]&|&>|>>|[;|&()<>\n]")
_DESCRIPTOR = re.compile(r"\d+(?=[<>])")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_CHANGED = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\s*(?:(?:<<|>>|[-+*/%&|^])?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
CONTINUED = "\\\n"
"""End of a line that continues on the next line."""
_PLAIN = re.compile(r"[^\s\\'\"$`;|&()<>]+")


@dataclass(frozen=True)
class WordPiece:
    """A part of a word: text, a variable, arithmetic or a command."""

    kind: str
    """text, variable (`$X`, `${X:-1}`), arithmetic (`$((…))`) or command (`$(…)`)."""
    content: str
    """The text, or the source between the brackets."""
    quoted: bool
    """True between quotes: the shell then does not split the value into words."""


@dataclass(frozen=True)
class Word:
    """A word of a command, before expansion of variables."""

    pieces: tuple[WordPiece, ...]
    """Parts of the word, in order."""
    source: str
    """The word as written."""


@dataclass(frozen=True)
class Assignment:
    """A variable with its value: `X=1`, `X+=" 2"`, `ARGS=(--a 1)`."""

    name: str
    value: Word | tuple[Word, ...]
    """A word, or the words of an array."""
    appends: bool
    """True for `+=`."""


@dataclass(frozen=True)
class Operator:
    """A separator, bracket or redirection sign between words; `((…))` is a single operator."""

    sign: str
    """The operator as written."""


Token = Word | Assignment | Operator


def changed_names(expression: str) -> set[str]:
    """Returns the names of the variables assigned by an arithmetic expression: `N` for `N=4`, `N+=1` or `N++`."""
    return {name for pair in _CHANGED.findall(expression) for name in pair if name}


def tokens(script: str) -> Iterator[Token]:
    """Yields the words, assignments and operators of a script, without comments and here-documents."""
    return _Lexer(script).tokens()


class _Lexer:
    """Reader of a script from a position."""

    def __init__(self, script: str) -> None:
        """Starts at the first character."""
        self.script, self.at = script, 0
        self.documents: list[str] = []

    def tokens(self) -> Iterator[Token]:
        """Yields tokens until the end of the script."""
        while self._skip_space():
            if self.script.startswith("((", self.at):
                end = self._closing("((", "))", self.at)
                yield Operator(self.script[self.at : end])
                self.at = end
            elif descriptor := _DESCRIPTOR.match(self.script, self.at):
                self.at = descriptor.end()
            elif operator := _OPERATOR.match(self.script, self.at):
                self.at = operator.end()
                if operator[0] == "<<<":
                    self._skip_space()
                    self._word()
                elif operator[0].startswith("<<"):
                    self._skip_space()
                    self.documents.append(re.sub(r"['\"\\]", "", self._word().source))
                elif operator[0] == "\n":
                    self._skip_documents()
                    yield Operator("\n")
                else:
                    yield Operator(operator[0])
            else:
                yield self._assignment() or self._word()

    def _skip_space(self) -> bool:
        """Skips blanks, continued lines and a comment; returns False at the end of the script."""
        while self.at < len(self.script) and (self.script[self.at] in " \t\r" or self._continued()):
            self.at += 2 if self._continued() else 1
        if self.script.startswith("#", self.at):
            end = self.script.find("\n", self.at)
            self.at = len(self.script) if end < 0 else end
        return self.at < len(self.script)

    def _continued(self) -> bool:
        """True at a backslash that continues the line; the shell drops both characters."""
        return self.script.startswith(CONTINUED, self.at)

    def _skip_documents(self) -> None:
        """Skips the here-documents announced on the line before."""
        for end in self.documents:
            found = re.compile(rf"^\s*{re.escape(end)}\s*$", re.MULTILINE).search(self.script, self.at)
            self.at = found.end() if found else len(self.script)
        self.documents = []

    def _assignment(self) -> Assignment | None:
        named = _ASSIGNMENT.match(self.script, self.at)
        if named is None:
            return None
        self.at = named.end()
        if self.script.startswith("(", self.at):
            self.at += 1
            return Assignment(named[1], tuple(self._array()), bool(named[2]))
        return Assignment(named[1], self._word(), bool(named[2]))

    def _array(self) -> Iterator[Word]:
        """Yields the words up to the closing bracket of an array."""
        while self._skip_space():
            if self.script[self.at] == ")":
                self.at += 1
                return
            if operator := _OPERATOR.match(self.script, self.at):
                self.at = operator.end()
            else:
                yield self._word()

    def _word(self) -> Word:
        """Returns the word at the position; an empty word before a blank or an operator."""
        start, pieces = self.at, list[WordPiece]()
        while self.at < len(self.script):
            sign = self.script[self.at]
            if sign in " \t\r\n;|&<>" or sign in "()":
                break
            if sign == "'":
                end = self._find("'", self.at + 1)
                pieces.append(WordPiece("text", self.script[self.at + 1 : end], True))
                self.at = end + 1
            elif sign == '"':
                self.at += 1
                pieces += self._double_quoted()
            elif self._continued():
                self.at += 2
            elif sign == "\\":
                pieces.append(WordPiece("text", self.script[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif sign in "$`":
                pieces.append(self._expansion(quoted=False))
            else:
                plain = _PLAIN.match(self.script, self.at)
                text = plain[0] if plain else sign
                pieces.append(WordPiece("text", text, False))
                self.at += len(text)
        return Word(tuple(pieces), self.script[start : self.at].replace(CONTINUED, ""))

    def _double_quoted(self) -> Iterator[WordPiece]:
        """Yields the pieces up to the closing double quote; an empty piece keeps an empty word."""
        yield WordPiece("text", "", True)
        while self.at < len(self.script) and self.script[self.at] != '"':
            sign = self.script[self.at]
            if self._continued():
                self.at += 2
            elif sign == "\\" and self.script[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`"):
                yield WordPiece("text", self.script[self.at + 1], True)
                self.at += 2
            elif sign in "$`":
                yield self._expansion(quoted=True)
            else:
                end = self.at + 1
                while end < len(self.script) and self.script[end] not in '"\\$`':
                    end += 1
                yield WordPiece("text", self.script[self.at : end], True)
                self.at = end
        self.at += 1

    def _expansion(self, *, quoted: bool) -> WordPiece:
        """Returns the piece of `$…` or of a command between backticks."""
        script, start = self.script, self.at
        if script[start] == "`":
            end = self._find("`", start + 1)
            self.at = end + 1
            return WordPiece("command", script[start + 1 : end], quoted)
        for opening, closing, kind in (("$((", "))", "arithmetic"), ("$(", ")", "command"), ("${", "}", "variable")):
            if script.startswith(opening, start):
                end = self._closing(opening[1:], closing, start + 1)
                self.at = end
                content = script[start + len(opening) : end - len(closing)]
                return WordPiece(kind, content.replace(CONTINUED, "") if kind == "arithmetic" else content, quoted)
        named = NAME.match(script, start + 1) or _SPECIAL.match(script, start + 1)
        self.at = named.end() if named else start + 1
        return WordPiece("variable", named[0], quoted) if named else WordPiece("text", "$", quoted)

    def _closing(self, opening: str, closing: str, at: int) -> int:
        """Returns the position after the bracket that closes the bracket at `at`; brackets nest, quotes hide."""
        pair = {"(": ")", "{": "}"}[opening[0]]
        depth, quote = 0, ""
        while at < len(self.script):
            sign = self.script[at]
            if sign == "\\":
                at += 1
            elif quote:
                quote = "" if sign == quote else quote
            elif sign in "'\"":
                quote = sign
            elif sign == opening[0]:
                depth += 1
            elif sign == pair:
                depth -= 1
                if depth == 0:
                    return at + 1
            at += 1
        return at

    def _find(self, sign: str, at: int) -> int:
        end = self.script.find(sign, at)
        return len(self.script) if end < 0 else end
