"""Etude's own: episodes of a run (data/episodes.py), and conversations that `etude agent` keeps.

runs/NAME/episodes/train-000000.mp       a segment of graded attempts
.../agent/ID/DATE/conversation.mp        a person's conversation about a folder
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from etude.agent.interactive import Saved
from etude.data.episodes import EpisodeRecord, read_segment
from etude.errors import SessionError, StoreError
from etude.frames import read_file
from etude.protocols import Message, Owner, Reply, RepositoryState, ServedTurn
from etude.types import Effort, Opened, StopReason, digest_of

SOURCE = "agent"
_HEAD = b"etude episodes "


def is_log(path: Path, head: bytes) -> bool:
    """Whether a file is a segment of episodes or a kept conversation."""
    return path.suffix == ".mp" and (head.startswith(_HEAD) or path.name == "conversation.mp")


def read(path: Path, owner: Owner, skipped: Counter[str]) -> Iterator[ServedTurn]:
    """The turns of every episode, or of the conversation."""
    try:
        if path.name == "conversation.mp":
            yield from _conversation(path, read_file(path, Saved), owner)
            return
        for record in read_segment(path):
            yield from _episode(path, record, owner)
    except StoreError as error:
        raise SessionError(error.message, cause=error.cause, hint=error.hint) from error


def _episode(path: Path, record: EpisodeRecord, owner: Owner) -> Iterator[ServedTurn]:
    episode, start = record.scored.episode, path.stat().st_mtime
    model = "unknown" if record.step is None else f"step {record.step}"
    messages = [Message(role="user", text=record.task.prompt)]
    for number, turn in enumerate(episode.turns):
        reply = Reply(text=turn.text, calls=turn.calls, stop=turn.stop, effort=turn.effort, span=None)
        where = (episode.episode_id, number, start, turn.wall_s)
        yield _turn(owner, where, model, messages, reply, None)
        start += turn.wall_s
        messages = [Message(role="tool", results=turn.results)] if turn.results else []


def _conversation(path: Path, saved: Saved, owner: Owner) -> Iterator[ServedTurn]:
    root = saved.folder.rstrip("/").rpartition("/")[2]
    repository = RepositoryState(root=root, commit="") if root else None
    session_id = digest_of(saved.folder, path.parent.name)
    messages: list[Message] = []
    number = 0
    for message in saved.conversation:
        if message.role != "assistant":
            messages.append(message)
            continue
        effort = Effort(calls=len(message.calls), turns=1)
        reply = Reply(text=message.text, calls=message.calls, stop=StopReason.END, effort=effort, span=None)
        where = (session_id, number, path.stat().st_mtime, 0.0)
        yield _turn(owner, where, "unknown", messages, reply, repository)
        messages, number = [], number + 1


def _turn(
    owner: Owner, where: tuple[str, int, float, float], model: str, messages: list[Message], reply: Reply,
    repository: RepositoryState | None,
) -> ServedTurn:  # fmt: skip
    """where: session, number, start, seconds."""
    session_id, number, start, wall_s = where
    return ServedTurn(
        turn_id=digest_of(SOURCE, owner.tenant, owner.user, session_id, str(number)), session_id=session_id,
        number=number, owner=owner, source=SOURCE, model=model, started_at=start, first_token_s=None, wall_s=wall_s,
        messages=tuple(messages), reply=reply, opened=Opened.TASK if number == 0 else None, repository=repository,
    )  # fmt: skip
