"""Recipes: strict TOML -> frozen dataclasses. Knows no stage: the caller says which dataclass a stage is.

    recipes/x.toml  --extends-->  parent.toml     tables merge key by key, the child wins
          |  key.path=value overrides             values are TOML; what is not is a string
          v
    tree of plain values  --unknown keys, types-->  RecipeError naming the key, with the nearest name
          v
    frozen dataclass of the stage; `resolved_text` is saved with the run

What it does not do: read the environment, fill in anything that the dataclass does not declare.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from etude.errors import RecipeError
from etude.types import FORMAT

T = TypeVar("T")
Tree = dict[str, Any]
_HERE = Path(__file__).parent
RECIPES = next((p for p in (_HERE / "recipes", _HERE.parents[1] / "recipes") if p.is_dir()), _HERE / "recipes")
"""The shipped recipes: inside a wheel, or `recipes/` of a checkout."""


def read_tree(path: Path, _seen: tuple[Path, ...] = ()) -> Tree:
    """The recipe's tree with everything it extends merged in. Errors: RecipeError."""
    path = find(path)
    if path in _seen:
        chain = " -> ".join(p.name for p in (*_seen, path))
        raise RecipeError(f"recipe {path} extends itself", cause=chain, hint="remove one `extends`")
    try:
        tree: Tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"cannot read recipe {path}", cause=str(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecipeError(f"{path} is not TOML", cause=str(error)) from error
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise RecipeError(f"{path}: extends = {parent!r} is not the name of a recipe")
    beside = path.parent / parent
    is_beside = os.path.isfile(beside) or os.path.isfile(f"{beside}.toml")
    return merge(read_tree(beside if is_beside else Path(parent), (*_seen, path)), tree)


def find(path: Path) -> Path:
    """`path` itself, else a recipe of that name that ships with Etude."""
    for candidate in (path, Path(f"{path}.toml"), RECIPES / path.name, RECIPES / f"{path.name}.toml"):
        if os.path.isfile(candidate):  # Path.is_file raises for a name that is too long
            return candidate.resolve()
    shipped = sorted(p.name for p in RECIPES.glob("*.toml"))
    raise RecipeError(f"no recipe {path}", hint=nearest(path.name, shipped) or f"shipped recipes: {', '.join(shipped)}")


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Table by table; anything that is not a table replaces."""
    tree = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), Mapping):
            tree[key] = merge(tree[key], value)
        else:
            tree[key] = value
    return tree


def override(tree: Tree, assignments: Sequence[str]) -> Tree:
    """Apply `key.path=value` words of a command line."""
    for word in assignments:
        path, equals, text = word.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise RecipeError(f"{word!r} is not an override", hint="write key.path=value, e.g. rl.group_size=8")
        value = _toml_value(text)
        for key in reversed(keys):
            value = {key: value}
        tree = merge(tree, value)
    return tree


def _toml_value(text: str) -> Any:
    """The TOML value that `text` is, else `text` itself."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text.strip()
    return table["value"] if len(table) == 1 else text.strip()


def build(tree: Tree, stages: Mapping[str, type[Any]], *, source: str) -> Any:
    """The dataclass of the tree's stage. Errors: RecipeError naming key, cause and nearest name."""
    tree = dict(tree)
    if (number := tree.pop("format", None)) != FORMAT or isinstance(number, bool):
        raise RecipeError(f"{source}: format = {number!r} is not supported", hint=f"this Etude reads format = {FORMAT}")
    stage = tree.pop("stage", None)
    if not isinstance(stage, str) or stage not in stages:
        hint = nearest(str(stage), stages) or f"stages: {', '.join(sorted(stages))}"
        raise RecipeError(f"{source}: stage = {stage!r} is unknown", hint=hint)
    return convert(tree, stages[stage], where=source)


def convert(tree: Mapping[str, Any], kind: type[T], *, where: str) -> T:
    """Check keys and types, then make the dataclass."""
    _check_keys(tree, kind, where=where, path="")
    try:
        return msgspec.convert(tree, type=kind, strict=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, RecipeError):
            raise error.__cause__ from error
        text, _, at = str(error).partition(" - at `$")
        key = at.rstrip("`").lstrip(".")
        raise RecipeError(f"{where}: {key or 'the recipe'} has a wrong value", cause=text) from error


def _check_keys(tree: Mapping[str, Any], kind: type[Any], *, where: str, path: str) -> None:
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    for key, value in tree.items():
        if key not in known:
            hint = nearest(key, known) or f"known keys: {', '.join(known)}"
            raise RecipeError(f"{where}: unknown key {path}{key}", hint=hint)
        _check_value(value, hints[key], where=where, path=f"{path}{key}")


def _check_value(value: Any, hint: Any, *, where: str, path: str) -> None:
    """Keys of the dataclasses inside unions, lists and tables too: msgspec ignores unknown keys of a dataclass."""
    if dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            _check_keys(value, typing.cast(type[Any], hint), where=where, path=f"{path}.")
        return
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for inner in typing.get_args(hint):
        if is_union:
            _check_value(value, inner, where=where, path=path)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                _check_value(item, inner, where=where, path=f"{path}.{key}")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                _check_value(item, inner, where=where, path=f"{path}[{number}]")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """`did you mean X?`, or None if nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else None


def resolved_text(stage: str, recipe: Any) -> str:
    """The whole recipe as TOML, defaults included: a run can be repeated from this text alone."""
    tree = {"format": FORMAT, "stage": stage, **msgspec.to_builtins(recipe)}
    return tomli_w.dumps(_without_none(tree))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value
