"""What a function needs beside itself to run alone: imports, literal constants, helper functions.

Where in the flow: `harvest` asks it of every function at module level; the answer becomes `Function.prelude`. It reads
syntax only, so it is a filter that errs on the safe side and no proof: whatever runs, runs in a sandbox.
"""

from __future__ import annotations

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import re
import symtable
from collections.abc import Iterator

SAFE_MODULES = frozenset(
    {
        "abc", "array", "ast", "base64", "binascii", "bisect", "calendar", "cmath", "codecs", "collections",
        "collections.abc", "colorsys", "contextlib", "copy", "dataclasses", "datetime", "decimal", "difflib", "enum",
        "fnmatch", "fractions", "functools", "hashlib", "heapq", "html", "html.entities", "inspect", "ipaddress",
        "itertools", "json", "keyword", "math", "numbers", "operator", "posixpath", "re", "reprlib", "shlex",
        "statistics", "string", "struct", "textwrap", "token", "types", "typing", "unicodedata", "urllib.parse",
        "warnings", "zlib", "__future__",
    }
)  # fmt: skip
"""Modules of the standard library that a task may import: no files, network, processes, clock or chance."""

BANNED_NAMES = frozenset(
    {
        "open", "input", "print", "exec", "eval", "compile", "__import__", "globals", "locals", "vars", "breakpoint",
        "exit", "quit", "help", "id", "hash", "super", "memoryview", "dir", "__file__", "__name__", "__builtins__",
        "__loader__", "__spec__", "__doc__", "__package__",
    }
)  # fmt: skip
"""Builtins that reach out, or whose value differs from one process to the next."""

BANNED_ATTRIBUTES = frozenset(
    {
        "now", "today", "utcnow", "utcfromtimestamp", "fromtimestamp", "astimezone", "localtime", "getsource",
        "getsourcefile", "stack", "currentframe", "getmodule", "getfile", "open_code", "realpath", "abspath",
        "expanduser", "expandvars", "__globals__", "__builtins__", "__subclasses__", "__code__", "__bases__", "__mro__",
        "__import__", "__loader__", "__dict__", "__module__", "__closure__", "__file__",
    }
)  # fmt: skip
"""Attributes that lead to the clock, to files or around in the interpreter."""

_PLAIN_TYPES: tuple[type, ...] = (
    str, bytes, bytearray, list, dict, set, frozenset, int, float, complex, tuple, range, slice, bool, object,
    re.Pattern, re.Match, fractions.Fraction, decimal.Decimal, datetime.date, datetime.datetime, datetime.timedelta,
    datetime.time, collections.deque, collections.Counter, collections.OrderedDict, collections.defaultdict,
    ast.AST, Exception,
)  # fmt: skip
PLAIN_ATTRIBUTES = frozenset(name for kind in _PLAIN_TYPES for name in dir(kind)) | {"__name__"}
"""Attributes of values that a test can write down. A parameter asked for any other is some object of the package's."""

MAX_PRELUDE_LINES = 30
MAX_PRELUDE_CHARS = 1500
MAX_CONSTANT_CHARS = 600
_BUILTINS = frozenset(dir(builtins))
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class Module:
    """The names that a stripped module binds at its top level, and how each could travel along with a function."""

    def __init__(self, tree: ast.Module) -> None:
        self.imports: dict[str, tuple[str, str]] = {}
        """Name -> (module it comes from, import statement that binds it)."""
        self.constants: dict[str, tuple[int, ast.stmt]] = {}
        """Name -> (position, assignment or class without a body)."""
        self.functions: dict[str, tuple[int, ast.FunctionDef]] = {}
        self._needs: dict[str, frozenset[str] | None] = {}
        self._sources: dict[str, str] = {}
        bound: collections.Counter[str] = collections.Counter()
        for position, statement in enumerate(tree.body):
            self._bind(position, statement, bound)
        moved = {name for node in statements(tree.body) if isinstance(node, ast.Global) for name in node.names}
        for name in moved | {name for name, times in bound.items() if times > 1}:
            for table in (self.imports, self.constants, self.functions):
                table.pop(name, None)

    def _bind(self, position: int, statement: ast.stmt, bound: collections.Counter[str]) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for name, module, source in _imports(statement):
                self.imports.setdefault(name, (module, source))
            return
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            bound.update(node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
            if len(names) == len(targets) == 1 and names[0] != "__all__" and _height(statement) <= MAX_PRELUDE_LINES:
                self.constants[names[0]] = (position, statement)
            return
        if isinstance(statement, ast.FunctionDef):
            bound[statement.name] += 1
            self.functions[statement.name] = (position, statement)
            return
        if isinstance(statement, ast.ClassDef):
            bound[statement.name] += 1
            if all(isinstance(item, ast.Pass) or _is_bare_constant(item) for item in statement.body):
                bare = ast.ClassDef(statement.name, statement.bases, statement.keywords, [ast.Pass()], [])
                self.constants[statement.name] = (position, bare)
        elif isinstance(statement, _FUNCTION):
            bound[statement.name] += 1
        elif not isinstance(statement, ast.Expr):
            for node in ast.walk(statement):  # what a branch binds is not known for certain
                if isinstance(node, (*_FUNCTION, ast.ClassDef)):
                    bound[node.name] += 2
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    bound[node.id] += 2

    def needs(self, name: str) -> frozenset[str] | None:
        """Names that the constant or function `name` needs, or None when it must not travel."""
        if name not in self._needs:
            node: ast.stmt = self.functions[name][1] if name in self.functions else self.constants[name][1]
            source = unparse(node)
            found = free_names(source) if source and is_harmless(node) else None
            if name in self.constants and (len(source) > MAX_CONSTANT_CHARS or name in (found or ())):
                found = None
            self._sources[name], self._needs[name] = source, found
        return self._needs[name]

    def prelude(self, name: str, free: frozenset[str]) -> str | None:
        """Source of all that `name`, whose free names are `free`, needs; None when something cannot travel."""
        todo, done = list(free), {name}
        imports: set[str] = set()
        parts: set[str] = set()
        while todo:
            item = todo.pop()
            if item in done:
                continue
            done.add(item)
            if item in self.imports:
                module, source = self.imports[item]
                if module not in SAFE_MODULES:
                    return None
                imports.add(source)
            elif item in self.constants or item in self.functions:
                needed = self.needs(item)
                if needed is None or len(parts) > 12:
                    return None
                parts.add(item)
                todo.extend(needed)
            elif item not in _BUILTINS or item in BANNED_NAMES:
                return None
        placed = sorted((self.functions.get(part) or self.constants[part])[0] for part in parts)
        by_position = {(self.functions.get(part) or self.constants[part])[0]: part for part in parts}
        text = "\n".join(sorted(imports) + [self._sources[by_position[position]] for position in placed])
        fits = text.count("\n") < MAX_PRELUDE_LINES and len(text) <= MAX_PRELUDE_CHARS and text.isascii()
        return text if fits and all(len(line) <= 120 for line in text.splitlines()) else None


def _imports(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, str]]:
    """(name bound, module, statement) of each name; a relative import's module is its dots, which no list allows."""
    for alias in statement.names:
        text = alias.name + (f" as {alias.asname}" if alias.asname else "")
        if isinstance(statement, ast.Import):
            yield alias.asname or alias.name.split(".")[0], alias.name, f"import {text}"
        else:
            module = "." * statement.level + (statement.module or "")
            yield alias.asname or alias.name, module, f"from {module} import {text}"


