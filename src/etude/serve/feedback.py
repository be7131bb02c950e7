"""POST /feedback: what an editor saw happen to a turn's work. It goes to the recorder, under the caller's own tenant.

What it does not do: judge it (live).
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from etude.errors import StoreError
from etude.protocols import Event, Owner, SessionRecorder
from etude.serve.refusal import Refusal, refusal_of

Id = Annotated[str, Meta(min_length=1, max_length=128)]


class FeedbackRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """One event. `session` and `turn` are those of the answer's headers x-etude-session and x-etude-turn."""

    session: Id
    kind: Literal["kept", "edited", "reverted", "follow_up", "rating", "latency", "retention"]
    turn: Id | None = None
    value: Annotated[float, Meta(ge=-1e9, le=1e9)] | None = None
    text: Annotated[str, Meta(max_length=65_536)] = ""
    after_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    at: Annotated[float, Meta(ge=0, le=1e11)] | None = None
    """Seconds since 1970; now, if it is left out."""
    event_id: Id | None = None
    """Unique: sending an event twice is sending it once."""


async def note(recorder: SessionRecorder | None, owner: Owner, body: FeedbackRequest) -> dict[str, Any]:
    """Errors: Refusal (404 where no such session of this tenant is kept)."""
    event = Event(
        event_id=body.event_id or uuid.uuid4().hex, session_id=body.session, turn_id=body.turn, kind=body.kind,
        at=time.time() if body.at is None else body.at, value=body.value, text=body.text, after_s=body.after_s,
    )  # fmt: skip
    try:
        is_known = recorder is not None and await recorder.note(owner, event)
    except StoreError as error:
        raise refusal_of(error) from error
    if not is_known:
        raise Refusal(404, "no such session is kept", code="session_not_found", param="session")
    return {"event_id": event.event_id}
