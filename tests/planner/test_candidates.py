"""The table of searched settings, and combinations of changes."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from skyrl_mega.config.compose import compose
from skyrl_mega.config.keys import keys
from skyrl_mega.planner.candidates import KNOBS, as_arguments, changed, combined, differing, near, value_of

FILE = "configs/searchr1_30b.yaml"


def test_every_knob_is_a_setting_with_other_values_that_can_be_pasted() -> None:
    config = compose(FILE)
    last = {}
    for key in KNOBS:
        assert key in keys()
        for change in near(config, key):
            assert differing(config, change) in (change, ()), key
            last[key] = change
    pasted = compose(FILE, [as_arguments(change) for change in last.values()])
    assert all(value_of(pasted, key) == value for ((key, value),) in last.values())
    for change in last.values():
        config = changed(config, change)
    assert config == pasted


def test_a_value_out_of_its_range_is_followed_by_the_default() -> None:
    config = changed(compose(FILE), (("weights.bucket_mib", 0.0),))
    assert near(config, "weights.bucket_mib")[0] == (("weights.bucket_mib", keys()["weights.bucket_mib"].default),)
    assert near(config, "reference.layout.tensor") == [], "there is no reference with a layout"


def test_pairs_only_double_or_halve_whole_numbers() -> None:
    config = changed(compose(FILE), (("policy.ranks", 8),))
    sizes = {value for ((_, value),) in near(config, "policy.ranks", coarse=True)}
    assert sizes and all(max(size, 8) % min(size, 8) == 0 for size in sizes)
    assert 12 in {value for ((_, value),) in near(config, "policy.ranks")}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_near_changes_are_combined_first(counts: list[int]) -> None:
    knobs = [[((f"key{i}", value),) for value in range(count)] for i, count in enumerate(counts)]
    distances = [sum(value for _, value in change) for change in combined(*knobs)]
    assert distances == sorted(distances)
    assert len(distances) == len({*combined(*knobs)}) == prod(counts)
