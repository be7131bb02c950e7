"""The corpus is the same for the same functions, and holds nothing of the protected splits."""

import json
from pathlib import Path

import pytest

from etude import frames
from etude.data.corpus import Corpus
from etude.data.recipe import CorpusSettings
from etude.data.tokenizer import Tokenizer
from etude.errors import TaskError
from etude.tasks.harvest import Function, write
from etude.tasks.pretraining import CORPUS, MANIFEST, PROBES, build

SETTINGS = CorpusSettings(passes_callable=2, passes_free=1, passes_method=1, num_probes=5, vocab_size=620)
SYLLABLES = ("ba", "do", "fe", "gi", "ku", "la", "mo", "ne", "pi", "ru")


def function(name: str, number: int, *, argument: str = "values") -> Function:
    source = (
        f"def {name}({argument}, limit):\n    found = 0\n    for {name}_value in {argument}:\n"
        f"        if {name}_value < limit:\n            found += {number}\n    return found"
    )
    return Function(
        package="numbers", version="1.0", licence="MIT", module="numbers", qualname=name, name=name, source=source,
        prelude="", lines=6, callable=number % 2 == 0, body_key=f"{name}{number}",
    )  # fmt: skip


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    names = [a + b for a in SYLLABLES for b in SYLLABLES]
    rows = [function(name, number) for number, name in enumerate(names)]
    rows.append(function("secretive", 200))
    splits = {row.body_key: "base" for row in rows} | {"secretive200": "heldout"}
    write(rows, tmp_path / "functions.jsonl.zst", splits)
    return tmp_path / "functions.jsonl.zst"


def test_the_same_functions_make_the_same_files_whatever_the_workers(functions: Path, tmp_path: Path) -> None:
    for folder, workers in (("a", 1), ("b", 2)):
        build(functions, tmp_path / folder, SETTINGS, workers=workers)
    for name in (CORPUS, PROBES, MANIFEST, "tokenizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_only_base_functions_are_read_and_probes_are_kept_apart(functions: Path, tmp_path: Path) -> None:
    build(functions, tmp_path / "out", SETTINGS, workers=1)
    tokenizer = Tokenizer.load(tmp_path / "out")

    def names(file: str) -> set[str]:
        made = frames.read_file(tmp_path / "out" / file, Corpus)
        texts = [tokenizer.decode(made.ids[made.starts[n] : made.starts[n + 1]]) for n in range(len(made))]
        return {text.split("Repair ")[1].split(".\n")[0] for text in texts}

    trained, probes = names(CORPUS), names(PROBES)
    assert len(probes) == 5
    assert not trained & probes
    assert "secretive" not in trained | probes
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["functions"] == 100
    assert manifest["packages"] == [
        {"name": "numbers", "version": "1.0", "licence": "MIT", "functions": 100, "sha256": ""}
    ]


def test_a_file_without_base_functions_is_refused(tmp_path: Path) -> None:
    row = function("only", 1)
    write([row], tmp_path / "functions.jsonl.zst", {row.body_key: "rl"})
    with pytest.raises(TaskError, match="no functions of split base"):
        build(tmp_path / "functions.jsonl.zst", tmp_path / "out", SETTINGS)
