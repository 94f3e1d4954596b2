RESUME_HINT = "the same command goes on with the samples that are missing"
"""Message after an interrupted evaluation."""
