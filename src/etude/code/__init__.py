"""Source text as the agent, the task builders and the reports handle it: views, edits, diffs. Knows no task, no sandbox
and no model."""
