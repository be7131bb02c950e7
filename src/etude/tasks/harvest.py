"""Functions from packages' sources: read with `ast`, never imported, written the same way for every author.

Where in the flow: packages -> **harvest** -> split -> mutate -> tasks and pretraining text. Everything short is kept;
`callable` marks the functions that can be run alone on plain values, with the imports, constants and helpers that they
need (`prelude`, put together by `closure`). Nothing is run here: whether a function that looks pure behaves is found
out later, in a sandbox.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import symtable
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import msgspec
import zstandard

from etude.errors import TaskError
from etude.tasks.closure import Module, free_names, is_harmless, is_plain, statements, strip, unparse
from etude.tasks.packages import Package, sources

MIN_LINES, MAX_LINES = 3, 20
"""Of a function after stripping, its `def` line included."""
MAX_LINE_CHARS = 100
MIN_SINGLE_CHARS = 24
"""Of the body of a callable function with one line of body, which is then kept too."""
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef
_NAMED = (ast.Name, ast.arg, ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.Nonlocal, *_FUNCTION)
"""Nodes whose strings are names of variables; those of attributes and keywords are not."""
_IGNORED_FIELDS = frozenset({"ctx", "kind", "type_comment", "returns", "annotation", "decorator_list", "type_params"})
_SKIPPED_DECORATORS = frozenset({"overload", "abstractmethod", "contextmanager", "asynccontextmanager", "fixture"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One function of a package, stripped and written by `ast.unparse`.

    >>> Function(package="toolz", version="1.0.0", licence="BSD-3-Clause", module="toolz.itertoolz",
    ...          qualname="second", name="second", source="def second(seq): ...", prelude="import itertools", lines=4,
    ...          callable=True, body_key="9f86d081884c7d65")
    """

    package: str
    version: str
    licence: str
    module: str
    qualname: str
    name: str
    source: str
    """Without docstring, comments, annotations and decorators; no trailing newline."""
    prelude: str
    """Imports, then constants and helper functions; empty for a function that needs none or cannot be called."""
    lines: int
    callable: bool
    """Runs alone on plain values, as far as its syntax tells. A method that never used its instance has lost `self`."""
    body_key: str
    """Hash of the function with local names replaced by numbers: equal for copies under other names."""


def harvest(packages: Iterable[Package], cache: Path, *, workers: int = 1) -> Iterator[Function]:
    """Short functions of all `packages`, in their order, each body once (the first package with it keeps it).

    `workers` processes read packages side by side; the result does not depend on how many. Raises TaskError when a
    package is not in `cache` (see `packages.fetch`).
    """
    seen: set[str] = set()
    for found in _read_all(packages, cache, workers):
        for function in found:
            if function.body_key not in seen:
                seen.add(function.body_key)
                yield function


def _read_all(packages: Iterable[Package], cache: Path, workers: int) -> Iterator[list[Function]]:
    if workers == 1:
        yield from (read_package(package, cache) for package in packages)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(read_package, package, cache) for package in packages]
        yield from (job.result() for job in jobs)


def read_package(package: Package, cache: Path) -> list[Function]:
    """Short functions of one package, copies included."""
    return [
        function
        for module, text in sources(package, cache)
        for function in read_module(text, module=module, package=package)
    ]


