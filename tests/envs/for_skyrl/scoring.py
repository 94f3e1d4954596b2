"""A module beside the environments."""

import re


def compute_score(text, truth, format_score=0.0):
    found = re.search(r"#### (-?[0-9.,]+)", text)
    if found is None:
        return 0.0
    return 1.0 if found.group(1).replace(",", "") == truth else format_score
