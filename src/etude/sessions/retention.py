"""How much of what an agent wrote is still there: one hour, one day and one week after it was committed.

    new commits of a branch --blame--> the first that holds a turn's lines: it landed (written down once)
    landings that are old enough --blame--> share of the turn's lines at the last commit before that time --> Event

The share counts the turn's own lines: those that it added, without what the session itself took away again and without
lines that were there before. Only commits that were not looked at before are joined to turns. Cost of a look: one
`git diff` a new commit and a bounded blame for each of its files that holds an agent's line; of a measurement, the same
between the landing and its time. Events have names of their own, so that measuring twice stores once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from etude.code.blame import Written, remaining, without_old
from etude.code.history import Commit, Repository
from etude.protocols import Event, Owner
from etude.sessions.found import Landing
from etude.sessions.landings import Landings
from etude.sessions.store import DAY_S, SessionStore
from etude.sessions.wrote import normal_redacted, written_by
from etude.types import digest_of

AFTER_S = (3600.0, DAY_S, 7 * DAY_S)
"""When lines are counted again."""
MAX_AGE_S = 30 * DAY_S
"""A turn whose lines were not committed in this time is not looked for any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What one look found."""

    commits: int
    """That were new."""
    landed: int
    """Turns whose lines they brought."""
    measured: int
    """Events that were noted."""


class Watch:
    """Of one branch of a repository. Errors: WorkspaceError, StoreError."""

    def __init__(
        self, store: SessionStore, repository: Repository, *, branch: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """clock: seconds since 1970, UTC. branch: that which is checked out, if none is given."""
        self._store, self._repository, self._clock = store, repository, clock
        self._branch = branch or repository.branch()
        self.name = f"{repository.name}:{self._branch}"
        self._landings = Landings(store.database)

    def look(self) -> Watched:
        """Join new commits, then measure what is due."""
        turns = {row.turn.turn_id: row.turn for row in self._store.turns(
            since=self._clock() - MAX_AGE_S - AFTER_S[-1], repositories=(self._repository.name, "")
        )}  # fmt: skip
        writers = {one.writer: one for one in written_by(turns.values())}
        commits, landed = self._join(writers)
        owners = {turn_id: (turn.owner, turn.session_id) for turn_id, turn in turns.items()}
        return Watched(commits=commits, landed=landed, measured=self._measure(writers, owners))

    def _join(self, writers: dict[str, Written]) -> tuple[int, int]:
        seen = self._landings.watched(self.name)
        commits = self._repository.commits(self._branch, after=seen)
        known = {landing.turn_id for landing in self._landings.landings(self.name)}
        waiting = {name: one for name, one in writers.items() if name not in known}
        landed = 0
        for commit in commits:
            able = [one for one in waiting.values() if one.at <= commit.at <= one.at + MAX_AGE_S]
            if not able:
                continue
            own = {one.writer: without_old(self._repository, commit.parent, one, normal_redacted) for one in able}
            for writer, there in self._lines(commit.name, commit.parent, list(own.values())).items():
                landing = Landing(turn_id=writer, branch=self.name, commit=commit.name, at=commit.at, lines=there,
                                  added=own[writer].num_lines)  # fmt: skip
                landed += self._landings.land(landing)
                del waiting[writer]
        if commits:
            self._landings.watch(self.name, commits[-1].name)
        return len(commits), landed

    def _measure(self, writers: dict[str, Written], owners: dict[str, tuple[Owner, str]]) -> int:
        now, measured = self._clock(), 0
        groups: dict[tuple[str, float], list[Landing]] = {}
        for landing in self._landings.landings(self.name):
            for after_s in AFTER_S:
                is_due = landing.at + after_s <= now and landing.turn_id in writers
                if is_due and not self._store.has_event(_event_id(landing, after_s)):
                    groups.setdefault((landing.commit, after_s), []).append(landing)
        for (name, after_s), landings in groups.items():
            commit, last = self._from(name, landings[0].at + after_s)
            own = [
                without_old(self._repository, commit.parent, writers[one.turn_id], normal_redacted) for one in landings
            ]
            there = self._lines(last, commit.parent, own)
            for landing in landings:
                owner, session_id = owners[landing.turn_id]
                event = Event(
                    event_id=_event_id(landing, after_s), session_id=session_id, turn_id=landing.turn_id,
                    kind="retention", at=landing.at + after_s, after_s=after_s,
                    value=there.get(landing.turn_id, 0) / max(1, landing.added),
                )  # fmt: skip
                measured += self._store.note(owner, event)
        return measured

    def _from(self, landed_in: str, until: float) -> tuple[Commit, str]:
        """The commit of a landing, and the branch's last one that is no later than `until`."""
        landed = self._repository.commit(landed_in)
        later = self._repository.commits(self._branch, after=landed_in)
        return landed, next((commit.name for commit in reversed(later) if commit.at <= until), landed_in)

    def _lines(self, commit: str, since: str | None, writers: list[Written]) -> dict[str, int]:
        """How many of each writer's lines are there."""
        found: dict[str, set[tuple[str, int]]] = {}
        for claims in remaining(self._repository, commit, since, writers, normal_redacted).values():
            for claim in claims:
                found.setdefault(claim.writer, set()).add(claim.source)
        return {writer: len(lines) for writer, lines in found.items()}


def _event_id(landing: Landing, after_s: float) -> str:
    return digest_of("retention", landing.turn_id, landing.branch, str(int(after_s)))
