import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from etude.errors import MissingError, RecipeError, StoreError
from etude.protocols import Consent
from etude.sessions.entry import entry_of_turn
from etude.sessions.found import UnavailableError
from etude.sessions.landings import Landings
from etude.sessions.store import DAY_S, SessionStore
from sessions import made
from sessions.found_rows import landing

Open = Callable[..., SessionStore]


def read(text: object) -> str:
    return "clean"


def stored(store: SessionStore) -> list[str]:
    return sorted(row.turn.turn_id for row in store.turns())


def test_a_turn_comes_back_as_it_went_in(url: str, open_store: Open) -> None:
    turn = made.turn(tokens=made.tokens())
    store = open_store(url)
    store.add([entry_of_turn(turn, 1.0, read)])
    (row,) = store.turns("acme", "session-1")
    assert row.redacted == {}
    assert msgspec.to_builtins(msgspec.structs.replace(row.turn, tokens=None)) == msgspec.to_builtins(
        msgspec.structs.replace(turn, tokens=None)
    )
    assert row.turn.tokens is not None
    assert row.turn.tokens.ids.tolist() == [0, 1, 2, 3, 4]
    assert row.turn.tokens.versions == turn.tokens.versions


def test_storing_twice_is_storing_once(url: str, open_store: Open) -> None:
    store, turn, event = open_store(url), made.turn(), made.event()
    assert (store.record(turn).turns, store.record(turn).known) == (1, 1)
    assert store.note(turn.owner, event)
    assert store.note(turn.owner, event)
    assert len(store.events("acme", "session-1")) == 1
    assert [row.num_turns for row in store.sessions()] == [1]


def test_without_consent_nothing_is_stored(url: str, open_store: Open) -> None:
    store = open_store(url)
    nobody = made.owner(consent=Consent.NONE)
    assert store.record(made.turn(owner=nobody)).turns == 0
    assert store.add([entry_of_turn(made.turn(owner=nobody), 1.0, None)]).refused == 1
    store.record(made.turn())
    assert not store.note(nobody, made.event())
    assert len(stored(store)) == 1
    assert store.events("acme", "session-1") == []


def test_an_event_needs_a_session_of_its_tenant(url: str, open_store: Open) -> None:
    store = open_store(url)
    store.record(made.turn())
    assert not store.note(made.owner(tenant="other"), made.event())
    assert not store.note(made.owner(), made.event(session_id="session-2"))
    assert store.note(made.owner(), made.event())


def test_turns_are_chosen_by_consent_time_version_and_repository(url: str, open_store: Open) -> None:
    store = open_store(url)
    first = made.turn(tokens=made.tokens(by=4), number=0)
    second = made.turn(tokens=made.tokens(by=5), number=1, owner=made.owner(consent=Consent.KEEP))
    store.add([entry_of_turn(turn, 1.0, read) for turn in (second, first)])
    assert [row.turn.turn_id for row in store.turns()] == [first.turn_id, second.turn_id]
    assert [row.turn.turn_id for row in store.turns(consent=Consent.TRAIN)] == [first.turn_id]
    assert [row.turn.turn_id for row in store.turns(sampled_by=made.version(5))] == [second.turn_id]
    assert [row.turn.turn_id for row in store.turns(since=second.started_at)] == [second.turn_id]
    assert [row.turn.turn_id for row in store.turns(until=second.started_at)] == [first.turn_id]
    assert len(list(store.turns(repositories=["shop"]))) == 2
    assert list(store.turns(repositories=["elsewhere"])) == []
    assert list(store.turns("other")) == []


def test_what_is_past_its_retention_is_deleted_with_all_that_hangs_on_it(url: str, open_store: Open) -> None:
    now = [made.turn().started_at]
    store = open_store(url, clock=lambda: now[0], retention_days=10)
    short = made.turn(owner=made.owner(retention_days=2), session_id="short")
    usual, longer = made.turn(session_id="usual"), made.turn(session_id="usual", owner=made.owner(retention_days=30))
    for turn in (short, usual, longer):
        store.record(turn)
    store.note(made.owner(), made.event(session_id="short", turn_id=short.turn_id))
    assert store.expire() == 0
    now[0] += 3 * DAY_S
    assert store.expire() == 1
    assert {row.session_id for row in store.sessions()} == {"usual"}
    assert store.events("acme", "short") == []
    now[0] += 8 * DAY_S
    assert store.expire() == 1
    assert stored(store) == [longer.turn_id]


