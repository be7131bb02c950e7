import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from etude import config
from etude.errors import RecipeError


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    kind: str = "torch"
    replicas: int = 1
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise RecipeError("engine.replicas must be at least 1", hint="use 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    path: str
    seed: int = 0
    tools: tuple[str, ...] = ("read_file",)
    engine: Engine = field(default_factory=Engine)
    judge: Engine | None = None
    more: tuple[Engine, ...] = ()
    named: dict[str, Engine] = field(default_factory=dict)


def build(tree: dict[str, Any]) -> Stage:
    whole = {"format": 1, "stage": "rl", "path": "m", **tree}
    return config.build(whole, {"rl": Stage, "sft": Engine}, source="my.toml")


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


# Reading and extending


def test_a_child_wins_key_by_key_and_keeps_what_it_does_not_name(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="seed = 1\ntools = ['a', 'b']\n[engine]\nkind = 'torch'\nreplicas = 1\n",
        middle="extends = 'base.toml'\n[engine]\nreplicas = 2\n",
        leaf="extends = 'middle'\ntools = ['c']\n[engine]\nshare = 0.1\n",
    )
    assert config.read_tree(tmp_path / "leaf.toml") == {
        "seed": 1,
        "tools": ["c"],
        "engine": {"kind": "torch", "replicas": 2, "share": 0.1},
    }


def test_a_recipe_that_extends_itself_is_refused_with_the_chain(tmp_path: Path) -> None:
    write(tmp_path, a="extends = 'b.toml'", b="extends = 'c'", c="extends = 'a.toml'", self="extends = 'self.toml'")
    with pytest.raises(RecipeError, match="extends itself") as caught:
        config.read_tree(tmp_path / "a.toml")
    assert caught.value.cause == "a.toml -> b.toml -> c.toml -> a.toml"
    with pytest.raises(RecipeError, match="extends itself"):
        config.read_tree(tmp_path / "self.toml")


@pytest.mark.parametrize(
    "text",
    [
        "extends = 3",
        "extends = 'nothing'",
        "extends = ''",
        "extends = '.'",
        "a = ",
        "a = 1\na = 2",
        "[a\n",
        "a = " + "[" * 5000,
    ],
)
def test_what_cannot_be_read_is_refused_by_the_file_that_it_names(tmp_path: Path, text: str) -> None:
    write(tmp_path, bad=text)
    with pytest.raises(RecipeError):
        config.read_tree(tmp_path / "bad.toml")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(RecipeError, match="is not TOML"):
        config.read_tree(tmp_path / "bad.toml")


@pytest.mark.parametrize("name", ["nothing.toml", "", ".", "/", "..", "x" * 5000, "a\0b", "folder"])
def test_a_recipe_that_is_not_there_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecipeError, match="no recipe"):
        config.read_tree(Path(name))


def test_the_suffix_may_be_left_out_and_dots_in_a_name_stay(tmp_path: Path) -> None:
    write(tmp_path, **{"v1.2": "seed = 2", "v1": "seed = 1"})
    assert config.read_tree(tmp_path / "v1.2") == {"seed": 2}


# Overrides


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("rl.group_size=8", {"rl": {"group_size": 8}}),
        ("a = 5 ", {"a": 5}),
        ("a.b.c=true", {"a": {"b": {"c": True}}}),
        ("a=[1, 2]", {"a": [1, 2]}),
        ("a={x = 1}", {"a": {"x": 1}}),
        ("a=file://{run}/w", {"a": "file://{run}/w"}),
        ("a=b=c", {"a": "b=c"}),
        ("a=", {"a": ""}),
        ('a="5"', {"a": "5"}),
        ("a=[1", {"a": "[1"}),
        ("a=1\nb = 2", {"a": "1\nb = 2"}),
    ],
)
def test_an_override_is_a_toml_value_or_else_text(word: str, expected: dict[str, Any]) -> None:
    assert config.override({}, [word]) == expected


