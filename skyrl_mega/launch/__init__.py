"""The training command: checks the user's command line, then starts the run."""

GOES_ON = "the same command resumes from the newest checkpoint, if there is one"
"""Advice printed after the early end of a run."""
