"""Files of a folder in a container: listing, reading and writing, by programs of the container (`sh`, GNU `find`,
`xargs` and `tar`).

A container in which the policy has worked is hostile: each of these programs may be the policy's. So a listing and an
archive are bounded in size and time, read by a parser that follows nothing, and refused with UnfitError if malformed.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from skyrl_mega.envs.containers.runtime import CommandOutput, Container
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.swe.session import File, Files, UnfitError

LISTING_LIMIT = 2**25
"""Maximum size of a listing in bytes: about 300,000 files."""
FIELDS = r"%P\0%y\0%m\0%s\0%C@\0%l\0"
"""Fields of a listing by `find`: path, kind, mode, size, time of the last change of the inode, target of a link."""
WANTED = "-mindepth 1 ( -path ./.git -o -name __pycache__ ) -prune -o ( -type f -o -type l )"
LIST = ["find", ".", *WANTED.split(" "), "-printf", FIELDS]
ARCHIVE = "--create --file=- --format=gnu --no-recursion --hard-dereference --null --files-from=-"
READ = ["tar", *ARCHIVE.split(" ")]
WRITE = r"""
set -e
head -c "$1" | xargs -0 -r sh -c '
for name; do
  above=$name linked=
  while above=${above%/*}; [ "$above" != . ]; do [ ! -L "$above" ] || linked=1; done
  [ -n "$linked" ] || printf "%s\\0" "$name"
done' sh | xargs -0 -r rm -rf --
head -c "$2" | xargs -0 -r sh -c '
for name; do
  if [ -L "$name" ] || { [ -e "$name" ] && [ ! -d "$name" ]; }; then rm -f -- "$name"; fi
done' sh
exec tar --extract --file=- --no-same-owner --same-permissions
"""
"""Script that reads three parts: paths to remove (except below a link), folders that must be neither link nor file, and
an archive. The arguments are the lengths of the first two parts."""
BLOCK = 512
"""Unit of a tar archive, in bytes."""
LONGEST_PATH = 4000
"""Maximum length of a path in bytes, below the kernel's limit for a path with the folder."""
SHOWN = 300
"""Characters of a program's error message kept for people."""


class LateError(UnfitError):
    """A program that lists or reads files took too long: the policy's fault, or a slow machine's."""


@dataclass(frozen=True)
class Entry:
    """A file or a link in a listing. Equal entries at two times mean an unchanged file: no program of the container can
    set the time of the last change of an inode."""

    mode: int
    size: int
    changed: bytes
    """Time of the last change of the inode, as text."""
    link: bytes | None
    """Target of a link; None for a file."""


def listing(container: Container, folder: str, timeout_s: float) -> dict[str, Entry]:
    """Returns path → entry of the files and links below a folder, without `.git` and compiled Python files.

    Raises:
        LateError: The listing takes longer than `timeout_s` seconds.
        UnfitError: The listing is too long or malformed, or `find` fails.
        InfrastructureFault: The container is lost.
    """
    output = _checked(container.run(LIST, timeout_s, folder=folder, limit=LISTING_LIMIT), "files cannot be listed")
    *fields, last = output.split(b"\0")
    if last or len(fields) % 6:
        raise UnfitError("files cannot be listed: the listing is incomplete")
    entries = {}
    for at in range(0, len(fields), 6):
        path, kind, mode, size, changed, link = fields[at : at + 6]
        if kind not in (b"f", b"l") or not re.fullmatch(rb"[0-7]{1,4}", mode) or not re.fullmatch(rb"\d{1,15}", size):
            raise UnfitError("files cannot be listed: an entry is malformed")
        name = os.fsdecode(path)
        refuse_path(name)
        entries[name] = Entry(int(mode, 8) & 0o777, int(size), changed, link if kind == b"l" else None)
    return entries


def read(
    container: Container, folder: str, entries: Mapping[str, Entry], timeout_s: float, most_bytes: int
) -> dict[str, File]:
    """Returns path → content of listed files and links.

    Args:
        container: The container.
        folder: Folder in the container.
        entries: The files, from `listing`.
        timeout_s: Time limit in seconds.
        most_bytes: Maximum size of all files together.

    Raises:
        LateError: The archive is late.
        UnfitError: The files are too large or vanished, `tar` fails, or the archive is malformed.
        InfrastructureFault: The container is lost.
    """
    if sum(entry.size for entry in entries.values()) > most_bytes:
        raise UnfitError(f"changed files have more than {most_bytes >> 20} MiB")
    files = {name: File(entry.link, link=True) for name, entry in entries.items() if entry.link is not None}
    names = [name for name in entries if name not in files]
    if not names:
        return files
    limit = most_bytes + 8 * BLOCK * len(names) + 2**16
    archive = _checked(
        container.run(READ, timeout_s, stdin=_joined(names), folder=folder, limit=limit), "files cannot be read"
    )
    contents = dict(_members(archive))
    for name in names:
        data = contents.get(os.fsencode(f"./{name}"))
        if data is None:
            raise UnfitError("files cannot be read: a listed file is not in the archive")
        files[name] = File(data, entries[name].mode)
    return files


def write(container: Container, folder: str, files: Files, timeout_s: float) -> None:
    """Writes files below a folder of a new container, and removes paths with None; follows no links. Removes a file or
    link in the place of a parent folder. No code of the policy may have run in the container yet.

    Raises:
        UnfitError: A file is below another file, or a path is too long or outside of the folder.
        InfrastructureFault: The container does not take the files in `timeout_s` seconds, or is lost.
    """
    if not files:
        return
    written = {name: file for name, file in files.items() if file is not None}
    parents = sorted({parent for name in written for parent in _parents(name)})  # a parent before its children
    for name in files:
        refuse_path(name)
        if len(os.fsencode(name)) > LONGEST_PATH:
            raise UnfitError("files cannot be written: a path is too long")
    if any(parent in written for parent in parents):
        raise UnfitError("files cannot be written: a file is below another file")
    removed, folders = _joined(files), _joined(parents)
    argv = ["sh", "-c", WRITE, "sh", str(len(removed)), str(len(folders))]
    stdin = removed + folders + _archive(written)
    ran = container.run(argv, timeout_s, stdin=stdin, folder=folder)
    if ran.status != "ok":
        raise InfrastructureFault(f"files cannot be written into a new container: {ran.last_line()[:SHOWN]}")


def refuse_path(name: str) -> None:
    """Raises UnfitError if the path `name` is absolute, or contains an empty part, `.`, `..` or NUL."""
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise UnfitError("a file has a path outside of the folder")


def _checked(output: CommandOutput, what: str) -> bytes:
    """Returns the standard output of a program that ended well; raises UnfitError for any other end."""
    if output.status == "ok":
        return output.stdout
    if output.status == "timeout":
        raise LateError(f"{what}: it took too long")
    how = {"output": "there are too many, or they are too large"}
    last = output.stderr.decode(errors="replace").strip()[-SHOWN:]
    raise UnfitError(f"{what}: {how.get(output.status, last or f'exit code {output.exit}')}")


def _members(archive: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields name and content of the files in a tar archive in GNU format.

    The library's reader is not used, because it expands sparse files and reads headers in quadratic time.

    Raises:
        UnfitError: The archive is malformed, or contains anything but files.
    """
    at, long_name = 0, None
    while at + BLOCK <= len(archive):
        header = archive[at : at + BLOCK]
        if not header.strip(b"\0"):
            return
        digits, kind = header[124:136].strip(b"\0 "), header[156:157]
        if not re.fullmatch(rb"[0-7]{1,11}", digits):
            raise UnfitError("files cannot be read: the archive is malformed")
        size = int(digits, 8)
        data = archive[at + BLOCK : at + BLOCK + size]
        if len(data) < size or kind not in (b"0", b"\0", b"L"):
            raise UnfitError("files cannot be read: the archive is incomplete, or contains more than files")
        at += BLOCK * (1 + -(-size // BLOCK))
        if kind == b"L":
            long_name = data.rstrip(b"\0")
        else:
            yield (header[:100].rstrip(b"\0") if long_name is None else long_name), data
            long_name = None


def _archive(files: Mapping[str, File]) -> bytes:
    stream, now = io.BytesIO(), time.time()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, file in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.mode, info.mtime = file.mode & 0o777, int(now)
            if file.link:
                info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(file.data)
            else:
                info.size = len(file.data)
            archive.addfile(info, None if file.link else io.BytesIO(file.data))
    return stream.getvalue()


def _joined(names: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(f"./{name}\0") for name in names)


def _parents(name: str) -> list[str]:
    """Returns the folders above a path, the highest first."""
    parts = name.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]
