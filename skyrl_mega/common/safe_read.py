"""Bounded reading of external files, in size and depth. Read and write errors are a single line with the file."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from skyrl_mega.common.errors import UserError

MOST_BYTES = 256 * 2**20
"""Default maximum size of a file, and maximum length of a line, in bytes."""
LONGEST_INTEGER = 1023
"""Maximum bits of a whole number; a longer number exceeds every float, and JSON itself has no limit."""
DEEPEST = 100
"""Maximum nesting depth of mappings and lists."""
WHITESPACE = re.compile(r"\s*")
WHOLE_FILE_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Suffixes of model files that libraries load whole."""
FILE_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class Malformed(ValueError):
    """Text with invalid content; the message gives the reason in a few words."""


def parse_json(data: str | bytes, *, most: int = MOST_BYTES, deepest: int = DEEPEST) -> Any:
    """Returns the value of a JSON text with finite numbers, whole numbers of at most `LONGEST_INTEGER` bits, valid
    Unicode and bounded depth.

    Args:
        data: The text.
        most: Maximum length of the text, in bytes or characters.
        deepest: Maximum depth of nested lists and objects.

    Raises:
        Malformed: The text violates one of these rules.
    """
    if len(data) > most:
        raise Malformed(f"it has {len(data)} bytes, allowed are {most}")
    try:
        value = json.loads(data, parse_constant=_reject_constant)
    except RecursionError as error:
        raise Malformed(f"it nests deeper than {deepest} levels") from error
    except UnicodeDecodeError as error:
        raise Malformed(f"it is no UTF-8 at byte {error.start}") from error
    except ValueError as error:  # JSON errors, or numbers with too many digits
        raise Malformed(str(error)) from error
    check_value(value, deepest=deepest)
    return value


def parse_json_at(text: str, start: int, *, most: int = MOST_BYTES) -> tuple[Any, int]:
    """Returns the JSON value at index `start` of a text (whitespace is skipped) and the index after the value. Any text
    may follow the value.

    Raises:
        Malformed: No value begins there, the value has more than `most` characters, or `parse_json` would reject the
            value.
    """
    start = WHITESPACE.match(text, start).end()  # type: ignore[union-attr] # always matches
    try:
        value, end = DECODER.raw_decode(text, start)
    except RecursionError as error:
        raise Malformed(f"it nests deeper than {DEEPEST} levels") from error
    except ValueError as error:  # JSON errors, or numbers with too many digits
        raise Malformed(str(error)) from error
    if end - start > most:
        raise Malformed(f"it has {end - start} characters, allowed are {most}")
    check_value(value)
    return value, end


