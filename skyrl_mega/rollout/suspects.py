"""Which trajectory a worker may have died of.

A worker has many open, and cannot say which of them ended it. What there is to go by is how many workers have died with
a trajectory open: one that ends its process every time is open at each of them, while the others are dealt out to
another worker each time.

- Of those that were open at a worker that died, the ones are counted under which the most have died before. One that
  ends its process is always among them; what had just come there is not.
- The more have died under a trajectory, the fewer of such may share a worker (`SHARE`), in the end none. They wait for
  one another; others do not wait for them.
- One under which as many have died as `SHARE` is long has failed: the last one died while no other there was suspected
  as much.

So one that is not to blame fails only where it was beside the one that is time and again, and its worker then dies of
something else, just when it is the most suspected one there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

SHARE = (math.inf, math.inf, 8, 1)
"""How many trajectories under which as many workers have died as the place says, or more, a worker may have open."""


def admitted(deaths: int, there: Iterable[int]) -> bool:
    """Whether a trajectory may go to a worker.

    Args:
        deaths: Workers that have died under it.
        there: Under each of those that are open there.
    """
    return math.isinf(SHARE[deaths]) or sum(other >= deaths for other in there) < SHARE[deaths]
