"""Training: batches in, new weights out.

By reinforcement learning: `step` (one batch, one optimizer step), `losses` (the formulas), `forward` (packed rows
through the network), `optimizer` (fp32 masters), `checkpoint` (exact resume), `service` (the trainer's process),
`client` (how others speak to it; no torch).
"""