def read_module(text: str, *, module: str, package: Package) -> Iterator[Function]:
    """Short functions and methods of one module's source; nothing for a source that does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    found = [(name, node, _is_free(name, node)) for name, node in _functions(tree.body, "") if not _is_stub(node)]
    strip(tree.body)
    scope = Module(tree)
    for qualname, node, free in found:
        if sum(1 for _ in islice(statements(node.body), MAX_LINES)) == MAX_LINES:
            continue
        node, source, prelude = _form(node, free, scope)
        local = _local_names(source) if _fits(source, prelude is not None) else None
        if local is None:
            continue
        yield Function(
            package=package.name, version=package.version, licence=package.licence, module=module, qualname=qualname,
            name=node.name, source=source, prelude=prelude or "", lines=source.count("\n") + 1,
            callable=prelude is not None, body_key=_key(node, local),
        )  # fmt: skip


def _fits(source: str, callable: bool) -> bool:
    """True for a source of the right size. A callable function may have one line of body, when that says something."""
    lines = source.split("\n")
    least = MIN_LINES - 1 if callable and len(lines[-1].strip()) >= MIN_SINGLE_CHARS else MIN_LINES
    return least <= len(lines) <= MAX_LINES and max(map(len, lines)) <= MAX_LINE_CHARS and source.isascii()


def _form(node: _Definition, free: bool, scope: Module) -> tuple[_Definition, str, str | None]:
    """(node, source, prelude): a method without use for its instance as a function, where that can be called."""
    source = unparse(node)
    bare = node if free else _without_self(node, source)
    if bare is not None and _fits(source, True):
        alone = source if free else unparse(bare)
        prelude = _prelude(bare, alone, scope)
        if prelude is not None:
            return bare, alone, prelude
    return node, source, None


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, _Definition]]:
    """(qualified name, node) of functions and methods, also of those in branches of modules and classes."""
    for node in body:
        if isinstance(node, _FUNCTION):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions([*node.body, *node.orelse], prefix)


def _is_free(qualname: str, node: _Definition) -> bool:
    """True when neither an instance nor a class is its first argument."""
    return qualname == node.name or any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)


def _is_stub(node: _Definition) -> bool:
    """True for overloads, abstract methods and context managers, whose text alone means little."""
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        if name in _SKIPPED_DECORATORS:
            return True
    return False


def _without_self(method: _Definition, source: str) -> _Definition | None:
    """A method that never looks at its instance, as a function; None for any other."""
    first, *rest = method.args.args or [ast.arg("")]
    special = method.args.posonlyargs or len(method.args.defaults) > len(rest) or method.name.startswith("__")
    if special or not rest or len(re.findall(rf"\b(?:{first.arg}|super|__class__)\b", source)) > 1:
        return None
    function = copy(method)
    function.args = copy(method.args)
    function.args.args = rest
    return function


def _prelude(stripped: _Definition, source: str, scope: Module) -> str | None:
    """What the function needs to run alone, or None when it cannot be called on plain values."""
    arguments = stripped.args
    takes_something = arguments.posonlyargs or arguments.args or arguments.vararg
    if isinstance(stripped, ast.AsyncFunctionDef) or not takes_something or not is_harmless(stripped):
        return None
    if any(argument.arg in ("self", "cls") for argument in arguments.posonlyargs + arguments.args):
        return None
    free = free_names(source)
    if free is None or not is_plain(stripped, free & scope.imports.keys()):
        return None
    return scope.prelude(stripped.name, free)


def body_key(source: str) -> str:
    """16 hex digits: SHA-256 of the function's tree, its own name and local names numbered by first use.

    Constants, attributes and global names count; so `a + 1` and `b + 1` are one body and `a + 2` another.
    """
    return _key(ast.parse(source).body[0], _local_names(source) or set())


def _key(node: ast.AST, local: set[str]) -> str:
    numbers: dict[str, str] = {}
    parts: list[str] = []

    def visit(value: object) -> None:
        if isinstance(value, ast.AST):
            parts.append(type(value).__name__)
            named = isinstance(value, _NAMED)
            for field in value._fields:
                if field in _IGNORED_FIELDS:
                    continue
                child = getattr(value, field, None)
                if named and isinstance(child, str) and child in local:
                    child = numbers.setdefault(child, str(len(numbers)))
                visit(child)
        elif isinstance(value, list):
            parts.append(f"[{len(value)}")
            for item in value:
                visit(item)
        else:
            parts.append(repr(value))

    visit(node)
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _local_names(source: str) -> set[str] | None:
    """Names bound by the function at any depth, and its own name; None when it does not compile alone."""
    try:
        scopes = [symtable.symtable(source, "<function>", "exec")]
    except (SyntaxError, ValueError):
        return None
    found: set[str] = set()
    while scopes:
        scope = scopes.pop()
        found.update(symbol.get_name() for symbol in scope.get_symbols() if symbol.is_local())
        scopes.extend(scope.get_children())
    return found


def write(functions: Iterable[Function], path: Path, splits: Mapping[str, str] | None = None) -> int:
    """Writes one JSON object a function, zstandard-compressed, whole or not at all; returns how many.

    `splits` maps `body_key` to a split, which becomes the field `split`; functions without one are left out.
    """
    encoder, count = msgspec.json.Encoder(), 0
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("wb") as raw:
        with zstandard.ZstdCompressor(level=9).stream_writer(raw, closefd=False) as stream:
            for function in functions:
                row = msgspec.to_builtins(function)
                if splits is not None:
                    if function.body_key not in splits:
                        continue
                    row["split"] = splits[function.body_key]
                stream.write(encoder.encode(row) + b"\n")
                count += 1
        raw.flush()
        os.fsync(raw.fileno())
    partial.replace(path)
    return count


def read(path: Path) -> Iterator[tuple[Function, str]]:
    """(function, split) of each line that `write` left; the split is empty when none was given.

    Raises TaskError for a file that is missing, cut off or malformed.
    """
    try:
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        data = unpacker.decompress(path.read_bytes())
        if not unpacker.eof:
            raise EOFError("the file ends too early")
        for line in data.splitlines():
            row = msgspec.json.decode(line)
            split = row.pop("split", "")
            yield msgspec.convert(row, Function), split
    except (OSError, EOFError, zstandard.ZstdError, msgspec.MsgspecError, AttributeError) as error:
        raise TaskError(
            f"functions cannot be read from {path}", cause=str(error), hint="build them again: etude tasks functions"
        ) from error
