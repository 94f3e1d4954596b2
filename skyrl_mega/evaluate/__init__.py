GOES_ON = "the same command goes on with the samples that are missing"
"""What a person is told where an evaluation has ended early."""
