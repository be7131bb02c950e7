"""Windows laid end to end again equal those that were played, whatever was swapped, prefilled again or routed."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.window import Window
from etude.errors import MissingError, StoreError
from etude.protocols import ServedTokens, ServedTurn, TokenChunk
from etude.sessions.windows import contexts
from etude.types import Context, KVEpoch, Opened, Routes, Run
from sessions import made

turn_plans = st.lists(
    st.tuples(
        st.integers(0, 6),  # prompt tokens
        st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), max_size=3),  # chunks: tokens, versions later
        st.booleans(),  # prefilled again
    ),
    min_size=1,
    max_size=6,
)


def play(plan: list, *, has_routes: bool, joined: bool) -> tuple[Context, list[ServedTokens]]:
    """A window as an engine's records make it, and what each turn of it would record."""
    dice = np.random.default_rng(len(plan))
    window, pieces, step, kv = Window(), [], 1, []
    for number, (prompt, chunks, again) in enumerate(plan):
        begin = len(window)
        window.append([int(token) for token in dice.integers(0, 99, max(prompt, int(number == 0)))])
        start = len(window)
        if again:
            kv = []
        if not kv or kv[-1].version.n != step:
            kv = [*kv, Run(start=0 if not kv else begin, version=made.version(step))]
        versions: list[Run] = []
        chunk = TokenChunk(request_id="r", ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), versions=())
        routes_start = max(0, begin - 1)
        for place, (count, later) in enumerate(chunks):
            step += later
            at = len(window)
            run = Run(start=at, version=made.version(step))
            versions.append(run)
            kv = kv if kv[-1].version == run.version else [*kv, run]
            is_last = place == len(chunks) - 1
            rows = at + count - 1 - routes_start
            routes = Routes(
                experts=dice.integers(0, 8, (rows, 2, 2)).astype(np.uint8), valid=dice.integers(0, 2, rows) > 0
            )
            chunk = TokenChunk(
                request_id="r", ids=dice.integers(0, 99, count).astype(np.int32),
                logprobs=-dice.random(count).astype(np.float32), versions=(run,),
                kv_epochs=(KVEpoch(first=start, runs=tuple(kv)),) if is_last else (),
                routes=routes if is_last and has_routes else None, routes_start=routes_start,
            )  # fmt: skip
            window.add(chunk, start=start)
        so_far = window.context()
        pieces.append(
            ServedTokens(
                start=begin,
                ids=so_far.ids[begin:],
                sampled=so_far.sampled[begin:],
                logprobs=so_far.logprobs[begin:],
                versions=tuple(versions),
                kv_epochs=so_far.kv_epochs if joined else chunk.kv_epochs,
                routes=chunk.routes,
                routes_start=chunk.routes_start,
            )
        )
    return window.context(), pieces


def turns_of(pieces: list[ServedTokens], **changes: object) -> list[ServedTurn]:
    return [
        made.turn(number=number, tokens=piece, opened=Opened.TASK if number == 0 else None, **changes)
        for number, piece in enumerate(pieces)
    ]


def same(one: Context, other: Context) -> bool:
    return msgspec.msgpack.encode(one, enc_hook=np.ndarray.tolist) == msgspec.msgpack.encode(
        other, enc_hook=np.ndarray.tolist
    )


@settings(max_examples=300, deadline=None)
@given(turn_plans, st.booleans(), st.booleans())
def test_the_rebuilt_window_is_the_one_that_was_played(plan: list, has_routes: bool, joined: bool) -> None:
    played, pieces = play(plan, has_routes=has_routes, joined=joined)
    (rebuilt,) = contexts(reversed(turns_of(pieces)))
    encoded = [msgspec.msgpack.encode(context, enc_hook=np.ndarray.tolist) for context in (played, rebuilt)]
    assert encoded[0] == encoded[1]


PLAN = [(4, [(3, 0), (2, 1)], False), (2, [(4, 0)], False), (3, [(2, 1)], True)]


def test_windows_of_one_session_are_told_apart() -> None:
    _, pieces = play(PLAN, has_routes=False, joined=False)
    first = turns_of(pieces)
    second = [
        msgspec.structs.replace(turn, turn_id=f"other-{turn.turn_id}", number=turn.number + 3, context=1,
                                opened=Opened.SUMMARY if turn.number == 0 else None)
        for turn in first
    ]  # fmt: skip
    built = contexts([*second, *first])
    assert [context.opened for context in built] == [Opened.TASK, Opened.SUMMARY]
    assert built[0].ids.tolist() == built[1].ids.tolist()


def test_a_missing_piece_is_named() -> None:
    _, pieces = play(PLAN, has_routes=True, joined=False)
    turns = turns_of(pieces)
    for gone, message in ((0, "opened context 0"), (1, "turn 1 of session session-1 is missing")):
        with pytest.raises(MissingError, match=message):
            contexts([turn for turn in turns if turn.number != gone])
    blank = [*turns[:1], msgspec.structs.replace(turns[1], tokens=None), turns[2]]
    with pytest.raises(MissingError, match="turn 1 of session session-1 has no tokens"):
        contexts(blank)
    renumbered = [turns[0], msgspec.structs.replace(turns[2], number=1)]
    with pytest.raises(MissingError, match="what comes before turn 1"):
        contexts(renumbered)


def test_pieces_that_contradict_each_other_are_refused() -> None:
    _, pieces = play(PLAN, has_routes=False, joined=False)
    turns = turns_of(pieces)
    assert turns[1].tokens is not None
    overlap = msgspec.structs.replace(turns[1].tokens, start=2)
    short = msgspec.structs.replace(turns[1].tokens, logprobs=np.zeros(1, np.float32))
    nameless = msgspec.structs.replace(turns[1].tokens, versions=())
    for bad in (overlap, short, nameless):
        with pytest.raises(StoreError):
            contexts([turns[0], msgspec.structs.replace(turns[1], tokens=bad), turns[2]])
    for bad_turn in (
        msgspec.structs.replace(turns[1], number=0),
        msgspec.structs.replace(turns[1], session_id="another"),
        msgspec.structs.replace(turns[1], opened=Opened.FORK),
    ):
        with pytest.raises(StoreError):
            contexts([turns[0], bad_turn])
