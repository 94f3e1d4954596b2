"""A store of weight files: a folder that all nodes share, or an object store by an address of fsspec.

    store = open_store("/shared/weights/run-1")     # or s3://bucket/run-1; http://host/run-1 can be read
    with store.writing("a/b") as file:
        file.write(data)
    store.read("a/b", start, length)

An object appears whole or not at all, under a name that is never used twice, so a reader needs no lock. Reads are
repeated `ATTEMPTS` times: a network may fail for a moment, and a shared folder may show a new file late.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from skyrl_mega.cluster.temporary_files import partial_file
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import writing

ATTEMPTS = 5
"""Attempts of a read, including the first."""
PAUSE_S = 0.2
"""Seconds before the second attempt; doubled before each further attempt."""
SCHEME = "://"

Result = TypeVar("Result")


class StoreError(RuntimeError):
    """A store that did not answer, after all attempts; names object and cause."""


class Absent(StoreError):
    """An object that does not exist, or is shorter than its description says, after all attempts."""


class Store(ABC):
    """A flat space of objects by key, such as `3f…/000000012/rank-00003`.

    Args:
        address: Address of the store, for errors.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    @contextmanager
    @abstractmethod
    def writing(self, key: str) -> Iterator[BinaryIO]:
        """Yields a file to write; the object appears when the `with` block ends without an error. A failed write is not
        repeated.

        Raises:
            StoreError: The store failed, or the block raised an OSError. Stores of fsspec raise it for all errors of
                the block but UserError and MemoryError.
        """

    @abstractmethod
    def list_keys(self) -> list[str]:
        """Returns the keys of all objects, in no order; [] if the store is empty.

        Raises:
            StoreError: The store failed.
        """

    @abstractmethod
    def remove(self, key: str) -> None:
        """Removes an object; a missing object is not an error.

        Raises:
            StoreError: The store failed.
        """

    @abstractmethod
    def _read(self, key: str, start: int, length: int | None) -> bytes: ...

    def write(self, key: str, data: bytes) -> None:
        """Writes an object of these bytes, in a single attempt.

        Raises:
            StoreError: The store failed.
        """
        with self.writing(key) as file:
            file.write(data)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Returns `length` bytes of an object from byte `start` on; None reads to the end.

        Raises:
            Absent: The object does not exist, or ends earlier.
            StoreError: The store failed.
        """

        def attempt() -> bytes:
            data = self._read(key, start, length)
            if length is not None and len(data) != length:
                raise FileNotFoundError(f"has {len(data)} bytes of {length} from byte {start} on")
            return data

        return _repeated(attempt, f"{self.address}: {key}")


class FolderStore(Store):
    """A store in a folder of a file system shared by all nodes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    @contextmanager
    def writing(self, key: str) -> Iterator[BinaryIO]:
        """Yields a hidden file to write; after the block, flushes the file to the disk and renames the file to the key.
        After an error the file is removed. Raises StoreError if the folder cannot be written, and for an OSError of the
        block."""
        path = self.folder / key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial_file(path) as partial:
                with writing(path), partial.open("wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(path)
        except OSError as error:
            raise StoreError(f"{path}: {error}") from error

    def list_keys(self) -> list[str]:
        """Returns the keys of all objects, in no order; [] if the folder is empty or missing. Leaves out hidden files,
        which are being written, and folders that cannot be read. Raises no StoreError."""
        names = [
            str((Path(folder) / file).relative_to(self.folder))
            for folder, _, files in os.walk(self.folder)
            for file in files
        ]
        return [name for name in names if not Path(name).name.startswith(".")]

    def remove(self, key: str) -> None:
        """Removes a file, and the folders of the store that are then empty; a missing file or a folder that cannot be
        removed is not an error. Raises StoreError if the file cannot be removed."""
        path = self.folder / key
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{path}: {error}") from error
        for parent in path.parents:
            if parent == self.folder:
                return
            try:
                parent.rmdir()
            except OSError:  # the folder has other files, or is gone
                return

    def _read(self, key: str, start: int, length: int | None) -> bytes:
        with (self.folder / key).open("rb", buffering=0) as file:
            file.seek(start)
            return file.read() if length is None else _read_all(file, length)


class FsspecStore(Store):
    """A store at an address of fsspec. An object store shows an object when the upload is complete."""

    def __init__(self, address: str) -> None:
        import fsspec

        super().__init__(address)
        scheme = address.partition(SCHEME)[0]
        try:
            self.files, root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"fsspec cannot open {scheme}{SCHEME} addresses here ({error})",
                key="weights.files.folder",
                value=address,
                fix=f"install fsspec's package for {scheme} on every node, or give a shared folder",
            ) from None
        self.root = str(root).rstrip("/")

    @contextmanager
    def writing(self, key: str) -> Iterator[BinaryIO]:
        """Yields a file to write; its content is uploaded as an object. After an error in the block, removes the partly
        uploaded object.

        Raises:
            StoreError: The store failed, or the block raised an Exception other than UserError, MemoryError and
                StoreError.
        """
        place = self._place(key)
        try:
            self.files.makedirs(place.rpartition("/")[0], exist_ok=True)
            try:
                with self.files.open(place, "wb") as file:
                    yield file
            except BaseException:
                self.remove(key)
                raise
        except (UserError, MemoryError, StoreError):
            raise
        except Exception as error:  # each object store's library has errors of its own
            raise StoreError(f"{self.address}: {key}: {type(error).__name__}: {error}") from error

    def list_keys(self) -> list[str]:
        """Returns the keys of all objects, in no order; [] if the address does not exist. Raises StoreError after
        `ATTEMPTS` failed attempts."""

        def attempt() -> list[str]:
            self.files.invalidate_cache()
            found = self.files.find(self.root) if self.files.exists(self.root) else []
            return [str(name).removeprefix(self.root).lstrip("/") for name in found]

        return _repeated(attempt, self.address)

    def remove(self, key: str) -> None:
        """Removes an object; a missing object is not an error. Raises StoreError after `ATTEMPTS` failed attempts."""

        def attempt() -> None:
            place = self._place(key)
            if self.files.exists(place):
                self.files.rm_file(place)

        _repeated(attempt, f"{self.address}: {key}")

    def _read(self, key: str, start: int, length: int | None) -> bytes:
        place, end = self._place(key), None if length is None else start + length
        return bytes(self.files.cat_file(place, start=start, end=end))

    def _place(self, key: str) -> str:
        return f"{self.root}/{key}"


