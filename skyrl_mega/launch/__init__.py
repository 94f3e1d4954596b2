"""The command that trains: the user's command line is checked, then the run starts."""

GOES_ON = "the same command resumes from the newest checkpoint, if there is one"
"""Advice printed after a run that ended early."""
