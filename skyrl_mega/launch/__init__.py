"""The command that trains: what a user types, checked, and the run that it starts."""

GOES_ON = "the same command goes on from the newest checkpoint"
"""What a person is told where a run has ended early."""
