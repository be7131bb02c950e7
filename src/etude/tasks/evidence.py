"""What a function's text tells about the kinds of its parameters: their names, defaults and how the body uses them.

Where in the flow: harvest -> **evidence** -> inputs (which draws argument values by these weights) -> checks.
It guesses and may be wrong: the search that follows runs the calls and learns which kinds work.
"""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

KINDS = (
    "int", "float", "bool", "none", "str", "char", "word", "ident", "numeral", "path", "url", "fields", "text",
    "date", "symbols", "bytes", "ints", "floats", "strs", "mixed", "nested", "matrix", "pairs", "dicts",
    "int_tuple", "str_tuple", "int_set", "str_set", "counts", "names", "tree", "callable", "type", "regex",
    "object", "moment", "iterator",
)  # fmt: skip
"""Kinds of values; `inputs` has a generator for each."""
STRS = ("str", "char", "word", "ident", "numeral", "path", "url", "fields", "text", "date", "symbols")
NUMBERS = ("int", "float")
LISTS = ("ints", "floats", "strs", "mixed", "nested", "matrix", "pairs", "dicts")
TUPLES = ("int_tuple", "str_tuple")
SETS = ("int_set", "str_set")
DICTS = ("counts", "names", "tree")
SEQUENCES = ("str", "word", "ints", "strs", "mixed", "nested", "pairs", *TUPLES)
ITERABLES = (*SEQUENCES, *SETS, "counts", "names", "iterator")

PRIOR: Mapping[str, float] = dict.fromkeys(KINDS, 0.1) | {
    "int": 2.0, "str": 1.5, "word": 1.0, "ints": 1.0, "strs": 0.7, "float": 0.5, "counts": 0.4, "mixed": 0.3,
    "none": 0.15, "pairs": 0.3, "int_tuple": 0.3, "callable": 0.2,
}  # fmt: skip
_BY_TYPE: Mapping[str, tuple[str, ...]] = {
    "str": STRS, "int": ("int",), "float": ("float", "int"), "bool": ("bool",), "bytes": ("bytes",), "list": LISTS,
    "tuple": TUPLES, "set": SETS, "frozenset": SETS, "dict": DICTS, "complex": ("float",), "type": ("type",),
    "bytearray": ("bytes",), "NoneType": ("none",),
}  # fmt: skip
_TYPES: dict[str, type] = {
    "str": str, "list": list, "dict": dict, "set": set, "bytes": bytes, "tuple": tuple, "int": int, "float": float,
}  # fmt: skip
_METHODS: dict[str, list[str]] = defaultdict(list)
for _name, _type in _TYPES.items():
    for _method in dir(_type):
        if not _method.startswith("_"):
            _METHODS[_method].append(_name)