def _height(node: ast.stmt) -> int:
    """Lines of the file that it takes."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def unparse(node: ast.AST) -> str:
    """Source of `node`; empty for an expression nested deeper than the interpreter's stack."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return ""


def is_harmless(node: ast.AST) -> bool:
    """False when something under `node` is a banned attribute, awaits, rebinds a global or imports the unsafe."""
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and child.attr in BANNED_ATTRIBUTES:
            return False
        if isinstance(child, (ast.Global, ast.Await, ast.AsyncFor, ast.AsyncWith)):
            return False
        if isinstance(child, (ast.Import, ast.ImportFrom)) and any(
            module not in SAFE_MODULES for _, module, _ in _imports(child)
        ):
            return False
    return True


def is_plain(node: ast.AST, modules: frozenset[str]) -> bool:
    """True when every attribute asked for belongs to plain values or to a name in `modules`."""
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and child.attr not in PLAIN_ATTRIBUTES:
            root: ast.AST = child
            while isinstance(root, ast.Attribute):
                root = root.value
            if not (isinstance(root, ast.Name) and root.id in modules):
                return False
    return True


def free_names(source: str) -> frozenset[str] | None:
    """Names that `source` takes from its module or the builtins; None when it does not compile alone."""
    try:
        table = symtable.symtable(source, "<function>", "exec")
    except (SyntaxError, ValueError):
        return None
    found: set[str] = set()
    inner = list(table.get_children())
    found.update(symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced())
    while inner:
        scope = inner.pop()
        found.update(symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global())
        inner.extend(scope.get_children())
    return frozenset(found)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of `body` at every depth; expressions, where most nodes are, are not entered."""
    for node in body:
        yield node
        for block in blocks(node):
            yield from statements(block)


def blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """The lists of statements that a compound statement holds."""
    if isinstance(node, ast.Match):
        return [case.body for case in node.cases]
    found = [getattr(node, field) for field in ("body", "orelse", "finalbody") if getattr(node, field, None)]
    return found + [handler.body for handler in getattr(node, "handlers", ())]


def strip(body: list[ast.stmt]) -> None:
    """Drops docstrings, annotations and decorators of functions under `body`, in place (a copy costs ten parses)."""
    for node in statements(body):
        if isinstance(node, _FUNCTION):
            node.decorator_list, node.returns = [], None
            arguments = node.args
            extra = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
            for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra]:
                argument.annotation = None
            node.body[:] = [item for item in node.body if not _is_bare_constant(item)] or [ast.Pass()]
        for block in blocks(node):
            _unannotate(block)
    _unannotate(body)


def _is_bare_constant(node: ast.stmt) -> bool:
    """A docstring or `...`."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _unannotate(block: list[ast.stmt]) -> None:
    """`x: int = 1` becomes `x = 1`; `x: int` goes, and leaves `pass` where it was alone."""
    if any(isinstance(item, ast.AnnAssign) for item in block):
        kept: list[ast.stmt] = []
        for item in block:
            if not isinstance(item, ast.AnnAssign):
                kept.append(item)
            elif item.value is not None:
                kept.append(ast.copy_location(ast.Assign(targets=[item.target], value=item.value), item))
        block[:] = kept or [ast.Pass()]
