"""One-line faults in a working function.

Where in the flow: harvest, split -> **mutate** -> repair tasks and fine-tuning text. `faults` proposes rewrites of
nodes; here they are put into the source one at a time. Since `ast.unparse` writes a statement a line, only the line of
the changed statement is written anew. A mutation may well be harmless: only running it tells (a task's builder does).
"""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from etude.tasks.closure import blocks
from etude.tasks.faults import HELDOUT_KIND, KINDS, Place

DELETED_KIND = "deleted-statement"
"""The one kind that removes a line; every other changes exactly one."""
ALL_KINDS: tuple[str, ...] = (*KINDS, DELETED_KIND)
TRAIN_KINDS: tuple[str, ...] = tuple(name for name in ALL_KINDS if name != HELDOUT_KIND)
PLAIN_KINDS: tuple[str, ...] = (
    "comparison-boundary", "comparison-opposite", "negated-condition", "boolean-operator", "boolean-constant",
    "arithmetic-operator", "augmented-assignment", "off-by-one", "wrong-index", "wrong-slice", "range-bound",
    "initial-value", "default-value", "sibling-call", "swapped-arguments", "missing-return", "loop-exit",
)  # fmt: skip
"""Kinds that leave in the line nearly all that its repair needs: the tasks of a small model. The others lose a name, a
term or a whole statement, which only the function's purpose can bring back."""
_DELETABLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Delete, ast.Assert)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A function with one fault.

    >>> Mutation(kind="comparison-boundary", source="def f(a):\\n    return a <= 1", line=2,
    ...          old_line="    return a < 1", new_line="    return a <= 1")
    """

    kind: str
    source: str
    """The whole function with the fault."""
    line: int
    """1-based number of the changed line, in the source before the fault."""
    old_line: str
    new_line: str
    """The changed line; empty where the line was removed."""


@dataclass(frozen=True, slots=True)
class _Edit:
    kind: str
    statement: ast.stmt
    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST


def mutate(
    source: str, rng: random.Random, kinds: Collection[str] = TRAIN_KINDS, *, limit: int | None = None
) -> list[Mutation]:
    """Mutations of a function whose source was written by `ast.unparse`, of different kinds before a kind comes again.

    Each compiles, differs from the others and from `source`, and changes one line (`deleted-statement` removes one).
    `limit` bounds how many; without it all are returned. The order comes from `rng` alone. Raises SyntaxError for a
    source that is no Python and ValueError for an unknown kind.
    """
    unknown = set(kinds) - set(ALL_KINDS)
    if unknown:
        raise ValueError(f"no such kind of fault: {', '.join(sorted(unknown))}; there are {', '.join(ALL_KINDS)}")
    function = ast.parse(source).body[0]
    lines = source.split("\n")
    by_kind: dict[str, list[_Edit]] = {}
    for edit in _edits(function, frozenset(kinds), lines):
        by_kind.setdefault(edit.kind, []).append(edit)
    for edits in by_kind.values():
        rng.shuffle(edits)
    with warnings.catch_warnings():  # `x is 1` and the like are faults as good as others
        warnings.simplefilter("ignore", SyntaxWarning)
        return _pick(by_kind, source, rng, limit)


def _pick(by_kind: dict[str, list[_Edit]], source: str, rng: random.Random, limit: int | None) -> list[Mutation]:
    """One edit of each kind in turn, until there are `limit` mutations or no edits are left."""
    lines = source.split("\n")
    order = sorted(by_kind)
    rng.shuffle(order)
    found: list[Mutation] = []
    seen = {source}
    while order and (limit is None or len(found) < limit):
        for name in tuple(order):
            if not by_kind[name]:
                order.remove(name)
                continue
            mutation = _apply(by_kind[name].pop(), lines)
            if mutation is not None and mutation.source not in seen:
                seen.add(mutation.source)
                found.append(mutation)
                if limit is not None and len(found) >= limit:
                    break
    return found


def _apply(edit: _Edit, lines: list[str]) -> Mutation | None:
    """The mutation, or None when it changes nothing or does not compile."""
    line = edit.statement.lineno
    old = lines[line - 1]
    indent = old[: len(old) - len(old.lstrip())]
    if edit.kind == DELETED_KIND:
        changed = lines[: line - 1] + lines[line:]
        new = ""
    else:
        header = _header_with(edit)
        if old.lstrip().startswith("elif ") and header.startswith("if "):
            header = "el" + header
        new = indent + header
        if new == old or "\n" in header:
            return None
        changed = [*lines[: line - 1], new, *lines[line:]]
    text = "\n".join(changed)
    try:
        compile(text, "<fault>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    return Mutation(kind=edit.kind, source=text, line=line, old_line=old, new_line=new)


def _header_with(edit: _Edit) -> str:
    """First line of the edited statement; the tree is as before afterwards."""
    if edit.parent is edit.statement and edit.node is not edit.statement and edit.field == "":
        return _header(edit.node)
    if edit.index is None:
        before = getattr(edit.parent, edit.field)
        setattr(edit.parent, edit.field, edit.node)
        text = _header(edit.statement)
        setattr(edit.parent, edit.field, before)
        return text
    children = getattr(edit.parent, edit.field)
    before = children[edit.index]
    children[edit.index] = edit.node
    text = _header(edit.statement)
    children[edit.index] = before
    return text


def _header(statement: ast.AST) -> str:
    """The line that `ast.unparse` writes for a statement without its blocks."""
    if not isinstance(statement, ast.stmt) or not blocks(statement):
        return ast.unparse(statement)
    kept: dict[str, list[ast.AST]] = {}
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        if isinstance(getattr(statement, field, None), list):
            kept[field] = getattr(statement, field)
            setattr(statement, field, [])
    text = ast.unparse(statement)
    for field, nodes in kept.items():
        setattr(statement, field, nodes)
    return text


def _edits(function: ast.stmt, kinds: frozenset[str], lines: list[str]) -> Iterator[_Edit]:
    rewrites = [(name, KINDS[name]) for name in KINDS if name in kinds]
    bound = _bound_names(function)
    for statement, body, in_loop in _statements([function], False):
        line = lines[statement.lineno - 1].lstrip()
        header = _header(statement)
        if header not in (line, line[2:]) or isinstance(statement, ast.Match | ast.Try):
            continue
        names = tuple(sorted(name for name, first in bound.items() if first < statement.lineno or first == 0))
        last = isinstance(function, _SCOPES) and body is function.body and statement is body[-1]
        for node, parent, field, index in _nodes(statement):
            place = Place(statement=statement, parent=parent, field=field, variables=names, in_loop=in_loop, last=last)
            for name, rewrite in rewrites:
                for replacement in rewrite(node, place):
                    yield _Edit(name, statement, parent, field, index, replacement)
        if DELETED_KIND in kinds and isinstance(statement, _DELETABLE) and len(body) > 1:
            yield _Edit(DELETED_KIND, statement, statement, "", None, statement)


def _statements(body: list[ast.stmt], in_loop: bool) -> Iterator[tuple[ast.stmt, list[ast.stmt], bool]]:
    """(statement, the block it stands in, whether a loop encloses it) at every depth."""
    for node in body:
        yield node, body, in_loop
        inside = isinstance(node, ast.For | ast.While) or (in_loop and not isinstance(node, _SCOPES))
        for block in blocks(node):
            yield from _statements(block, inside)


def _nodes(statement: ast.stmt) -> Iterator[tuple[ast.AST, ast.AST, str, int | None]]:
    """(node, parent, field, index in the field) of a statement and of its expressions, without its blocks."""
    yield statement, statement, "", None
    stack: list[ast.AST] = [statement]
    while stack:
        parent = stack.pop()
        for field, value in ast.iter_fields(parent):
            if isinstance(value, ast.expr | ast.arguments):
                yield value, parent, field, None
                stack.append(value)
            elif isinstance(value, list):
                for index, child in enumerate(value):
                    if isinstance(child, ast.expr | ast.keyword | ast.comprehension):
                        yield child, parent, field, index
                        stack.append(child)


def _bound_names(function: ast.stmt) -> dict[str, int]:
    """Parameters (0) and plain local names (line of the first binding) of the outer function."""
    found: dict[str, int] = {}
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        found.update((argument.arg, 0) for argument in every if argument is not None)
    for statement, _, _ in _statements([function], False):
        if isinstance(statement, ast.Assign | ast.For | ast.AugAssign | ast.With):
            for node, *_ in _nodes(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.setdefault(node.id, statement.lineno)
    return found
