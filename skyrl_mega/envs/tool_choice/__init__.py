"""The next tool call of an agent's recorded conversation, judged against the recorded call."""