def check_value(value: Any, *, deepest: int = DEEPEST, numbers: bool = True) -> None:
    """Rejects nesting deeper than `deepest`, broken Unicode and, if `numbers`, non-finite or oversized numbers, in the
    value and in all keys and entries of its mappings, lists and tuples. Values of other types pass. Returns None.

    Raises:
        Malformed: The value violates one of these rules.
    """
    pending = [(value, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > deepest:  # also reached if a YAML anchor contains itself
            raise Malformed(f"it nests deeper than {deepest} levels")
        if isinstance(value, Mapping):
            pending += ((part, depth + 1) for pair in value.items() for part in pair)
        elif isinstance(value, list | tuple):
            pending += ((part, depth + 1) for part in value)
        elif numbers and isinstance(value, float) and not math.isfinite(value):
            raise Malformed(f"{value} is no number")
        elif numbers and isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:
            raise Malformed(f"a whole number of {value.bit_length()} bits is beyond every float")
        elif isinstance(value, str) and not is_unicode(value):
            raise Malformed("it has half of a surrogate pair, which is no valid Unicode text")


def read_json(file: Path, fix: str, *, most: int = MOST_BYTES) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Args:
        file: The file.
        fix: End of the error: the remedy.
        most: Maximum size in bytes.

    Raises:
        UserError: The file cannot be read or is not a JSON object.
    """
    try:
        value = parse_json(read(file, fix, most=most), most=most)
    except Malformed as error:
        raise UserError(f"cannot be read as JSON ({error})", key=file, fix=fix) from error
    if not isinstance(value, dict):
        raise UserError("is no JSON object", key=file, fix=fix)
    return value


def read(file: Path, fix: str, *, most: int = MOST_BYTES) -> bytes:
    """Returns a file's bytes.

    Args:
        file: The file.
        fix: End of the error: the remedy.
        most: Maximum size in bytes.

    Raises:
        UserError: The file cannot be read, or exceeds `most` bytes.
    """
    try:
        with open_regular(file) as opened:
            data = opened.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: the name contains NUL
        raise UserError(error_reason(error), key=file, fix=fix) from error
    if len(data) > most:
        raise UserError(f"it has more than {most} bytes", key=file, fix=fix)
    return data


def open_regular(file: Path) -> BinaryIO:
    """Opens a regular file for reading and returns it, unread, in binary mode; the caller closes the file. Never blocks
    on a FIFO without a writer.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
        ValueError: The name contains NUL.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_kind(file, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def check_regular(file: Path) -> None:
    """Checks that a path is a regular file, before a library opens it: opening a FIFO would block forever.

    Raises:
        OSError: The file is missing or not a regular file.
        ValueError: The name contains NUL.
    """
    _check_kind(file, os.stat(file))


def check_folder(folder: Path, fix: str) -> None:
    """Checks the files of a folder, without subfolders, before libraries open them by path.

    Raises:
        UserError: The folder cannot be listed, a file is not regular, or a file with a suffix of `WHOLE_FILE_SUFFIXES`
            exceeds MOST_BYTES: path, reason and `fix`. A broken link is not an error.
    """
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(error_reason(error), key=folder, fix=fix) from error
    for file in files:
        try:
            status = os.stat(file)
            if stat.S_ISDIR(status.st_mode):
                continue
            _check_kind(file, status)
        except FileNotFoundError:  # a broken link is reported by the reader of the file
            continue
        except OSError as error:
            raise UserError(error_reason(error), key=file, fix=fix) from error
        if file.suffix in WHOLE_FILE_SUFFIXES and status.st_size > MOST_BYTES:
            raise UserError(f"it has more than {MOST_BYTES} bytes", key=file, fix=fix)


def _check_kind(file: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is {FILE_KINDS[stat.S_IFMT(status.st_mode)]}, not a regular file", str(file))


def read_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yields byte offset and content, with the line break, of each line that is not blank; an unfinished last line has
    no line break.

    Raises:
        OSError: The file cannot be read, or is no regular file; raised at the first line.
        UserError: A line exceeds MOST_BYTES.
        ValueError: The name contains NUL.
    """
    offset = 0
    with open_regular(file) as opened:
        while line := opened.readline(MOST_BYTES + 1):
            if len(line) > MOST_BYTES:
                raise UserError(
                    f"the line at byte {offset} has more than {MOST_BYTES} bytes", key=file, fix="write it again"
                )
            if line.strip():
                yield offset, line
            offset += len(line)


def error_reason(error: Exception) -> str:
    """Returns the reason of a failed read for an error message: `is missing`, or `cannot be read (reason)` for any
    other error. Names no file."""
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return f"cannot be read ({getattr(error, 'strerror', None) or error})"


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Disk faults, as opposed to user mistakes."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises an OSError of the `with` block again with `path`, if the error names no file, as for a full disk. Other
    errors pass unchanged; nothing is written here."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_unicode(text: str) -> bool:
    """Returns True if the text has no unpaired surrogate, which no file can store."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reject_constant(text: str) -> NoReturn:
    raise Malformed(f"{text} is no number")


DECODER = json.JSONDecoder(parse_constant=_reject_constant)