def test_overrides_merge_into_tables_and_later_ones_win() -> None:
    tree = {"engine": {"kind": "torch", "replicas": 1}}
    assert config.override(tree, ["engine.replicas=2", "engine.replicas=3"]) == {
        "engine": {"kind": "torch", "replicas": 3}
    }
    assert tree == {"engine": {"kind": "torch", "replicas": 1}}


@pytest.mark.parametrize("word", ["engine.replicas", "=3", "", "a..b=1", ".a=1", "a.=1"])
def test_a_word_that_is_no_override_is_refused_with_an_example(word: str) -> None:
    with pytest.raises(RecipeError, match="not an override") as caught:
        config.override({}, [word])
    assert "rl.group_size=8" in str(caught.value)


def test_nesting_without_end_in_an_override_is_text() -> None:
    assert config.override({}, ["a=" + "[" * 5000]) == {"a": "[" * 5000}


# Building


def test_defaults_fill_what_a_recipe_leaves_out() -> None:
    assert build({"seed": 3, "engine": {"share": 1}}) == Stage(path="m", seed=3, engine=Engine(share=1.0))


@pytest.mark.parametrize(
    ("tree", "key", "hint"),
    [
        ({"sede": 1}, "sede", "did you mean seed?"),
        ({"engine": {"replica": 1}}, "engine.replica", "did you mean replicas?"),
        ({"engine": {"zzz": 1}}, "engine.zzz", "known keys: kind, replicas, share"),
        ({"judge": {"knid": "x"}}, "judge.knid", "did you mean kind?"),
        ({"more": [{}, {"knid": "x"}]}, "more[1].knid", "did you mean kind?"),
        ({"named": {"a": {"knid": "x"}}}, "named.a.knid", "did you mean kind?"),
    ],
)
def test_an_unknown_key_is_refused_wherever_it_is_with_the_nearest_name(
    tree: dict[str, Any], key: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        build(tree)
    assert caught.value.message == f"my.toml: unknown key {key}"
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"seed": "1"}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"tools": "read_file"}, "tools"),
        ({"tools": [1]}, "tools"),
        ({"engine": 3}, "engine"),
        ({"engine": {"replicas": "two"}}, "engine.replicas"),
        ({"engine": [1]}, "engine"),
        ({"path": None}, "path"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_its_key(tree: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError, match="wrong value") as caught:
        build(tree)
    assert caught.value.message.startswith(f"my.toml: {key}")


def test_a_missing_key_and_a_forbidden_value_say_so() -> None:
    with pytest.raises(RecipeError, match="wrong value") as caught:
        config.build({"format": 1, "stage": "rl"}, {"rl": Stage}, source="my.toml")
    assert "path" in str(caught.value.cause)
    with pytest.raises(RecipeError, match=r"engine.replicas must be at least 1") as caught:
        build({"engine": {"replicas": 0}})
    assert caught.value.hint == "use 1"


@pytest.mark.parametrize("number", [None, 0, 2, "1", True, [1]])
def test_a_recipe_of_another_format_is_refused(number: object) -> None:
    with pytest.raises(RecipeError, match="format"):
        build({"format": number})


@pytest.mark.parametrize(
    ("stage", "hint"), [("rll", "did you mean rl?"), (None, "stages: rl, sft"), (["rl"], "stages: rl, sft")]
)
def test_an_unknown_stage_is_refused_with_those_there_are(stage: object, hint: str) -> None:
    with pytest.raises(RecipeError, match="stage = ") as caught:
        build({"stage": stage})
    assert caught.value.hint == hint


def test_the_resolved_recipe_makes_the_same_settings_again(tmp_path: Path) -> None:
    made = build({"seed": 7, "judge": {"kind": "x"}, "more": [{"replicas": 2}], "named": {"a.b": {}}})
    path = tmp_path / "recipe.toml"
    path.write_text(config.resolved_text("rl", made))
    assert config.build(config.read_tree(path), {"rl": Stage}, source="again") == made
    assert tomllib.loads(path.read_text())["engine"] == {"kind": "torch", "replicas": 1, "share": 0.5}
