"""Where a run's figures go: metrics.jsonl always, and the trackers that `telemetry.trackers` names."""
