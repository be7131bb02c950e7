import sqlite3
from pathlib import Path

import pytest

from etude.errors import RunError
from etude.rl.ledger import Ledger
from rl.builders import version


def drawn_and_scored(ledger: Ledger, step: int) -> str:
    key = ledger.draw(step)
    assert key is not None
    ledger.scored(key, [version(step)])
    return key


def test_a_prompt_is_drawn_once_however_often_it_is_enrolled(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.enroll(["a", "b", "a"])
    ledger.enroll(["b", "c"])
    assert [ledger.draw(0) for _ in range(4)] == ["a", "b", "c", None]


def test_states_survive_the_process(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.enroll(list("abcd"))
    keys = [drawn_and_scored(ledger, 0) for _ in range(2)]
    ledger.batched(1, keys, "digest")
    drawn_and_scored(ledger, 1)
    ledger.draw(1)
    ledger.close()
    again = Ledger(tmp_path / "l.sqlite")
    assert again.counts() == {"batched": 2, "scored": 1, "running": 1, "redrawn": 0}
    assert again.batches()[0].keys == ("a", "b")
    assert again.audit() == []


def test_recovery_puts_back_running_prompts_and_those_of_dead_versions(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.enroll(list("abc"))
    drawn_and_scored(ledger, 3)
    drawn_and_scored(ledger, 9)
    ledger.draw(9)
    assert ledger.recover(lambda incarnation, n: n <= 5) == 2
    assert [entry.key for entry in ledger.ready()] == ["a"]
    assert [ledger.draw(5), ledger.draw(5)] == ["b", "c"]
    assert ledger.counts()["redrawn"] == 2


def test_a_batch_takes_only_scored_prompts_and_all_or_none(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.enroll(["a", "b"])
    first = drawn_and_scored(ledger, 0)
    with pytest.raises(AssertionError, match="was not scored"):
        ledger.batched(1, [first, "b"], "digest")
    assert ledger.batches() == []
    assert [entry.key for entry in ledger.ready()] == ["a"]


def test_the_audit_finds_a_prompt_trained_twice_and_one_lost(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    ledger = Ledger(path)
    ledger.enroll(list("abc"))
    ledger.batched(1, [drawn_and_scored(ledger, 0)], "x")
    ledger.batched(2, [drawn_and_scored(ledger, 0)], "y")
    db = sqlite3.connect(path)
    db.execute('UPDATE batches SET keys = \'["a", "b"]\' WHERE step = 2')
    db.execute("DELETE FROM prompts WHERE key = 'c'")
    db.execute("INSERT INTO prompts (key, position, state) VALUES ('d', 7, 'waiting')")
    db.commit()
    problems = "\n".join(ledger.audit())
    assert "prompt a is in batch 1 and in batch 2" in problems
    assert "row is missing" in problems


def test_a_file_that_is_no_ledger_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    path.write_bytes(b"this is not a database at all" * 100)
    with pytest.raises(RunError, match=r"l\.sqlite is not a ledger"):
        Ledger(path)
