"""The commands: one small file a group, no logic. stdout is data, stderr is progress."""