def open_store(address: str) -> Store:
    """Returns the store at an address: a folder, which need not exist yet, or an address of fsspec such as
    `s3://bucket/path`.

    Raises:
        UserError: fsspec does not know the address, or lacks a package for the address.
    """
    return FsspecStore(address) if SCHEME in address else FolderStore(Path(address))


def _repeated(attempt: Callable[[], Result], what: str) -> Result:
    """Returns the result of a call that may fail for a moment, after `ATTEMPTS` attempts at most.

    Raises:
        Absent: The last attempt raised FileNotFoundError.
        StoreError: The last attempt raised another error.
    """
    pause = PAUSE_S
    for number in range(1, ATTEMPTS + 1):
        try:
            return attempt()
        except (UserError, MemoryError):
            raise
        except Exception as error:  # each object store's library has errors of its own
            if number == ATTEMPTS:
                kind: Any = Absent if isinstance(error, FileNotFoundError) else StoreError
                raise kind(f"{what}: {type(error).__name__}: {error} ({ATTEMPTS} attempts)") from error
        time.sleep(pause)
        pause *= 2
    raise AssertionError("the last attempt returns or raises")


def _read_all(file: Any, length: int) -> bytes:
    """Returns up to `length` bytes of an unbuffered file: one read returns 2 GiB at most."""
    parts = []
    while length and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]
