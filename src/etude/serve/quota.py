"""Quotas of keys: requests a minute, tokens a day, requests at once. In memory: a restart counts anew.

What it does not do: know keys (keys.py), or how much a request will cost before it has run: a day's last request may go
over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from etude.serve.keys import Caller
from etude.serve.refusal import Refusal

_DAY_S, _MINUTE_S = 86_400, 60.0


@dataclass(slots=True)
class _Use:
    starts: deque[float] = field(default_factory=deque)
    day: int = 0
    tokens: int = 0
    running: int = 0


class Quotas:
    """What each key has used. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def begin(self, caller: Caller) -> None:
        """Errors: Refusal (429), saying when to come again; the request counts then all the same as none."""
        use, quota, now = self._uses.setdefault(caller.name, _Use()), caller.quota, self._clock()
        if quota.concurrent and use.running >= quota.concurrent:
            raise _limited(f"{quota.concurrent} requests of this key run already", 1.0)
        if quota.tokens_per_day:
            if use.day != int(now // _DAY_S):
                use.day, use.tokens = int(now // _DAY_S), 0
            if use.tokens >= quota.tokens_per_day:
                raise _limited(f"the {quota.tokens_per_day} tokens of this day are used", _DAY_S - now % _DAY_S)
        if quota.requests_per_minute:
            while use.starts and use.starts[0] <= now - _MINUTE_S:
                use.starts.popleft()
            if len(use.starts) >= quota.requests_per_minute:
                words = f"{quota.requests_per_minute} requests a minute are this key's limit"
                raise _limited(words, use.starts[0] + _MINUTE_S - now)
            use.starts.append(now)
        use.running += 1

    def end(self, caller: Caller, tokens: int) -> None:
        """The request is over, and took so many tokens."""
        use = self._uses[caller.name]
        use.running -= 1
        if caller.quota.tokens_per_day:
            if use.day != int(self._clock() // _DAY_S):
                use.day, use.tokens = int(self._clock() // _DAY_S), 0
            use.tokens += tokens


def _limited(words: str, after_s: float) -> Refusal:
    return Refusal(429, words, code="rate_limit_exceeded", retry_after_s=max(0.0, after_s))