_MOMENT = {
    "year", "month", "day", "hour", "minute", "second", "weekday", "isoweekday", "toordinal", "strftime", "isoformat",
    "timetuple",
}  # fmt: skip
_REGEX = frozenset(["match", "fullmatch", "search", "finditer", "findall", "sub", "subn", "pattern"])
_NAMES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"^(s|st|string|text|txt|line|content|sentence|message|msg|title|doc|src|source|html|raw)\d?$", ("str", "text")),
    (r"(str|text|string)$", ("str",)),
    (r"^(word|name|label|prefix|suffix|token|tag|term)s?\d?$|_?name$", ("word", "ident")),
    (r"^(c|ch|char|sep|delim|delimiter|separator|letter|fill|fillchar)$", ("char",)),
    (r"^(path|filename|fname|file|dirname|directory|root|filepath)$", ("path",)),
    (r"^(url|uri|link|host|hostname|address|addr|netloc|domain|email)$", ("url",)),
    (r"(date|time|timestamp)(_?str|string)?$", ("date", "moment", "int")),
    (r"^(pattern|regex|regexp|pat)$", ("symbols", "regex")),
    (r"^(i|j|k|n|m|num|number|count|size|length|width|height|index|idx|pos|offset|start|stop|end|step|limit|depth)\d?$",
     ("int",)),
    (r"^(year|month|day|hours?|minutes?|seconds?|days|level|order|base|rank|bits|port|code|digits|precision)$",
     ("int",)),
    (r"^(max|min)_?\w*$|_(len|size|count|index|id)$|^n_", ("int",)),
    (r"^(x|y|z|a|b|p|q|r|val|value|t|alpha|theta|angle|ratio|scale|factor|tol|eps|rate|weight)\d?$", ("int", "float")),
    (r"^(seq|sequence|items|iterable|it|lst|l|xs|array|arr|elements|values|coll|collection|data|list\w*|nums|numbers)\d?$",
     ("ints", "strs", "mixed")),
    (r"^(words|lines|names|tokens|parts|args|argv|strings|strs|keys|fields|cols|columns|labels)$", ("strs",)),
    (r"^(matrix|grid|rows|table|board|mat)$", ("matrix",)),
    (r"^(pairs|edges|intervals|ranges|points|tuples)$", ("pairs",)),
    (r"^(d|dct|dict\w*|mapping|map|kwargs|attrs|options|opts|params|config|headers|obj|counts)\d?$|_dict$|_map$",
     DICTS),
    (r"^(f|func|function|fn|pred|predicate|key|callback|callable|mapper|transform|op|cmp)\d?$", ("callable",)),
    (r"^(set|s[12]|seen)$|_set$", SETS),
    (r"^(is|has|use|allow|strict|reverse|ignore|include|keep|skip|with|no)_|^(strict|reverse|verbose|inplace|flag)$",
     ("bool",)),
    (r"^(b|buf|buffer|bytes|blob|payload)$|_?bytes$", ("bytes",)),
    (r"^(cls|klass|type_?|typ)$", ("type",)),
    (r"^(tree|node|nested)$", ("nested", "tree")),
    (r"^(dt|d[12]|date|when|moment|day)$", ("moment",)),
    (r"^(point|pos|size|shape|coord|vec|vector|v|color|colour|rgb|interval|version)\d?$", ("int_tuple", "ints")),
)  # fmt: skip
_NUMERIC_CALLS = frozenset(["abs", "round", "chr", "range", "divmod", "pow", "bin", "hex", "int", "float"])
_ITERATING_CALLS = {
    "sorted", "sum", "min", "max", "enumerate", "zip", "map", "filter", "list", "tuple", "set", "frozenset",
    "reversed", "any", "all", "iter", "dict", "len",
}  # fmt: skip


@dataclass(kw_only=True)
class Hints:
    """What is known about one parameter (or about the elements of one)."""

    weights: dict[str, float] = field(default_factory=lambda: dict(PRIOR))
    """Kind -> relative probability, unnormalised."""
    keys: set[str] = field(default_factory=set)
    """String keys that the body looks up in it."""
    attributes: dict[str, bool] = field(default_factory=dict)
    """Attributes that no builtin type has -> whether they are called."""
    length: int | None = None
    """Number of elements, where the body unpacks it."""
    element: Hints | None = None
    """About what iterating over it gives."""

    def add(self, kinds: Iterable[str], weight: float) -> None:
        kinds = tuple(kinds)
        for kind in kinds:
            self.weights[kind] += weight / math.sqrt(len(kinds))


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a function, in the order of its signature."""

    name: str
    style: str
    """`plain`, `star`, `keyword` or `double_star`."""
    optional: bool
    hints: Hints


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that the text of a function tells about its inputs."""

    parameters: tuple[Parameter, ...]
    strings: tuple[str, ...]
    """Short string constants of the function and of what stands before it."""
    integers: tuple[int, ...]


def read(prelude: str, source: str) -> Evidence:
    """Evidence from a module's prelude and the function's source. Errors: SyntaxError, for what is not Python."""
    tree = ast.parse(source)
    function = tree.body[-1]
    if not isinstance(function, ast.FunctionDef):
        raise SyntaxError("the source does not end with a function")
    parameters = _parameters(function.args)
    watched = {parameter.name: parameter.hints for parameter in parameters if parameter.style != "double_star"}
    for parameter in parameters:
        if parameter.style == "star":
            # What the body says about *args is about a tuple of them; calls need the elements.
            watched[parameter.name] = Hints(element=parameter.hints)
    _Uses(watched).visit(function)
    strings, integers = _constants(tree)
    more_strings, _ = _constants(ast.parse(prelude))
    return Evidence(
        parameters=parameters,
        strings=tuple(dict.fromkeys(strings + more_strings))[:40],
        integers=tuple(dict.fromkeys(integers))[:20],
    )


