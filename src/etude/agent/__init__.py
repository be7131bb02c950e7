"""The agent: one episode (loop, tools, prompts, policy) and many of them at once (runner).

It knows no reward's meaning and no trainer; a model it knows by `protocols.Policy` alone.
"""
