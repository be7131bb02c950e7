"""Settings of the pretraining corpus. Loads nothing heavy."""

from __future__ import annotations

import dataclasses

from etude.errors import RecipeError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSettings:
    """Which documents are made of which functions. A pass makes one document of a function, with faults of its own."""

    passes_callable: int = 10
    """Passes over functions that can be called alone: like the tasks', with the imports and helpers they need."""
    passes_free: int = 4
    """Passes over other functions at the top level of a module."""
    passes_method: int = 1
    """Passes over functions that take `self` or `cls`."""
    min_lines_method: int = 5
    """Shorter ones of these are left out: they hold little that can be wrong."""
    kinds: tuple[str, ...] = ()
    """Kinds of faults (`tasks.mutate`); empty: all that training may have."""
    max_faults: int = 3
    """A document holds 1 to this many faults, evenly."""
    wrong_edits: tuple[float, ...] = (1.0,)
    """Shares with 0, 1, 2, ... wrong edits before the repair, each undone again."""
    max_tokens: int = 256
    """Longer documents are left out."""
    num_probes: int = 400
    """Functions, chosen by hash, that no document is made of: exact repair is measured on them, with one fault each."""
    vocab_size: int = 2048
    """Tokens of the tokenizer, trained on the same functions."""
    seed: int = 0
    """Of the faults and of the documents' order."""

    def __post_init__(self) -> None:
        for name in ("passes_callable", "passes_free", "passes_method", "min_lines_method", "num_probes"):
            if getattr(self, name) < 0:
                raise RecipeError(f"corpus.{name} = {getattr(self, name)} must not be negative")
        for name in ("max_faults", "max_tokens"):
            if getattr(self, name) < 1:
                raise RecipeError(f"corpus.{name} = {getattr(self, name)} must be at least 1")
        _check_shares("corpus.wrong_edits", self.wrong_edits)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TranscriptSettings:
    """How often what happens in expert transcripts. The mix is what the policy starts reinforcement learning with."""

    per_task: int = 2
    """Transcripts of a task, each with choices of its own."""
    read_first: float = 0.05
    """Share that begins with read_file."""
    test_first: float = 0.15
    """Share that runs the tests before the first edit."""
    wrong_edits: tuple[float, ...] = (0.45, 0.3, 0.15, 0.1)
    """Shares with 0, 1, 2, ... wrong edits before the right one."""
    give_up: float = 0.15
    """Chance, after each failing test of a wrong edit, that the transcript ends there."""
    test_after: float = 0.65
    """Share that runs the tests after the right edit; the others finish at once."""
    max_tokens: int = 768
    """Longer transcripts are left out."""
    seed: int = 0
    """Of all choices."""

    def __post_init__(self) -> None:
        for name in ("read_first", "test_first", "give_up", "test_after"):
            if not 0 <= getattr(self, name) <= 1:
                raise RecipeError(f"transcripts.{name} = {getattr(self, name)} must be a share", hint="from 0 to 1")
        _check_shares("transcripts.wrong_edits", self.wrong_edits)
        if self.per_task < 1 or self.max_tokens < 1:
            raise RecipeError("transcripts.per_task and transcripts.max_tokens must be at least 1")


def _check_shares(name: str, shares: tuple[float, ...]) -> None:
    if min(shares, default=-1) < 0 or not sum(shares) > 0:
        raise RecipeError(f"{name} = {list(shares)} must be shares", cause="none is above 0, or one is below")