def _parameters(arguments: ast.arguments) -> tuple[Parameter, ...]:
    found: list[Parameter] = []
    plain = arguments.posonlyargs + arguments.args
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(plain, defaults, strict=True):
        found.append(_parameter(argument.arg, "plain", default))
    if arguments.vararg:
        found.append(_parameter(arguments.vararg.arg, "star", None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_parameter(argument.arg, "keyword", default))
    if arguments.kwarg:
        found.append(_parameter(arguments.kwarg.arg, "double_star", None))
    return tuple(found)


def _parameter(name: str, style: str, default: ast.expr | None) -> Parameter:
    hints = Hints()
    for pattern, kinds in _NAMES:
        if re.search(pattern, name.lower()):
            hints.add(kinds, 4.0)
    if isinstance(default, ast.Constant) and default.value is not None:
        hints.add(_BY_TYPE.get(type(default.value).__name__, ()), 8.0)
    elif isinstance(default, ast.Tuple | ast.List | ast.Dict):
        hints.add(_BY_TYPE[type(default).__name__.lower()], 6.0)
    elif isinstance(default, ast.Name) and default.id in _TYPES:
        hints.add(("type",), 6.0)
    elif isinstance(default, ast.Name | ast.Lambda):
        hints.add(("callable",), 6.0)
    elif isinstance(default, ast.Constant):
        hints.add(("none",), 1.0)
    return Parameter(name=name, style=style, optional=default is not None, hints=hints)


def _constants(tree: ast.AST) -> tuple[list[str], list[int]]:
    strings: list[str] = []
    integers: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and 0 < len(node.value) <= 16:
                strings.append(node.value)
            elif type(node.value) is int and abs(node.value) <= 100_000:
                integers.append(node.value)
    return strings, integers


class _Uses(ast.NodeVisitor):
    """Walks a body and adds to the hints of the names it watches; loop variables over them speak of their elements."""

    def __init__(self, watched: dict[str, Hints]) -> None:
        self.watched = watched

    def _hints(self, node: ast.AST) -> Hints | None:
        return self.watched.get(node.id) if isinstance(node, ast.Name) else None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        hints = self._hints(node.value)
        if hints is not None:
            self._attribute(hints, node.attr, called=False)
        self.generic_visit(node)

    def _attribute(self, hints: Hints, attribute: str, *, called: bool) -> None:
        if owners := _METHODS.get(attribute):
            for owner in owners:
                hints.add(_BY_TYPE[owner], 10.0 / len(owners))
        elif attribute in _MOMENT:
            hints.add(("moment",), 12.0)
        elif attribute in _REGEX:
            hints.add(("regex",), 12.0)
        if attribute not in _METHODS:
            hints.attributes[attribute] = hints.attributes.get(attribute, False) or called
            hints.add(("object",), 10.0)

    def visit_Call(self, node: ast.Call) -> None:
        target = node.func
        if (hints := self._hints(target)) is not None:
            hints.add(("callable",), 12.0)
        if isinstance(target, ast.Attribute):
            if (hints := self._hints(target.value)) is not None:
                self._attribute(hints, target.attr, called=True)
                if target.attr in ("get", "pop", "setdefault") and node.args:
                    self._key(hints, node.args[0])
            self._method_arguments(target, node.args)
        elif isinstance(target, ast.Name):
            self._arguments(target.id, node.args)
        self.generic_visit(node)

    def _method_arguments(self, target: ast.Attribute, arguments: list[ast.expr]) -> None:
        owner = target.value
        for position, argument in enumerate(arguments):
            if (hints := self._hints(argument)) is None:
                continue
            if target.attr == "join":
                hints.add(("strs", "str_tuple"), 8.0)
            elif isinstance(owner, ast.Name) and owner.id == "math":
                hints.add(("float", "int"), 8.0)
            elif isinstance(owner, ast.Name) and owner.id == "re":
                hints.add(("symbols", "regex") if position == 0 else STRS, 6.0)
            elif target.attr in _REGEX | {"startswith", "endswith", "split", "replace", "find", "strip", "count"}:
                hints.add(("str", "char", "word"), 3.0)
            elif target.attr in ("extend", "update"):
                hints.add(ITERABLES, 3.0)

    def _arguments(self, function: str, arguments: list[ast.expr]) -> None:
        for position, argument in enumerate(arguments):
            if (hints := self._hints(argument)) is None:
                continue
            if function == "isinstance" and position == 0 and len(arguments) == 2:
                for name in ast.walk(arguments[1]):
                    if isinstance(name, ast.Name):
                        hints.add(_BY_TYPE.get(name.id, ()), 4.0)
            elif function in _NUMERIC_CALLS:
                hints.add(NUMBERS if function not in ("int", "float") else ("numeral", "int", "float"), 5.0)
            elif function == "ord":
                hints.add(("char",), 10.0)
            elif function in ("map", "filter", "reduce") and position == 0:
                hints.add(("callable",), 8.0)
            elif function in _ITERATING_CALLS:
                hints.add(ITERABLES, 6.0)

    def _key(self, hints: Hints, key: ast.expr) -> None:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            hints.keys.add(key.value)
            hints.add(DICTS, 8.0)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if (hints := self._hints(node.value)) is not None:
            self._key(hints, node.slice)
            if isinstance(node.slice, ast.Slice):
                hints.add(SEQUENCES, 8.0)
            elif not (isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)):
                hints.add((*SEQUENCES, "matrix", *DICTS), 4.0)
        if (hints := self._hints(node.slice)) is not None:
            hints.add(("int",), 3.0)
            hints.add(("word",), 1.0)
        self.generic_visit(node)

    def _iterated(self, target: ast.expr, iterable: ast.expr) -> None:
        if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) and iterable.args:
            function, iterable = iterable.func.id, iterable.args[0]
            if function == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
                target = target.elts[1]
            elif function not in ("reversed", "sorted", "iter", "set", "list"):
                return
        if (hints := self._hints(iterable)) is None:
            return
        hints.add(ITERABLES, 6.0)
        hints.element = hints.element or Hints()
        if isinstance(target, ast.Name):
            self.watched.setdefault(target.id, hints.element)
        elif isinstance(target, ast.Tuple):
            hints.element.length = len(target.elts)
            hints.add(("pairs",), 20.0)

    def visit_For(self, node: ast.For) -> None:
        self._iterated(node.target, node.iter)
        self.generic_visit(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for generator in node.generators:
            self._iterated(generator.target, generator.iter)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def visit_Assign(self, node: ast.Assign) -> None:
        hints = self._hints(node.value)
        if hints is not None and isinstance(node.targets[0], ast.Tuple):
            hints.length = len(node.targets[0].elts)
            hints.add((*TUPLES, "ints", "strs"), 8.0)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        for side, other in ((node.left, node.right), (node.right, node.left)):
            if (hints := self._hints(side)) is None:
                continue
            if isinstance(other, ast.Constant) and isinstance(other.value, str):
                hints.add(STRS, 4.0 if isinstance(node.op, ast.Add) else 0.5)
            elif isinstance(node.op, ast.Add):
                hints.add((*NUMBERS, "str", "ints"), 2.0)
            elif isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor | ast.LShift | ast.RShift):
                hints.add(("int",), 8.0)
            else:
                hints.add(("int", "float"), 6.0)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub) and (hints := self._hints(node.operand)) is not None:
            hints.add(("int", "float"), 8.0)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            if isinstance(operator, ast.In | ast.NotIn):
                if (hints := self._hints(right)) is not None:
                    hints.add((*ITERABLES, "str"), 5.0)
                if (hints := self._hints(left)) is not None:
                    hints.add(("char", "word", "int"), 2.0)
                continue
            for side, other in ((left, right), (right, left)):
                if (hints := self._hints(side)) is None:
                    continue
                if isinstance(other, ast.Constant):
                    hints.add(_BY_TYPE.get(type(other.value).__name__, ()), 1.0 if other.value is None else 5.0)
                elif isinstance(operator, ast.Lt | ast.Gt | ast.LtE | ast.GtE):
                    hints.add(("int", "float"), 3.0)
        self.generic_visit(node)
