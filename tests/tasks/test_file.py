"""Task files: what is written is read, and what is not one is refused by name."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import zstandard

from etude.errors import TaskError
from etude.tasks.file import Address, load_licences, load_references, load_tasks, read_header, write_tasks
from tasks.repair_tasks import FAULTY, RIGHT, entry


def written(folder: Path) -> Path:
    path = folder / "some.tasks.zst"
    splits = {"train": [entry(), entry(prompt="Repair it.")], "heldout": [entry(package="other")]}
    write_tasks(path, splits, {"numbers": "MIT ...", "other": "BSD ..."})
    return path


def refusal(path: Path) -> str:
    with pytest.raises(TaskError) as caught:
        load_tasks(f"{path}/train")
    return str(caught.value)


def rewritten(path: Path, old: bytes, new: bytes) -> Path:
    """The file with bytes of its content exchanged, compressed anew: only our own digests can tell."""
    content = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    assert old in content
    path.write_bytes(zstandard.ZstdCompressor().compress(content.replace(old, new, 1)))
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    tasks = load_tasks(f"{path}/train")
    assert [task.prompt for task in tasks] == ["Repair clamp.", "Repair it."]
    assert tasks[0] == entry().task
    assert load_references(f"{path}/train") == dict.fromkeys((task.task_id for task in tasks), RIGHT)
    assert load_licences(path)["other"] == "BSD ..."
    assert [(section.name, section.count) for section in read_header(path).sections] == [
        ("train", 2), ("heldout", 1), ("licences", 2)
    ]  # fmt: skip


def test_tasks_do_not_carry_their_reference(tmp_path: Path) -> None:
    (task,) = load_tasks(f"{written(tmp_path)}/heldout")
    assert RIGHT not in msgspec.json.encode(task).decode()
    assert task.workspace == {"solution.py": FAULTY}


def test_the_same_tasks_make_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    assert written(tmp_path).read_bytes() == written(tmp_path / "again").read_bytes()


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    for length in (len(data) - 1, len(data) // 2, 20):
        path.write_bytes(data[:length])
        assert "is cut or damaged" in refusal(path)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert "damaged" in refusal(path)


def test_a_changed_task_does_not_have_its_digest(tmp_path: Path) -> None:
    assert "does not have its digest" in refusal(rewritten(written(tmp_path), b"Repair clamp.", b"Destroy clam."))


def test_another_format_is_refused_by_name(tmp_path: Path) -> None:
    message = refusal(rewritten(written(tmp_path), b'"format":1', b'"format":9'))
    assert "has format 9" in message
    assert "this Etude reads format 1" in message


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "not zstandard"), (b"task", "not zstandard"), (b"\x28\xb5\x2f\xfd", "cut or damaged"),
        (zstandard.ZstdCompressor().compress(b"{}\n"), "no header"),
        (zstandard.ZstdCompressor().compress(b"[" * 100_000), "no header"),
        (zstandard.ZstdCompressor().compress(b'{"kind": "x", "format": 1}\n'), "says that it is 'x'"),
        (zstandard.ZstdCompressor().compress(b'{"kind": "etude tasks", "format": 1}\n'), "malformed header"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)  # fmt: skip
def test_what_is_no_task_file_is_refused(tmp_path: Path, data: bytes, cause: str) -> None:
    path = tmp_path / "x.zst"
    path.write_bytes(data)
    assert cause in refusal(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.zst" in refusal(tmp_path / "nowhere.zst")


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(TaskError, match="no split 'final'") as caught:
        load_tasks(f"{path}/final")
    assert caught.value.hint == "it has: train, heldout"
    with pytest.raises(TaskError):
        load_tasks(f"{path}/licences")


@pytest.mark.parametrize("text", ["etude:poems/train", "etude:repair", "train", "", "x.zst"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(TaskError):
        Address.parse(text)


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert len(load_tasks(f"{path}/train")) == 2
    write_tasks(path, {"train": [entry()]}, {})
    assert len(load_tasks(f"{path}/train")) == 1


def test_an_unknown_split_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="validation"):
        write_tasks(tmp_path / "x.zst", {"validation": []}, {})
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_tasks_are_read_within_a_second_and_keep_to_their_sides() -> None:
    started = time.process_time()
    train = load_tasks("etude:repair/train")
    assert time.process_time() - started < 1.0
    assert len(train) >= 5_000
    splits = {name: load_tasks(f"etude:repair/{name}") for name in ("train", "heldout", "final", "base")}
    assert (len(splits["heldout"]), len(splits["final"])) == (400, 300)
    names = {name: {task.prompt for task in tasks} for name, tasks in splits.items()}
    packages = {name: {task.source["package"] for task in tasks} for name, tasks in splits.items()}
    ids = [task.task_id for tasks in splits.values() for task in tasks]
    assert len(ids) == len(set(ids))
    for one, other in (("train", "heldout"), ("train", "final"), ("base", "heldout"), ("base", "final")):
        assert not names[one] & names[other]
        assert not packages[one] & packages[other]
    assert not names["train"] & names["base"]
    assert not names["heldout"] & names["final"]


def test_one_kind_of_fault_is_only_in_the_tests() -> None:
    from etude.tasks.mutate import HELDOUT_KIND

    found = {
        name: sum(task.source["fault"] == HELDOUT_KIND for task in load_tasks(f"etude:repair/{name}"))
        for name in ("train", "base", "heldout", "final")
    }
    assert found["train"] == found["base"] == 0
    assert found["heldout"] > 0
    assert found["final"] > 0


def test_the_shipped_file_is_small_and_carries_every_licence() -> None:
    from etude.tasks.file import SHIPPED

    assert SHIPPED["repair"].stat().st_size < 10_000_000
    licences = load_licences(SHIPPED["repair"])
    for name in ("train", "heldout", "final", "base"):
        for task in load_tasks(f"etude:repair/{name}"):
            assert len(licences[task.source["package"]]) > 200
