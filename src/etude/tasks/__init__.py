"""Tasks: pieces of work with a way to tell whether they were done, built from real code."""
