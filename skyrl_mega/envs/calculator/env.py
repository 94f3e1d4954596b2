"""Arithmetic with a calculator: the example of an environment with tools (docs/tools.md)."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from skyrl_mega.envs.options import Option
from skyrl_mega.envs.tools import Tool, ToolEnv, ToolError

LONGEST, LARGEST = 200, 10**15
"""Maximum length of an expression in characters, and the largest allowed number."""
OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculate(expression: str) -> str:
    """Returns the value of an expression of whole numbers with +, -, * and brackets, as text.

    Raises:
        ToolError: The text is no such expression, or one of its numbers or results exceeds `LARGEST`.
    """
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression[:40]!r} is not an expression of whole numbers with +, -, * and ()") from error


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    else:
        raise ValueError("neither a whole number nor +, - or *")
    if abs(value) > LARGEST:
        raise ValueError("too large")
    return value


class CalculatorEnv(ToolEnv):
    """Reward 1 if the last whole number of the answer is right, else 0."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {}
    tools: Sequence[Tool] = (
        Tool(
            "calculate",
            {
                "type": "object",
                "properties": {"expression": {"type": "string", "maxLength": LONGEST}},
                "required": ["expression"],
                "additionalProperties": False,
            },
            calculate,
        ),
    )

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns None if the truth is a whole number of at most `LONGEST` (200) characters; else the allowed form."""
        number = re.fullmatch(r"-?\d+", str(truth).strip()) and len(str(truth).strip()) <= LONGEST
        return None if number else f"allowed is a whole number of at most {LONGEST} characters"

    def judge(self, answer: str) -> float:
        """Returns 1 if the last digits in the answer, with a minus directly before them, equal the ground truth; else
        0, also without digits. `3.5` counts as 5, and `1,000` as 0."""
        numbers = re.findall(r"-?\d+", answer)
        return float(bool(numbers) and int(numbers[-1][:LONGEST]) == int(str(self.ground_truth)))
