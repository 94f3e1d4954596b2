"""Trackers of a run's metrics: metrics.jsonl always, plus those in `telemetry.trackers`."""
