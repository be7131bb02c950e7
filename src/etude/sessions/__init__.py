"""What happened between a person and an agent: recording, redaction, foreign logs, and what became of the code."""
