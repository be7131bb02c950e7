"""Rewards: evidence about an episode, collected in a fresh sandbox and stored, and the pure function that prices it."""
