import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.errors import StoreError
from etude.sessions import journal as module
from etude.sessions.journal import Journal


def bodies(journal: Journal) -> list[bytes]:
    found: list[bytes] = []
    while (batch := journal.batch()) is not None:
        found += batch.bodies
        journal.done(batch)
    return found


def logs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def test_records_come_back_in_order_and_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append([b"one", b""])
    journal.append([b"three"])
    assert bodies(journal) == [b"one", b"", b"three"]
    assert bodies(journal) == []
    journal.append([b"four"])
    assert bodies(journal) == [b"four"]
    journal.close()
    assert logs(tmp_path / "j") == []


def test_what_is_not_done_comes_again_in_the_next_life(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([b"one", b"two"])
    assert journal.batch() is not None
    journal.close()
    again = Journal(tmp_path)
    again.append([b"three"])
    assert list(again.bodies()) == [b"one", b"two", b"three"]
    assert bodies(again) == [b"one", b"two", b"three"]
    again.close()
    assert logs(tmp_path) == []


def test_a_cut_tail_is_ignored_wherever_it_is_cut(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "whole")
    journal.append([b"first record", b"second record"])
    journal.close()
    (path,) = (tmp_path / "whole").glob("*.log")
    data = path.read_bytes()
    first_ends = len(b"etude journal 1\n") + 12 + 12
    for cut in range(len(data)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "000000.log").write_bytes(data[:cut])
        again = Journal(folder)
        assert bodies(again) == ([b"first record"] if cut >= first_ends else [])
        assert again.damaged == []
        again.append([b"new"])
        assert bodies(again) == [b"new"]
        again.close()


def test_zeros_after_a_power_cut_are_ignored_and_other_damage_is_kept_beside(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([b"first record"])
    journal.close()
    (path,) = tmp_path.glob("*.log")
    with path.open("ab") as file:
        file.write(bytes(5000))
    again = Journal(tmp_path)
    assert bodies(again) == [b"first record"]
    again.append([b"second record", b"third record"])
    again.close()
    (path,) = tmp_path.glob("*.log")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"second", b"sec0nd"))
    third = Journal(tmp_path)
    assert bodies(third) == []
    assert [kept.name for kept in third.damaged] == [path.with_suffix(".damaged").name]
    third.close()


def test_another_format_and_a_second_process_are_refused(tmp_path: Path) -> None:
    (tmp_path / "000003.log").write_bytes(b"etude journal 2\nwhatever")
    with pytest.raises(StoreError, match=r"000003\.log is no journal in format 1"):
        Journal(tmp_path)
    (tmp_path / "000003.log").unlink()
    code = f"from pathlib import Path\nfrom etude.sessions.journal import Journal\nJournal(Path({str(tmp_path)!r}))"
    journal = Journal(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "another process's journal" in done.stderr
    journal.close()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_long_journal_is_cut_into_segments_and_done_ones_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1000)
    journal = Journal(tmp_path)
    for number in range(40):
        journal.append([str(number).encode() * 50])
    assert len(logs(tmp_path)) > 2
    batch = journal.batch()
    assert batch is not None
    journal.done(batch)
    assert len(bodies(journal)) + len(batch.bodies) == 40
    assert len(logs(tmp_path)) <= 1
    journal.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 340 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=340k", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(small_disk: Path) -> None:
    journal = Journal(small_disk / "j")
    kept = 0

    def fill() -> None:
        nonlocal kept
        while True:
            journal.append([os.urandom(30_000), os.urandom(30_000)])
            kept += 2

    with pytest.raises(StoreError, match="No space left"):
        fill()
    assert kept > 2
    with pytest.raises(StoreError, match="nothing was kept"):
        journal.append([os.urandom(200_000)])
    journal.append([b"a small one still fits"])
    found = bodies(journal)
    assert len(found) == kept + 1
    journal.append([os.urandom(100_000)])  # what was done made room
    journal.close()
    again = Journal(small_disk / "j")
    assert bodies(again)[0] == b"a small one still fits"
    again.close()
