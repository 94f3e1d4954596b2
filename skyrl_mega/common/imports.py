"""Import of a user's own class or function by path: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.trials import last_frame
from skyrl_mega.common.values import shown

KINDS = {"class": type, "function": FunctionType}
_import_lock = threading.RLock()
"""Held during the import of a user's module; other threads wait until the import is complete. The module must be in
`sys.modules` earlier, because dataclasses and pickle look there. A module importing itself gets the current, partial
state."""


def load(
    path: str,
    key: str,
    *,
    kind: str = "class",
    contract: Mapping[str, str] | None = None,
    stand_ins: Callable[[], Mapping[str, ModuleType]] = dict,
) -> Any:
    """Imports a module or file of the user and returns the object named by an import path.

    Modules are found from the working directory, which is appended to `sys.path`; a relative file path also starts
    there. Each module or file is imported once per process, so later changes of a file have no effect. Other threads
    wait for an import.

    Args:
        path: `package.module:name` or `path/to/file.py:name`.
        key: Setting with the path, for errors.
        kind: "class" or "function", for errors. The caller checks the type of the object.
        contract: Name → import statement, shown in the error if the user's code uses this name without an import.
        stand_ins: Returns import name → module, for packages that are not installed. The user's code can import these
            modules while it is imported itself; no other code can.

    Raises:
        UserError: The path has another form, the module cannot be imported (also if the user's code raises), or the
            name is missing at the top level of the module or None.
    """
    source, _, attribute = path.rpartition(":")
    if not source or not attribute:
        raise UserError(f"allowed: {path_forms(kind)}", key=key, value=path)
    with _import_lock:
        if source.endswith(".py"):
            module = _module_of_file(source, key, contract or {}, stand_ins)
        else:
            module = _module_of_name(source, f"{key}={path}", kind, contract or {}, stand_ins)
    value = getattr(module, attribute, None)
    if value is None:
        names = [n for n, v in vars(module).items() if isinstance(v, KINDS[kind]) and v.__module__ == module.__name__]
        near = get_close_matches(attribute, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or f'no {kind}'}"
        raise UserError(f"{source} has no {kind} {attribute}", key=key, value=path, fix=hint)
    return value


@contextmanager
def unshared(path: str) -> Iterator[None]:
    """Within the `with` block, `load` imports the module of an import path again. After the block the process has the
    modules of the same package from before the block only, so that a trial leaves nothing in their variables. Other
    modules that the module imports are shared.

    Args:
        path: `package.module:name` or `path/to/file.py:name`.
    """
    source = path.rpartition(":")[0]
    name = _name_of_file(Path(source).absolute()) if source.endswith(".py") else source
    package, (parent, _, last) = name.partition(".")[0], name.rpartition(".")
    with _import_lock:
        before = _within(package)
        attributes = vars(before[parent]) if parent in before else {}
        attribute = attributes.get(last)
        for known in _within(name):
            del sys.modules[known]
    try:
        yield
    finally:
        with _import_lock:
            for known in _within(package):
                del sys.modules[known]
            sys.modules.update(before)
            attributes.pop(last, None)
            if attribute is not None:
                attributes[last] = attribute


def _within(name: str) -> dict[str, ModuleType]:
    """Returns a module and its submodules, as far as they are imported, by name."""
    return {known: module for known, module in sys.modules.items() if f"{known}.".startswith(f"{name}.")}


def function_by_name(name: str, known: Mapping[str, Any], key: str, takes: str) -> Any:
    """Returns a known function by name, or the user's own function by import path.

    Args:
        name: Value of the setting.
        known: Functions by name.
        key: The setting, for errors.
        takes: The two parameters of such a function, for errors.

    Raises:
        UserError: The name is unknown, the import path cannot be imported, or the object does not accept two
            arguments.
    """
    if name in known:
        return known[name]
    if ":" not in name:
        raise unknown_name(name, known, key, "function")
    function = load(name, key, kind="function")
    if not callable(function):
        raise UserError(f"it is not callable; allowed is a function of {takes}", key=key, value=shown(name))
    check_takes(function, f"{key} = {shown(name)}", takes)
    return function


def unknown_name(name: str, known: Iterable[str], key: str, kind: str) -> UserError:
    """Returns the error for a name that is neither known nor an import path, with the nearest known name.

    Args:
        name: Value of the setting.
        known: Allowed names.
        key: The setting.
        kind: "class" or "function", which the user may give by import path.
    """
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    allowed = f"{hint}allowed is one of {', '.join(known)}, or your own as {path_forms(kind)}"
    return UserError(allowed, key=key, value=shown(name))


def check_takes(function: Callable[..., Any], setting: str, takes: str, count: int = 2) -> None:
    """Checks that a function can be called with positional arguments; their types and order are not checked.

    A function written in C without a readable signature passes.

    Args:
        function: The function.
        setting: Setting and value, as subject of the error.
        takes: Names of the parameters, for the error.
        count: Number of arguments, 1 or 2.

    Raises:
        UserError: The function does not accept this number of arguments.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):  # a function written in C may have no signature
        return
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        parameters = [
            parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()
        ]
        plain_signature = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
        number = "one parameter" if count == 1 else "two parameters"
        raise UserError(f"it takes {plain_signature}", key=setting, fix=f"give it {number}, {takes}") from error


