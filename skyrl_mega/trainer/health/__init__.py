"""What a run notices about itself: steps that teach the policy nothing, and figures that have gone wrong. Pure.

`seen.py` is what a watcher looks at; `rollouts.py`, `training.py` and `mismatch.py` are the watchers, a function each;
`watch.py` asks all of them after every step, and decides what is said, and when a run that cannot learn ends
(docs/health.md).
"""
