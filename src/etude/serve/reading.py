"""A reply while it is sampled: ids in, text that may be said out.

The format reads the reply anew as it grows, and what its text has grown by is said, but for an end that a later token
may still change: half a character, spaces, the beginning of a call. Calls are said once the reply has ended. One that
cannot be read is said as the text that it is, so that the client sees what the model wrote.

    ids --feed--> text that may be said --finish--> the rest, calls

What it does not do: change what was said. What the client was told is `told`, whatever the format makes of it later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.data.render import Parsed, Renderer
from etude.types import ToolCall

_MARK_CHARS = 48
"""A call's opening mark is shorter."""
_SPARSE = 64
"""A reply is read anew once it has grown by one part in so many: the work stays in proportion to its length."""


class ReplyReader:
    """Reads one reply. stops: texts that end it where they begin."""

    def __init__(
        self, renderer: Renderer, *, forced: Sequence[int] = (), stops: Sequence[str] = (), keeps_broken: bool = False
    ) -> None:
        """forced: ids that the reply begins with and that were not sampled. keeps_broken: calls that cannot be read
        stay calls, for a harness that answers them."""
        self._renderer, self._stops, self._keeps_broken = renderer, tuple(stops), keeps_broken
        self._ids: list[int] = list(forced)
        self._forced = len(self._ids)
        self._read = 0
        self.told = ""
        """What was said so far."""
        self.cut_by = ""
        """Of `stops`, the one that was met."""

    @property
    def is_cut(self) -> bool:
        return bool(self.cut_by)

    def add(self, ids: np.ndarray) -> None:
        """Take ids without reading them, for an answer that goes out in one piece."""
        self._ids += ids.tolist()

    def feed(self, ids: np.ndarray) -> str:
        """Take ids; what may be said now."""
        self._ids += ids.tolist()
        if len(self._ids) - self._read < len(self._ids) // _SPARSE:
            return ""
        self._read = len(self._ids)
        parsed = self._renderer.parse(self._ids)
        text = self._cut(_begun(parsed.text))
        return self._say(text if self.is_cut else self._safe(text, has_calls=bool(parsed.calls)))

    def stopped(self) -> bool:
        """Whether one of `stops` has been met, for an answer that goes out in one piece."""
        if self._stops and not self.is_cut:
            self._cut(_begun(self._renderer.parse(self._ids).text))
        return self.is_cut

    def finish(self) -> tuple[str, tuple[ToolCall, ...], Parsed]:
        """The rest to say, the calls, and the format's own reading with its counts."""
        parsed = self._renderer.parse(self._ids)
        if any(call.error for call in parsed.calls) and not self._keeps_broken:
            body = self._ids[:-1] if self._ids and self._ids[-1] in self._renderer.stop_ids else self._ids
            raw = self._renderer.spell(body)
            known = raw.find(self.told)
            text = self._cut(self.told + raw[known + len(self.told) :] if known >= 0 else raw)
            return self._say(text), (), parsed
        text = self._cut(_begun(parsed.text))
        return self._say(text), () if self.is_cut else parsed.calls, parsed

    def _say(self, text: str) -> str:
        """The part of `text` that was not said; where it differs from what was, the rest after what they share."""
        if text.startswith(self.told):
            new = text[len(self.told) :]
        else:
            same = next((n for n, (a, b) in enumerate(zip(text, self.told, strict=False)) if a != b), len(text))
            new = text[max(same, len(self.told)) :]
        self.told += new
        return new

    def _cut(self, text: str) -> str:
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if not places:
            return text
        place, self.cut_by = min(places)
        return text[:place]

    def _safe(self, text: str, *, has_calls: bool) -> str:
        """The part that no later token changes."""
        if text.lstrip()[:1] in ("{", "["):  # some formats have calls that begin so
            return ""
        if not has_calls:
            mark = text.rfind("<", max(0, len(text) - _MARK_CHARS))
            text = text if mark < 0 else text[:mark]
        if self._stops:
            text = text[: max(0, len(text) - max(map(len, self._stops)) + 1)]
        return text.rstrip().rstrip("\ufffd").rstrip()


def _begun(text: str) -> str:
    """Without line feeds before it: whether they are its own, some formats know only at the end."""
    return text.lstrip("\n")
