"""What the turns of recorded sessions wrote: their edits, without those that failed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from etude.code.added import Edit, edits_of_call
from etude.code.blame import Written, written
from etude.code.same_lines import normal
from etude.protocols import ServedTurn
from etude.sessions.redact import redact


@functools.lru_cache(maxsize=200_000)
def normal_redacted(line: str) -> str:
    """As lines are compared: what was taken out of a turn is taken out of the repository's line too."""
    return normal(redact(line)[0])


def written_by(turns: Iterable[ServedTurn]) -> list[Written]:
    """The lines that each turn left, of any number of sessions; turns that wrote nothing are not among them."""
    sessions: dict[tuple[str, str], list[ServedTurn]] = {}
    for turn in turns:
        sessions.setdefault((turn.owner.tenant, turn.session_id), []).append(turn)
    found: list[Written] = []
    for of_session in sessions.values():
        ordered = sorted(of_session, key=lambda turn: turn.number)
        edits = [
            (turn.turn_id, turn.started_at, edits_of(turn, ordered[place + 1 :])) for place, turn in enumerate(ordered)
        ]
        found += [one for one in written(edits, normal_redacted) if one.num_lines]
    return found


def edits_of(turn: ServedTurn, later: Sequence[ServedTurn]) -> list[Edit]:
    """Of the calls that did not fail. Their answers are in the next turn of the same context."""
    follower = next((other for other in later if other.context == turn.context), None)
    answers = next((message.results for message in follower.messages if message.results), ()) if follower else ()
    found: list[Edit] = []
    for place, call in enumerate(turn.reply.calls):
        if place >= len(answers) or answers[place].error is None:
            found += edits_of_call(call)
    return found
