"""The agent: one episode (loop, tools, prompts, policy) and many of them at once (runner). Knows no reward's meaning and
no trainer; the model is known by `protocols.Policy` alone."""
