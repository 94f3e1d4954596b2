"""Multiplication by one digit as it is done on paper, and the slip that a pupil makes: a carry is forgotten."""

from __future__ import annotations


def worked(number: int, digit: int, slip: int | None = None) -> str:
    """The answer with its work: `345 * 7` is `35,31,24\\boxed{2415}`.

    Each place, units first, shows its digit's product and the carry added to it. Its last digit is the product's, what
    is before it is carried on; the last place stays whole.

    Args:
        number: At least 1.
        digit: 1 to 9.
        slip: The place (units are 0) that forgets the carry brought to it, or adds 1 where there is none: the product
            is then wrong. None makes no slip. A number's places but the first can have one.
    """
    places, carry = [], 0
    for place, own in enumerate(reversed(str(number))):
        if place == slip:
            carry = 0 if carry else 1
        places.append(int(own) * digit + carry)
        carry = places[-1] // 10
    product = str(places[-1]) + "".join(str(place % 10) for place in reversed(places[:-1]))
    return f"{','.join(map(str, places))}\\boxed{{{product}}}"
