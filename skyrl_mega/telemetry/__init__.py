"""Telemetry: a run's metrics, timelines and traces, and the console output."""
