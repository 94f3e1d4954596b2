"""Multiplication by one digit as on paper, and a pupil's slip: a forgotten carry."""

from __future__ import annotations


def worked_answer(number: int, digit: int, slip: int | None = None) -> str:
    """Returns the answer to `number * digit` with the work shown: `345 * 7` is `35,31,24\\boxed{2415}`.

    Each place, units first, shows the product of the digit plus the carry. The last digit of each entry belongs to the
    product, and the rest is the carry into the next place; the last entry stays whole.

    Args:
        number: At least 1.
        digit: 1 to 9.
        slip: Place of the slip (units are 0): the carry into the place is forgotten, or 1 is added if the carry is 0,
            so the product is wrong. None for no slip. All places except the units are allowed.
    """
    places, carry = [], 0
    for place, figure in enumerate(reversed(str(number))):
        if place == slip:
            carry = 0 if carry else 1
        places.append(int(figure) * digit + carry)
        carry = places[-1] // 10
    product = str(places[-1]) + "".join(str(place % 10) for place in reversed(places[:-1]))
    return f"{','.join(map(str, places))}\\boxed{{{product}}}"