def test_forgetting_deletes_everything_and_names_the_versions_that_learned_of_it(url: str, open_store: Open) -> None:
    now = [100.0]
    store = open_store(url, clock=lambda: now[0])
    ann = [made.turn(session_id=f"s{n % 2}", owner=made.owner(user="ann")) for n in range(4)]
    bob, other = made.turn(session_id="b", owner=made.owner(user="bob")), made.turn(owner=made.owner(tenant="other"))
    for turn in (*ann, bob, other):
        store.record(turn)
    store.note(made.owner(user="ann"), made.event(session_id="b"))
    store.note(made.owner(user="ann"), made.event(session_id="s0", turn_id=ann[0].turn_id))
    store.mark_trained([turn.turn_id for turn in ann[:2]], made.version(7))
    store.mark_trained([ann[0].turn_id, bob.turn_id], made.version(3))
    Landings(store.database).land(landing(ann[0].turn_id))
    assert store.forget("acme", "ann") == (made.version(3), made.version(7))
    assert stored(store) == sorted([bob.turn_id, other.turn_id])
    assert {row.session_id for row in store.sessions()} == {"b", "session-1"}
    assert store.events("acme", "b") == []
    assert Landings(store.database).landings("shop:main") == []
    assert store.forget("acme", "ann") == ()
    late = entry_of_turn(made.turn(owner=made.owner(user="ann")), 99.0, None)
    assert store.add([late]).refused == 1
    anew = entry_of_turn(made.turn(owner=made.owner(user="ann")), 101.0, None)
    assert store.add([anew]).turns == 1


def test_forgotten_text_is_in_no_file_of_sqlite(tmp_path: Path, open_store: Open) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'sessions.db'}")
    for _ in range(20):
        store.record(made.turn("an unmistakable sentence " * 40))
    assert any(b"unmistakable" in path.read_bytes() for path in tmp_path.iterdir())
    store.forget("acme", "ann")
    assert not any(b"unmistakable" in path.read_bytes() for path in tmp_path.iterdir())


def test_turns_and_sessions_can_be_dropped(url: str, open_store: Open) -> None:
    store = open_store(url)
    first, second = made.turn(), made.turn()
    store.record(first)
    store.record(second)
    store.drop_turn(first.turn_id)
    assert stored(store) == [second.turn_id]
    store.drop_session("acme", "session-1")
    assert store.sessions() == []
    with pytest.raises(MissingError):
        store.drop_session("acme", "session-1")
    with pytest.raises(MissingError):
        store.mark_trained([first.turn_id], made.version(1))


def test_odd_names_are_stored_and_found_again(url: str, open_store: Open) -> None:
    store = open_store(url)
    odd = made.turn(turn_id="t\0\ud800" + "x" * 5000, session_id="s\0" * 2000, owner=made.owner(user="\0"), model="\0")
    assert store.record(odd).turns == 1
    assert store.record(odd).known == 1
    assert store.note(made.owner(user="\0"), made.event(session_id="s\0" * 2000, event_id="\ud800"))
    assert len(list(store.turns("acme", "s\0" * 2000))) == 1
    store.forget("acme", "\0")
    assert store.sessions() == []


def test_a_database_of_another_format_is_refused_by_name(tmp_path: Path, open_store: Open) -> None:
    url = f"sqlite:///{tmp_path / 'sessions.db'}"
    open_store(url).record(made.turn())
    with sqlite3.connect(tmp_path / "sessions.db") as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE name = 'format'")
    with pytest.raises(StoreError, match=r"sessions\.db is of another format\ncause: format = 99"):
        open_store(url).sessions()


def test_a_turn_of_another_format_or_a_damaged_one_is_refused_by_name(tmp_path: Path, open_store: Open) -> None:
    store, turn = open_store(f"sqlite:///{tmp_path / 'sessions.db'}"), made.turn()
    store.record(turn)
    with sqlite3.connect(tmp_path / "sessions.db") as connection:
        for payload in (msgspec.msgpack.encode({"format": 2, "more": 1}), b"\xc1", b""):
            connection.execute("UPDATE turns SET payload = ?", (payload,))
            connection.commit()
            with pytest.raises(StoreError, match=turn.turn_id):
                list(store.turns())


def test_no_file_and_no_folder_is_open_to_others(tmp_path: Path, open_store: Open) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'new' / 'sessions.db'}")
    store.record(made.turn())
    assert stat.S_IMODE((tmp_path / "new" / "sessions.db").stat().st_mode) == 0o600


def test_what_is_no_database_is_named(tmp_path: Path, open_store: Open) -> None:
    for url in ("mysql://x/y", "no url", "sqlite3:///x"):
        with pytest.raises(RecipeError):
            open_store(url)
    with pytest.raises(UnavailableError, match=r"postgresql.*127\.0\.0\.1:1") as caught:
        open_store("postgresql://who:secretword@127.0.0.1:1/x").sessions()
    assert "secretword" not in str(caught.value)
    (tmp_path / "file").write_text("no database " * 100)
    with pytest.raises(StoreError):
        open_store(f"sqlite:///{tmp_path / 'file'}").sessions()
