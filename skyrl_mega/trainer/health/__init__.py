"""Health checks of a run: steps without anything to learn, and abnormal metrics. Pure functions.

`step_view.py` is the watchers' view of a step. `rollouts.py`, `training.py` and `mismatch.py` contain the watchers, a
function each. `watch.py` runs all watchers after every step, decides on the messages, and ends a run unable to learn
(docs/health.md).
"""
