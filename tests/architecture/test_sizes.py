"""Limits of size: 60 lines per function, 6 positional parameters per function or call."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tests.architecture.source import modules

FUNCTION, POSITIONAL = 60, 6

LISTED = {
    "megatron.vocab_parallel:forward": "torch.autograd.Function gives all inputs by position",
    "megatron.fused_head:forward": "as `vocab_parallel`'s",
    "megatron.packed_attention:call of varlen_attn": "torch's own",
    "weights.transports.ipc:call of torch.UntypedStorage._new_shared_cuda": "torch's own",
}
"""Exceptions with their reasons; an entry within the limits must be removed."""


def too_long(sources: Mapping[str, str]) -> set[str]:
    """Returns `module:function` for everything above a limit."""
    places = set()
    for name, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [a.arg for a in node.args.posonlyargs + node.args.args]
                positional = len(names) - (names[:1] in (["self"], ["cls"]))
                if node.end_lineno is None or node.end_lineno - node.lineno + 1 > FUNCTION or positional > POSITIONAL:
                    places.add(f"{name}:{node.name}")
            elif isinstance(node, ast.Call) and len(node.args) > POSITIONAL:
                places.add(f"{name}:call of {ast.unparse(node.func)}")
    return places


def test_nothing_is_past_a_limit_but_what_is_listed() -> None:
    excesses = too_long(modules())
    assert excesses - set(LISTED) == set()
    assert set(LISTED) - excesses == set(), "no longer too long: take it out of the list"


def test_planted_excesses_are_found() -> None:
    long_function = "def f():\n" + "    x = 1\n" * 61
    many = "def g(a, b, c, d, e, f, h):\n    pass\n"
    call = "print(1, 2, 3, 4, 5, 6, 7)\n"
    assert too_long({"a": long_function, "b": many, "c": call}) == {"a:f", "b:g", "c:call of print"}
