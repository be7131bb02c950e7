import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard

from etude.data import episodes
from etude.data.episodes import EpisodeRecord, EpisodeWriter, read_episodes
from etude.errors import StoreError
from etude.frames import encode
from etude.types import Context, Opened, Run, Span, Version
from report.made_run import scored, task


def record(number: int, when: str = "train") -> EpisodeRecord:
    return EpisodeRecord(
        task=task(number), scored=scored(task(number), f"e{number}", solved=True), when=when, step=number
    )


def with_tokens(number: int) -> EpisodeRecord:
    made = record(number)
    version = Version(incarnation=1, n=0, step=0)
    context = Context(
        ids=np.arange(9, dtype=np.int32),
        sampled=np.ones(9, bool),
        logprobs=np.zeros(9, np.float32),
        versions=(Run(start=0, version=version),),
        kv_epochs=(),
        routes=None,
        opened=Opened.TASK,
    )
    turns = tuple(
        msgspec.structs.replace(turn, span=Span(context=0, start=0, end=9)) for turn in made.scored.episode.turns
    )
    episode = msgspec.structs.replace(made.scored.episode, contexts=(context,), turns=turns)
    return msgspec.structs.replace(made, scored=msgspec.structs.replace(made.scored, episode=episode))


def write(folder: Path, *records: EpisodeRecord) -> None:
    writer = EpisodeWriter(folder)
    for one in records:
        writer.append(one)
    writer.close()


def test_records_come_back_as_they_were_written_by_any_number_of_writers(tmp_path: Path) -> None:
    records = [record(number) for number in range(5)]
    write(tmp_path / "new" / "episodes", *records[:2])
    write(tmp_path / "new" / "episodes", *records[2:])
    assert list(read_episodes(tmp_path / "new" / "episodes")) == records


def test_a_reader_takes_one_occasion_and_no_more_than_it_asked_for(tmp_path: Path) -> None:
    records = [record(number, when) for number, when in enumerate(["before", "train", "before", "after"])]
    write(tmp_path, *records)
    assert list(read_episodes(tmp_path, when="before")) == [records[0], records[2]]
    assert list(read_episodes(tmp_path, 1, "before")) == [records[0]]
    assert list(read_episodes(tmp_path, limit=0)) == []
    assert list(read_episodes(tmp_path, when="control")) == []
    assert len(list(read_episodes(tmp_path, limit=99))) == 4


def test_no_folder_has_no_records(tmp_path: Path) -> None:
    assert list(read_episodes(tmp_path / "missing")) == []


def test_tokens_are_kept_only_where_asked_for(tmp_path: Path) -> None:
    writer = EpisodeWriter(tmp_path / "slim")
    writer.append(with_tokens(1))
    writer.close()
    slim = next(read_episodes(tmp_path / "slim"))
    assert slim == record(1)
    writer = EpisodeWriter(tmp_path / "whole", keep_tokens=True)
    writer.append(with_tokens(1))
    writer.close()
    whole = next(read_episodes(tmp_path / "whole")).scored.episode
    np.testing.assert_array_equal(whole.contexts[0].ids, np.arange(9, dtype=np.int32), strict=True)
    assert whole.turns[0].span == Span(context=0, start=0, end=9)


def test_a_segment_cut_anywhere_loses_only_the_record_that_was_cut(tmp_path: Path) -> None:
    records = [record(number) for number in range(3)]
    write(tmp_path, *records)
    path = tmp_path / "train-000000.mp"
    whole = path.read_bytes()
    seen = set()
    for length in itertools.chain(range(60), range(60, len(whole), 37), [len(whole) - 1]):
        path.write_bytes(whole[:length])
        back = list(read_episodes(tmp_path))
        assert back == records[: len(back)]
        seen.add(len(back))
    assert seen == {0, 1, 2}


def test_a_tail_of_zeros_after_a_power_cut_is_ignored(tmp_path: Path) -> None:
    records = [record(number) for number in range(2)]
    write(tmp_path, *records)
    path = tmp_path / "train-000000.mp"
    whole = path.read_bytes()
    for tail in (bytes(5), bytes(1000), (100).to_bytes(4, "big") + bytes(100)):
        path.write_bytes(whole + tail)
        assert list(read_episodes(tmp_path)) == records


def test_a_damaged_record_before_the_end_is_named_with_its_place(tmp_path: Path) -> None:
    write(tmp_path, *(record(number) for number in range(3)))
    path = tmp_path / "train-000000.mp"
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"train-000000.mp is damaged at byte 17"):
        list(read_episodes(tmp_path))


def test_a_record_that_claims_to_be_huge_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    write(tmp_path, record(0))
    path = tmp_path / "train-000000.mp"
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(episodes.MAX_RECORD + 1))
    good = zstandard.compress(encode(record(1)))
    with path.open("ab") as file:
        for body in (bomb, good):
            file.write(len(body).to_bytes(4, "big") + body)
    with pytest.raises(StoreError, match="damaged") as caught:
        list(read_episodes(tmp_path))
    assert caught.value.cause == "the record is too long"


@pytest.mark.parametrize("data", [b"etude episodes 2\n", b"PK\x03\x04 something else"])
def test_a_segment_of_another_format_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "train-000000.mp").write_bytes(data)
    with pytest.raises(StoreError, match="in format 1"):
        list(read_episodes(tmp_path))


def test_a_segment_that_has_grown_is_closed_and_a_deleted_one_is_not_numbered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "SEGMENT_BYTES", 100)
    write(tmp_path, *(record(number) for number in range(3)))
    assert sorted(os.listdir(tmp_path)) == [f"train-{number:06d}.mp" for number in range(3)]
    (tmp_path / "train-000000.mp").unlink()
    write(tmp_path, record(3))
    assert list(read_episodes(tmp_path)) == [record(1), record(2), record(3)]


@pytest.mark.parametrize("when", ["", "../x", "Before", "a b", "x" * 60])
def test_an_occasion_that_is_no_word_is_refused_before_anything_is_written(tmp_path: Path, when: str) -> None:
    writer = EpisodeWriter(tmp_path)
    with pytest.raises(ValueError, match="not an occasion"):
        writer.append(record(0, when))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_used_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot make"):
        EpisodeWriter(tmp_path / "file")


def test_kill_9_leaves_whole_records(tmp_path: Path) -> None:
    source = (
        "import sys; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from data.test_episodes import record\n"
        "from etude.data.episodes import EpisodeWriter\n"
        "writer = EpisodeWriter(Path(sys.argv[1]))\n"
        "one = record(0)\n"
        "for number in range(10**9):\n"
        "    writer.append(one)\n"
        "    if number == 100: print('ready', flush=True)\n"
    )
    tests = str(Path(__file__).parents[1])
    writer = subprocess.Popen([sys.executable, "-c", source, str(tmp_path), tests], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"ready\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    back = list(read_episodes(tmp_path))
    assert len(back) >= 101
    assert all(one == record(0) for one in back)
