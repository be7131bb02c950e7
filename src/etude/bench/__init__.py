"""Measuring policies: run a suite of tasks several times, estimate, compare. Trains nothing."""
