"""Serving: OpenAI, Anthropic and agent endpoints over an engine, with exact ids, log-probs and versions recorded.

Where the client owns the context, its history is matched to what was sampled; where the harness owns it, it is the loop
of agent/. What it does not do: keep sessions (a SessionRecorder does), or run the engine (serving.py wires one).
"""
