"""The engine: ids in; ids, log-probs, versions, KV versions and routes out. Many requests at once."""
