"""Remembered windows: bounded, the longest unused go first, and each owner finds its own alone."""

from __future__ import annotations

import numpy as np

from etude.protocols import Consent, Message, Owner
from etude.serve.conversation import chain, in_order, link_of, said, scope_of
from etude.serve.memory import Boundary, Memory, ServedWindow, Session, Sessions
from etude.types import ToolCall

SESSION = Session(session_id="s", stem="s")
ANN, BOB = (scope_of(Owner(tenant=name, user="u", consent=Consent.KEEP)) for name in ("ann", "bob"))


def kept(memory: Memory, name: str, size: int = 10) -> list[str]:
    window = ServedWindow(session=SESSION, context=0, context_id=name, ids=np.zeros(0, np.int32))
    return memory.keep(window, np.zeros(size, np.int32), Boundary(5, size, name.encode()))


def test_the_longest_unused_window_goes_first_by_number_and_by_tokens() -> None:
    memory = Memory(max_windows=3, max_tokens=100)
    assert [kept(memory, name) for name in "abc"] == [[], [], []]
    assert kept(memory, "d") == ["a"]
    assert memory.find(b"a", None) is None
    assert memory.find(b"b", None) is not None
    assert kept(memory, "e", 75) == ["b"]
    assert kept(memory, "f", 60) == ["c", "d", "e"]
    assert (len(memory), memory.tokens) == (1, 60)


def test_a_window_in_use_is_not_forgotten() -> None:
    memory = Memory(max_windows=1, max_tokens=100)
    kept(memory, "a")
    found = memory.find(b"a", None)
    assert found is not None
    found[0].is_busy = True
    assert kept(memory, "b") == ["b"]
    assert memory.find(b"a", None) is not None
    assert memory.find(b"a", Session(session_id="t", stem="t")) is None


def test_sessions_are_the_owners_own() -> None:
    sessions = Sessions(4)
    mine = sessions.named(ANN, "x")
    assert sessions.named(ANN, "x") is mine
    assert sessions.named(ANN, mine.session_id) is mine
    assert sessions.named(BOB, "x") is not mine
    assert sessions.named(BOB, mine.session_id) is not mine
    for number in range(4):
        sessions.named(ANN, str(number))
    again = sessions.named(ANN, "x")
    assert again.session_id != mine.session_id
    assert again.stem == mine.stem


def test_a_digest_is_of_the_meaning_and_of_the_owner() -> None:
    def call(**arguments: object) -> Message:
        return said(" ok\n", [ToolCall(name="f", arguments=arguments)])

    user = Message(role="user", text="x")
    same = [chain(ANN, [], [user, call(a=1, b=[2.0])])[-1], chain(ANN, [], [user, call(b=[2], a=1.0)])[-1]]
    assert same[0] == same[1]
    others = [
        chain(BOB, [], [user, call(a=1, b=[2])]),
        chain(ANN, [{"name": "f"}], [user, call(a=1, b=[2])]),
        chain(ANN, [], [user, call(a="1", b=[2])]),
        chain(ANN, [], [Message(role="user", text="x "), call(a=1, b=[2])]),
    ]
    assert len({same[0], *(links[-1] for links in others)}) == 5
    assert link_of(b"", said("ok ", ())) == link_of(b"", said("ok", ()))


def test_results_stand_in_the_order_of_the_calls() -> None:
    found = in_order(["a", "b", "c"], [("c", "3"), ("a", "1"), ("x", "?")])
    assert [result.text for result in found] == ["1", "", "3", "?"]
    assert [result.text for result in in_order(["a", "b"], [("a", "1")])] == ["1"]
