"""Asynchronous, single-epoch reinforcement learning: who waits for whom, and what is remembered.

Read `loop.py` first (the flow is drawn on top), then `ledger.py`, `admission.py`, `advantages.py`.
"""
