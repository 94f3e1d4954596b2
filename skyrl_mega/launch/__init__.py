"""The command that trains: what a user types, checked, and the run that it starts."""

GOES_ON = "the same command resumes from the newest checkpoint, if there is one"
"""What a person is told where a run has ended early."""
