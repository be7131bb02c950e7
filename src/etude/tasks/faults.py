"""The kinds of faults that a programmer makes, each as a rewrite of one node of the tree.

Where in the flow: `mutate` walks a function and asks every kind for replacements of every node. A kind only proposes;
whether the result compiles, differs and is noticed by a test is decided elsewhere. Kinds follow the operator families
of mutation testing (Offutt et al. 1996, "An Experimental Determination of Sufficient Mutant Operators") and the slips
common in Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node stands."""

    statement: ast.stmt
    parent: ast.AST
    field: str
    """Field of `parent` that holds the node."""
    variables: tuple[str, ...]
    """Parameters and local names bound before the statement's line, sorted."""
    in_loop: bool
    last: bool
    """The statement is the last of the function's own body."""


Kind = Callable[[ast.AST, Place], Iterator[ast.AST]]
KINDS: dict[str, Kind] = {}
"""Name -> rewrite; filled by `kind`."""
HELDOUT_KIND = "swapped-operands"
"""Never used in training: shows whether repair carries over to a fault not seen before."""

_BOUNDARY: dict[type, type] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITE: dict[type, type] = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Add, ast.FloorDiv), ast.Div: (ast.Mult, ast.FloorDiv),
    ast.FloorDiv: (ast.Mult, ast.Mod), ast.Mod: (ast.FloorDiv,), ast.Pow: (ast.Mult,), ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,), ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd, ast.BitXor), ast.BitXor: (ast.BitOr,),
}  # fmt: skip
_NON_COMMUTATIVE = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift)
_SIBLING_FUNCTIONS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "int": "float", "float": "int", "list": "tuple",
    "tuple": "list", "sorted": "list", "reversed": "list", "floor": "ceil", "ceil": "floor", "ord": "chr", "chr": "ord",
    "sum": "len", "len": "sum", "sin": "cos", "cos": "sin", "bisect_left": "bisect_right",
    "bisect_right": "bisect_left", "takewhile": "dropwhile", "dropwhile": "takewhile", "str": "repr", "repr": "str",
    "isinstance": "issubclass", "set": "list", "map": "filter", "filter": "map", "divmod": "pow",
}  # fmt: skip
_SIBLING_METHODS = {
    "append": "extend", "extend": "append", "lstrip": "rstrip", "rstrip": "lstrip", "strip": "lstrip",
    "startswith": "endswith", "endswith": "startswith", "upper": "lower", "lower": "upper", "find": "rfind",
    "rfind": "find", "index": "count", "split": "rsplit", "rsplit": "split", "partition": "rpartition",
    "rpartition": "partition", "keys": "values", "values": "keys", "items": "values", "union": "intersection",
    "intersection": "union", "add": "discard", "match": "search", "search": "match", "isdigit": "isalpha",
    "isalpha": "isdigit", "popleft": "pop", "appendleft": "append", "ljust": "rjust", "rjust": "ljust",
    "title": "capitalize", "capitalize": "title", "isupper": "islower", "islower": "isupper", "pop": "index",
    "floor": "ceil", "ceil": "floor", "setdefault": "get", "removeprefix": "removesuffix",
    "removesuffix": "removeprefix", "group": "groups",
}  # fmt: skip
_CONVERSIONS = frozenset(
    {
        "abs", "sorted", "int", "float", "list", "tuple", "set", "reversed", "round", "str", "bool", "len", "sum",
        "dict", "iter", "next", "enumerate", "repr",
    }
)  # fmt: skip
_CLEANUPS = frozenset(
    {
        "strip", "lstrip", "rstrip", "lower", "upper", "copy", "title", "capitalize", "casefold", "splitlines",
    }
)  # fmt: skip


