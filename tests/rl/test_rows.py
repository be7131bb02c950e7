"""What a step's row counts."""

from __future__ import annotations

import msgspec

from etude.rl.rows import rerendered_share, tool_counts
from etude.types import Effort, Opened, StopReason, ToolCall, ToolErrorKind, ToolResult, Turn
from rl.builders import context, scored


def turn(*pairs: tuple[str, ToolErrorKind | None]) -> Turn:
    return Turn(
        text="", calls=tuple(ToolCall(name=name, arguments={}) for name, _ in pairs),
        results=tuple(ToolResult(text="", error=error) for _, error in pairs), stop=StopReason.END, effort=Effort(),
        span=None, wall_s=0.0,
    )  # fmt: skip


def test_calls_and_errors_are_counted_by_tool_and_kind() -> None:
    bad, late = ToolErrorKind.INVALID_ARGUMENTS, ToolErrorKind.TIMEOUT
    turns = (turn(("edit_file", None), ("edit_file", bad)), turn(("shell", late), ("fly_away", bad)))
    one = scored(1.0)
    member = msgspec.structs.replace(one, episode=msgspec.structs.replace(one.episode, turns=turns))
    assert tool_counts([member, scored(0.0), member]) == {
        "calls_edit_file": 4, "calls_shell": 2, "calls_unknown_tool": 2, "errors_edit_file_invalid_arguments": 2,
        "errors_shell_timeout": 2, "errors_unknown_tool_invalid_arguments": 2,
    }  # fmt: skip


def test_the_share_of_turns_that_were_written_anew() -> None:
    again = msgspec.structs.replace(context(), opened=Opened.RERENDER)
    one = scored(1.0, contexts=(context(), again))
    member = msgspec.structs.replace(one, episode=msgspec.structs.replace(one.episode, turns=(turn(), turn(), turn())))
    other = scored(0.0)
    plain = msgspec.structs.replace(other, episode=msgspec.structs.replace(other.episode, turns=(turn(),)))
    assert rerendered_share([member, plain]) == 1 / 4
    assert rerendered_share([other]) == 0.0
