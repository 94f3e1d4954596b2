"""Import of modules that need torchvision for images, on machines without it: no build fits the CPU's torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

IMAGES = "torchvision.transforms.v2.functional"
"""Name of the module of torchvision that transformers' image processors import. An empty module is enough: only
functions that process an image use the content."""


@contextmanager
def placeholder() -> Iterator[None]:
    """Lets image processors be imported inside the context: provides an empty torchvision if none is installed. An
    installed torchvision stays.

    At the end, also after an error, the empty modules are removed from `sys.modules`; modules imported inside keep
    their references. No other thread of the process may import torchvision inside the context.
    """
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    modules: dict[str, ModuleType] = {}
    name = ""
    for part in IMAGES.split("."):
        parent, name = name, f"{name}.{part}".lstrip(".")
        modules[name] = ModuleType(name)
        modules[name].__path__ = []  # a package, so that its modules can be imported
        if parent:
            setattr(modules[parent], part, modules[name])
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