def kind(name: str) -> Callable[[Kind], Kind]:
    """Registers a rewrite under `name`."""

    def register(rewrite: Kind) -> Kind:
        KINDS[name] = rewrite
        return rewrite

    return register


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A shallow copy of `node` with other fields; children are shared, so nothing may be changed in place."""
    changed = copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _same(first: ast.AST, second: ast.AST) -> bool:
    return ast.unparse(first) == ast.unparse(second)


def _int(node: object) -> int | None:
    """Value of an integer literal, with its sign; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _int(node.operand)
        return None if inner is None else -inner
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _literal(value: int) -> ast.expr:
    return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))


@kind("comparison-boundary")
def comparison_boundary(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            if type(operator) in _BOUNDARY:
                yield _with(node, ops=[*node.ops[:index], _BOUNDARY[type(operator)](), *node.ops[index + 1 :]])


@kind("comparison-opposite")
def comparison_opposite(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            yield _with(node, ops=[*node.ops[:index], _OPPOSITE[type(operator)](), *node.ops[index + 1 :]])


@kind("arithmetic-operator")
def arithmetic_operator(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and not (isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)):
        for operator in _ARITHMETIC.get(type(node.op), ()):
            yield _with(node, op=operator())


@kind("augmented-assignment")
def augmented_assignment(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.AugAssign):
        for operator in _ARITHMETIC.get(type(node.op), ()):
            yield _with(node, op=operator())
        yield ast.Assign(targets=[node.target], value=node.value, lineno=node.lineno)


@kind("off-by-one")
def off_by_one(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    inside_index = isinstance(place.parent, ast.Subscript | ast.Slice | ast.UnaryOp)
    value = None if inside_index else _int(node)
    if value is not None:
        yield _literal(value + 1)
        yield _literal(value - 1)


@kind("lost-sign")
def lost_sign(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand


@kind("boolean-operator")
def boolean_operator(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


@kind("boolean-constant")
def boolean_constant(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)


@kind("negated-condition")
def negated_condition(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if not isinstance(node, ast.expr):
        return
    has_opposite = isinstance(node, ast.Compare) and len(node.ops) == 1
    is_negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    if place.field in ("test", "ifs") and not has_opposite and not is_negated:
        yield ast.UnaryOp(ast.Not(), node)


@kind("dropped-not")
def dropped_not(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand


@kind("dropped-term")
def dropped_term(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.BoolOp):
        for index in range(len(node.values)):
            rest = node.values[:index] + node.values[index + 1 :]
            yield rest[0] if len(rest) == 1 else _with(node, values=rest)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv | ast.Mod):
        yield node.left


@kind("swapped-arguments")
def swapped_arguments(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and not any(isinstance(argument, ast.Starred) for argument in node.args):
        for index in range(len(node.args) - 1):
            first, second = node.args[index : index + 2]
            if not _same(first, second):
                yield _with(node, args=[*node.args[:index], second, first, *node.args[index + 2 :]])


@kind(HELDOUT_KIND)
def swapped_operands(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, _NON_COMMUTATIVE) and not _same(node.left, node.right):
        yield _with(node, left=node.right, right=node.left)


@kind("wrong-variable")
def wrong_variable(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in place.variables:
        for name in place.variables:
            if name != node.id:
                yield ast.Name(name, ast.Load())


@kind("wrong-index")
def wrong_index(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Subscript):
        value = _int(node.slice)
        if value is not None:
            yield _with(node, slice=_literal(value + 1))
            yield _with(node, slice=_literal(-1 if value == 0 else value - 1))
            if value == -1:
                yield _with(node, slice=_literal(0))


@kind("wrong-slice")
def wrong_slice(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Slice):
        for field in ("lower", "upper"):
            bound = getattr(node, field)
            value = _int(bound)
            if value is not None:
                yield _with(node, **{field: _literal(value + 1)})
                yield _with(node, **{field: _literal(value - 1)})
            elif bound is not None:
                yield _with(node, **{field: ast.BinOp(bound, ast.Add(), ast.Constant(1))})
                yield _with(node, **{field: ast.BinOp(bound, ast.Sub(), ast.Constant(1))})
            if bound is not None:
                yield _with(node, **{field: None})
        if node.step is None and node.lower is None and node.upper is not None:
            yield _with(node, lower=node.upper, upper=None)
        elif node.step is None and node.upper is None and node.lower is not None:
            yield _with(node, lower=None, upper=node.lower)


@kind("range-bound")
def range_bound(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range" and node.args:
        index = 0 if len(node.args) == 1 else 1
        stop = node.args[index]
        one = ast.Constant(1)
        if isinstance(stop, ast.BinOp) and isinstance(stop.op, ast.Add | ast.Sub) and _int(stop.right) == 1:
            yield _with(node, args=[*node.args[:index], stop.left, *node.args[index + 1 :]])
        elif _int(stop) is None:
            yield _with(node, args=[*node.args[:index], ast.BinOp(stop, ast.Sub(), one), *node.args[index + 1 :]])
            yield _with(node, args=[*node.args[:index], ast.BinOp(stop, ast.Add(), one), *node.args[index + 1 :]])
        if len(node.args) == 2:
            yield _with(node, args=[stop])
        elif len(node.args) == 1:
            yield _with(node, args=[one, stop])


@kind("sibling-call")
def sibling_call(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in _SIBLING_FUNCTIONS:
            yield _with(node, func=ast.Name(_SIBLING_FUNCTIONS[node.func.id], ast.Load()))
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _SIBLING_METHODS:
            yield _with(node, func=_with(node.func, attr=_SIBLING_METHODS[node.func.attr]))


@kind("dropped-call")
def dropped_call(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and not isinstance(place.parent, ast.Expr):
        if isinstance(node.func, ast.Name) and node.func.id in _CONVERSIONS and len(node.args) == 1:
            yield node.args[0]
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _CLEANUPS:
            yield node.func.value


@kind("dropped-argument")
def dropped_argument(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call):
        if len(node.args) > 1:
            yield _with(node, args=node.args[:-1])
        for index in range(len(node.keywords)):
            yield _with(node, keywords=node.keywords[:index] + node.keywords[index + 1 :])


@kind("loop-exit")
def loop_exit(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue) or (isinstance(node, ast.Return) and place.in_loop):
        yield ast.Break()


@kind("missing-return")
def missing_return(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Return) and node.value is not None:
        yield ast.Expr(node.value) if place.last else ast.Pass()


@kind("wrong-return")
def wrong_return(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Return) and node.value is not None:
        shown = ast.unparse(node.value)
        for name in place.variables:
            if name != shown:
                yield ast.Return(ast.Name(name, ast.Load()))
        if shown != "None":
            yield ast.Return(ast.Constant(None))


@kind("initial-value")
def initial_value(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        value = node.value
        if isinstance(value, ast.List) and not value.elts:
            yield _with(node, value=ast.List([ast.Constant(None)], ast.Load()))
        elif isinstance(value, ast.Constant) and value.value == "" and isinstance(value.value, str):
            yield _with(node, value=ast.Constant(" "))
        elif _int(value) is not None:
            yield _with(node, value=_literal(-1 if _int(value) == 0 else 0))
        elif isinstance(value, ast.Constant) and value.value is None:
            yield _with(node, value=ast.Constant(0))


@kind("default-value")
def default_value(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(place.parent, ast.arguments) and isinstance(node, ast.Constant):
        if node.value is None:
            yield ast.Constant(0)
            yield ast.Constant(False)
        elif type(node.value) is str and node.value:
            yield ast.Constant("")
        elif type(node.value) in (int, float):
            yield ast.Constant(None)


@kind("string-constant")
def string_constant(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and type(node.value) is str and not isinstance(place.parent, ast.JoinedStr):
        text = node.value
        if not text:
            yield ast.Constant(" ")
        else:
            yield ast.Constant(text[:-1])
            if len(text) > 1:
                yield ast.Constant(text[1:])
            if text.swapcase() != text:
                yield ast.Constant(text.swapcase())


@kind("shortcut")
def shortcut(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """One branch of a conditional expression, whatever the condition."""
    if isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
        yield _with(node, body=node.orelse, orelse=node.body)
