RESUME_HINT = "the same command resumes with the missing samples"
"""Message after an interrupted evaluation."""
