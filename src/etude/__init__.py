"""Etude trains coding agents on anyone's code. `etude --help` is the way in; `docs/` explains."""

__version__ = "0.1.0"