def absolute(path: str) -> str:
    """Returns an import path with an absolute path of the file, if it names a file, else the import path itself.
    Processes that start in another folder need the absolute path. The file need not exist."""
    source, _, attribute = path.rpartition(":")
    return f"{Path(source).absolute()}:{attribute}" if source.endswith(".py") else path


def path_forms(kind: str) -> str:
    """Returns the two allowed forms of an import path as text: `package.module:NAME or path/to/file.py:NAME`.

    Args:
        kind: Shown as NAME, such as "function"; "class" is shown as "Class".
    """
    name = "Class" if kind == "class" else kind
    return f"package.module:{name} or path/to/file.py:{name}"


@contextmanager
def _importable(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Makes modules importable, except those of a package that is installed.

    Raises:
        ImportError: The user's code imports a missing name of a stand-in; the text says so.
    """
    tops = dict.fromkeys(name.partition(".")[0] for name in modules)
    absent = [top for top in tops if top not in sys.modules and importlib.util.find_spec(top) is None]
    added = {name: module for name, module in modules.items() if name.partition(".")[0] in absent}
    sys.modules.update(added)
    try:
        yield
    except ImportError as error:
        if (top := (error.name or "").partition(".")[0]) in absent:
            error.msg += f"; {top} is not installed, and its stand-in has only base classes: install {top}"
        raise
    finally:
        for name in added:
            sys.modules.pop(name, None)


def _module_of_file(
    source: str, key: str, contract: Mapping[str, str], stand_ins: Callable[[], Mapping[str, ModuleType]]
) -> ModuleType:
    file = Path(source).absolute()
    if not file.is_file():
        raise UserError(
            f"{file} does not exist", key=key, fix=f"give the path of a Python file (relative to {Path.cwd()})"
        )
    name = _name_of_file(file)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importable(stand_ins()):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything at import
        del sys.modules[name]
        text = _one_line(error, contract)
        raise UserError(f"{file}{_line_of(error, file)} cannot be imported: {text}", key=key) from error
    return module


def _name_of_file(file: Path) -> str:
    """Returns a unique name in `sys.modules`, because dataclasses and pickle look up a class's module there."""
    return f"skyrl_mega_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


def _module_of_name(
    source: str,
    setting: str,
    kind: str,
    contract: Mapping[str, str],
    stand_ins: Callable[[], Mapping[str, ModuleType]],
) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))  # like `python -m`; Ray workers start without it
    try:
        with _importable({} if source in sys.modules else stand_ins()):
            return importlib.import_module(source)
    except (Exception, SystemExit) as error:
        file_form = path_forms(kind).rpartition(" or ")[2]
        raise UserError(
            f"{source} cannot be imported: {_one_line(error, contract)}; allowed: a module that "
            f"Python finds from the working directory, or {file_form}",
            key=setting,
        ) from error


def _line_of(error: BaseException, file: Path) -> str:
    """Returns `, line 3` for the last line of `file` in the error's traceback; '' if the traceback does not contain the
    file."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f", line {error.lineno}"
    frame = last_frame(error, str(file))
    return f", line {frame.lineno}" if frame else ""


def _one_line(error: BaseException, contract: Mapping[str, str]) -> str:
    """Returns type and message of an error, plus the import statement for a missing name of the contract."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    text = f"{type(error).__name__}: {' '.join(message.split())}"
    if isinstance(error, NameError) and (statement := contract.get(error.name or "")):
        text += f"; add `{statement}`"
    return text
