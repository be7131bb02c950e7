"""Token windows of a recorded session, rebuilt exactly: its turns' tokens laid end to end.

    turns of one session --by context, by number--> pieces [start, end) --agent.window.Window--> Context

Runs, KV epochs and routes are joined by the same code as while an episode is played, so that what was served and what
was rolled out are the same thing to training. A window with a hole is refused, not patched: its later tokens were
sampled after something that is not known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from etude.agent.window import Window
from etude.errors import MissingError, StoreError
from etude.protocols import ServedTokens, ServedTurn, TokenChunk
from etude.types import Context, Run


def contexts(turns: Iterable[ServedTurn]) -> tuple[Context, ...]:
    """The windows of one session, in order of their numbers.

    Errors: MissingError naming the turn whose piece is not there (never stored, redacted, or of a foreign model);
    StoreError for pieces that contradict themselves or each other.
    """
    ordered = sorted(turns, key=lambda turn: turn.number)
    for before, turn in itertools.pairwise(ordered):
        if turn.session_id != before.session_id:
            raise StoreError(f"turns of two sessions: {before.session_id} and {turn.session_id}")
        if turn.number == before.number:
            raise StoreError(f"{_name(turn)} is there twice", cause=f"{before.turn_id} and {turn.turn_id}")
        if turn.number != before.number + 1:
            raise MissingError(f"{_name(turn, before.number + 1)} is missing")
    by_context: dict[int, list[ServedTurn]] = {}
    for turn in ordered:
        by_context.setdefault(turn.context, []).append(turn)
    return tuple(_context(by_context[number]) for number in sorted(by_context))


def _context(turns: Sequence[ServedTurn]) -> Context:
    opened = turns[0].opened
    if opened is None:
        raise MissingError(
            f"the turn that opened context {turns[0].context} of session {turns[0].session_id} is missing"
        )
    window = Window()
    for turn in turns:
        if turn.tokens is None:
            cause = "they were dropped by redaction, or a foreign model answered"
            raise MissingError(f"{_name(turn)} has no tokens", cause=cause)
        if turn is not turns[0] and turn.opened is not None:
            raise StoreError(f"{_name(turn)} opens context {turn.context}, which is open already")
        _lay(window, turn.tokens, _name(turn))
    return window.context(opened)


def _lay(window: Window, tokens: ServedTokens, name: str) -> None:
    """Put a turn's piece at the end of its window."""
    count = len(tokens.ids)
    if not len(tokens.sampled) == len(tokens.logprobs) == count:
        lengths = f"{count} ids, {len(tokens.sampled)} marks, {len(tokens.logprobs)} log-probs"
        raise StoreError(f"{name} is damaged", cause=lengths)
    if tokens.start > len(window):
        raise MissingError(f"what comes before {name} is missing", cause=_places(window, tokens))
    if tokens.start < len(window):
        raise StoreError(f"{name} begins inside the turn before it", cause=_places(window, tokens))
    sampled = np.flatnonzero(tokens.sampled)
    start = tokens.start + (int(sampled[0]) if len(sampled) else count)
    if len(sampled) and (not tokens.versions or tokens.versions[0].start > start):
        raise StoreError(f"{name} is damaged", cause="it does not say which version sampled its tokens")
    pieces = _pieces(tokens.sampled)
    for number, (begin, end) in enumerate(pieces):
        if not tokens.sampled[begin]:
            window.append([int(token) for token in tokens.ids[begin:end]])
            continue
        is_last = all(not tokens.sampled[place] for place, _ in pieces[number + 1 :])
        window.add(_chunk(tokens, begin, end, with_records=is_last), start=start)
    if not len(sampled) and (tokens.kv_epochs or tokens.routes is not None):
        window.add(_chunk(tokens, count, count, with_records=True), start=start)


def _pieces(sampled: np.ndarray) -> list[tuple[int, int]]:
    """Runs of tokens that were all sampled, or all not."""
    borders = [0, *(int(place) + 1 for place in np.flatnonzero(np.diff(sampled))), len(sampled)]
    return [(begin, end) for begin, end in itertools.pairwise(borders) if begin < end]


def _chunk(tokens: ServedTokens, begin: int, end: int, *, with_records: bool) -> TokenChunk:
    """Tokens [begin, end) of the piece as the engine sent them. Its records speak of the whole window."""
    return TokenChunk(
        request_id="", ids=tokens.ids[begin:end], logprobs=tokens.logprobs[begin:end],
        versions=_runs(tokens.versions, tokens.start + begin, tokens.start + end),
        kv_epochs=tokens.kv_epochs if with_records else (), routes=tokens.routes if with_records else None,
        routes_start=tokens.routes_start,
    )  # fmt: skip


def _runs(runs: Sequence[Run], begin: int, end: int) -> tuple[Run, ...]:
    """Of the positions [begin, end)."""
    before = [run for run in runs if run.start <= begin][-1:]
    return (*before, *(run for run in runs if begin < run.start < end))


def _places(window: Window, tokens: ServedTokens) -> str:
    return f"it begins at position {tokens.start}, the window ends at {len(window)}"


def _name(turn: ServedTurn, number: int | None = None) -> str:
    return f"turn {turn.number if number is None else number} of session {turn.session_id}"
