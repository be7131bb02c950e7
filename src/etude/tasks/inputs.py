"""Calls of a function whose parameter types nobody wrote down: expressions made of literals and builtins.

Where in the flow: evidence -> **inputs** (draws calls, learns from what became of them) -> checks (runs them).
`Search` is a small guided search: kinds of values that make a parameter work are drawn more often, and calls that
reached new code are varied one argument at a time. All randomness comes from the generator that is passed in.

What it does not do: run anything.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from etude.tasks.evidence import KINDS, Evidence, Hints, Parameter

MAX_CALL_CHARS = 120
_WORDS = (
    "abc", "hello", "Spam", "x", "foo", "bar", "alpha", "Zed", "key", "b", "data", "test", "level", "aab", "MIXED",
)  # fmt: skip
_POOLS: dict[str, tuple[str, ...]] = {
    "char": ("a", "b", "Z", "0", "7", " ", ",", "-", "_", ".", "/", ":", "\n", "é", "'", "#", "="),
    "word": _WORDS,
    "ident": (
        "foo_bar", "fooBar", "FooBar", "HTTPServer", "__init__", "x1", "_private", "some-name", "a_b_c", "getValue",
    ),
    "numeral": (
        "12", "-3", "3.14", "0x1f", "007", "1e5", "1,234", "0", "99%", "+7", "1010", "XIV", "ff", "12kB", "4/5",
    ),
    "path": (
        "a/b/c.txt", "/usr/lib", "../x", "foo.tar.gz", "file.py", ".", "/", "dir/", "C:\\dir\\f.txt", ".hidden",
        "a//b", "b.TXT", "~/x",
    ),
    "url": (
        "http://example.com/a?b=1#c", "user@host.org", "example.com:8080", "https://a.b.co/", "127.0.0.1", "::1",
        "ftp://u:p@h:21/x", "localhost", "a=1&b=2", "www.x.org/p%20q", "[::1]:80",
    ),
    "fields": (
        "a,b,c", "k=v", "k=v; x=y", "a: b", "[1, 2]", "(a)", '{"a": 1}', "<b>x</b>", '"q"', "it's", "a|b|c",
        "1-5,8", "x = 3 # c", "f(a, b)", "a;b;;c", "(1+2)*3", "%s and %d", "{name}", "$x", "1.2.3", "v2.0.1rc1",
        "a=b=c",
    ),
    "text": (
        "a\nb\n", "line1\n  line2\n\nline3", "  padded  ", "tab\tsep", "one\r\ntwo", "Hello World", "\n", "",
        "The quick brown fox", "x  y   z", "    indented\n    code", "foo bar baz foo", "A man, a plan",
        "Mr. O'Neil",
    ),
    "date": (
        "2024-02-29", "12:34:56", "2020-01-01T00:00:00Z", "20240131", "Jan 5 2021", "1h30m", "05/06/07", "+02:00",
        "1:05", "P3DT4H",
    ),
    "symbols": (
        "a+", "[a-z]+", "^x$", "(\\d+)", "*.txt", "a?c", ".", "#ff0000", "abc123", "!?", "...", "--flag", "0101",
        "ACGT", "aaab", "[!a]*", "ff00aa", "#abc", "naïve", "ß", "日本", "-", "@", "I",
    ),
}  # fmt: skip
_INTS = (
    0, 1, 2, 3, 4, 5, 7, 8, 10, 12, 16, 17, 25, 31, 60, 64, 100, 128, 255, 360, 1000, 2024, 65536, -1, -2, -5, -10,
    -17,
)  # fmt: skip
_FLOATS = (0.0, 0.5, 1.0, 1.5, -2.25, 3.14159, 10.0, 0.001, 100.5, -0.75, 2.0, 1e6, 0.1, 45.0, 7.25)
_BYTES = (
    "b''", "b'abc'", "b'a,b\\n'", "b'\\x00\\xff'", "b'hello world'", "b'\\x01\\x02\\x03\\x04'",
    "b'0123456789abcdef'",
)  # fmt: skip
_CALLABLES = (
    "len", "abs", "str", "int", "bool", "str.upper", "lambda x: x", "lambda x: x * 2", "lambda x: x > 1", "max",
    "sum", "lambda x, y: x + y", "lambda *a: a", "lambda x: x % 2", "str.isdigit", "lambda *a, **k: (a, k)",
    "lambda: 3", "lambda x: -x", "lambda x, y: x < y", "lambda x: x == 2", "bool", "repr",
    "lambda x, y: (x > y) - (x < y)", "lambda x: x[0]", "lambda x, y: x * y",
)  # fmt: skip
_TYPES = ("int", "str", "list", "dict", "float", "tuple", "set", "bool", "ValueError", "object", "type(None)", "bytes")
_REGEXES = ("a+", "[a-z]+", "(\\d+)", "^x", "\\s+", "(a)|(b)", "[,;]", "\\w+")
_MOMENTS = (
    "date(2024, 2, 29)", "date(2023, 12, 31)", "date(1999, 1, 1)", "datetime(2024, 3, 5, 14, 7, 9)",
    "date(2021, 7, 15)", "datetime(2020, 12, 31, 23, 59, 59)", "datetime(2000, 1, 1)", "time(9, 5)",
    "timedelta(days=3, seconds=61)", "timedelta(hours=-5)", "datetime(2022, 11, 6, 1, 30, 0, 250)",
)  # fmt: skip


class Values:
    """Draws the source of a value of a kind, for one function."""

    def __init__(self, evidence: Evidence, rng: random.Random) -> None:
        self.rng = rng
        self.strings = evidence.strings
        self.integers = evidence.integers
        self.makers: dict[str, Callable[[Hints], str]] = {
            "int": lambda h: repr(self.integer()),
            "float": lambda h: repr(self.real()),
            "str": lambda h: repr(self.string()),
            "bool": lambda h: rng.choice(("True", "False")),
            "none": lambda h: "None",
            "bytes": lambda h: rng.choice(_BYTES),
            "ints": lambda h: self.many(lambda: repr(self.integer()), h),
            "floats": lambda h: self.many(lambda: repr(self.real()), h),
            "strs": lambda h: self.many(lambda: repr(self.string(short=True)), h),
            "mixed": lambda h: self.many(lambda: self.scalar(h), h),
            "nested": lambda h: self.nested(2),
            "matrix": self.matrix,
            "pairs": lambda h: self.many(lambda: self.pair(h), h),
            "dicts": lambda h: self.many(lambda: self.mapping(h.element or h, "mixed"), h, most=3),
            "int_tuple": lambda h: self.many(lambda: repr(self.integer()), h, "tuple"),
            "str_tuple": lambda h: self.many(lambda: repr(self.string(short=True)), h, "tuple"),
            "int_set": lambda h: self.many(lambda: repr(self.integer()), h, "set"),
            # One element: the order of strings in a set differs from process to process.
            "str_set": lambda h: self.many(lambda: repr(self.string(short=True)), h, "set", 1),
            "counts": lambda h: self.mapping(h, "int"),
            "names": lambda h: self.mapping(h, "str"),
            "tree": lambda h: self.mapping(h, "mixed"),
            "callable": lambda h: rng.choice(_CALLABLES),
            "type": lambda h: rng.choice(_TYPES),
            "object": self.object,
            "regex": lambda h: f"__import__('re').compile({rng.choice(_REGEXES)!r})",
            "moment": lambda h: f"__import__('datetime').{rng.choice(_MOMENTS)}",
            "iterator": lambda h: f"iter({self.many(lambda: self.scalar(h), h)})",
        }
        for kind, pool in _POOLS.items():
            self.makers[kind] = lambda h, pool=pool: repr(self.seeded(pool))  # type: ignore[misc]
        assert self.makers.keys() == set(KINDS)

    def make(self, kind: str, hints: Hints) -> str:
        return self.makers[kind](hints)

    def integer(self) -> int:
        if self.integers and self.rng.random() < 0.25:
            return self.rng.choice(self.integers) + self.rng.choice((0, 0, 1, -1))
        return self.rng.choice(_INTS) if self.rng.random() < 0.5 else self.rng.randint(-3, 12)

    def real(self) -> float:
        return self.rng.choice(_FLOATS) if self.rng.random() < 0.7 else round(self.rng.uniform(-20, 120), 2)

    def string(self, *, short: bool = False) -> str:
        draw = self.rng.random()
        if draw < 0.3:
            alphabet = self.rng.choice(("ab", "abc ", "0123", "aB1_", "xyz-", "()[]ab", "ACGT"))
            return "".join(self.rng.choices(alphabet, k=self.rng.randint(0, 4 if short else 9)))
        if draw < 0.5 or short:
            return self.seeded(_WORDS)
        return self.seeded(_POOLS[self.rng.choice(tuple(_POOLS))])

    def seeded(self, pool: tuple[str, ...]) -> str:
        """From the pool, or made around a string constant of the function: parsers look for exactly those."""
        text = self.rng.choice(pool)
        if self.strings and self.rng.random() < 0.4:
            constant = self.rng.choice(self.strings)
            both = text + constant + self.rng.choice(pool)
            text = self.rng.choice((constant, constant + text, text + constant, both))
        return text[:40]

    def scalar(self, hints: Hints) -> str:
        if hints.element is not None:
            kind = _draw(hints.element.weights, self.rng)
            if kind not in ("dicts", "nested", "matrix", "tree", "object"):
                return self.make(kind, Hints())
        integers = (repr(self.integer()), repr(self.integer()))
        return self.rng.choice((*integers, repr(self.string(short=True)), "None", "True", repr(self.real())))

    def many(self, make: Callable[[], str], hints: Hints, shape: str = "list", most: int = 6) -> str:
        count = hints.length if hints.length is not None and self.rng.random() < 0.9 else self.rng.randint(0, most)
        items = [make() for _ in range(min(count, most))]
        if len(items) > 1 and self.rng.random() < 0.3:
            items.append(self.rng.choice(items))
        if shape == "tuple":
            return "(" + ", ".join(items) + (",)" if len(items) == 1 else ")")
        if shape == "set":
            # Sorted: a set's order is not part of its value, and a call must not depend on it.
            return "{" + ", ".join(sorted(set(items))) + "}" if items else "set()"
        return "[" + ", ".join(items) + "]"

    def pair(self, hints: Hints) -> str:
        element = hints.element or Hints()
        count = element.length if element.length is not None else 2
        first = repr(self.string(short=True)) if self.rng.random() < 0.4 else repr(self.integer())
        items = [first, *(self.scalar(Hints()) for _ in range(count - 1))]
        return "(" + ", ".join(items) + (")" if len(items) > 1 else ",)")

    def nested(self, depth: int) -> str:
        items = []
        for _ in range(self.rng.randint(0, 3)):
            deeper = depth > 0 and self.rng.random() < 0.5
            items.append(self.nested(depth - 1) if deeper else self.scalar(Hints()))
        return "[" + ", ".join(items) + "]"

    def matrix(self, hints: Hints) -> str:
        rows, columns = self.rng.randint(1, 3), self.rng.randint(1, 3)
        if self.rng.random() < 0.4:
            rows = columns
        return repr([[self.rng.randint(-2, 9) for _ in range(columns)] for _ in range(rows)])

    def mapping(self, hints: Hints, values: str) -> str:
        keys = [key for key in sorted(hints.keys) if self.rng.random() < 0.75]
        keys += [self.rng.choice(_WORDS) for _ in range(self.rng.randint(0 if keys else 1, 2))]
        entries = {}
        for key in keys:
            if values == "int":
                entries[key] = repr(self.integer())
            elif values == "str":
                entries[key] = repr(self.string(short=True))
            else:
                entries[key] = self.nested(1) if self.rng.random() < 0.3 else self.scalar(Hints())
        if values == "int" and not hints.keys and self.rng.random() < 0.3:
            return repr({self.rng.randint(0, 5): self.integer() for _ in range(3)})
        return "{" + ", ".join(f"{key!r}: {value}" for key, value in entries.items()) + "}"

    def object(self, hints: Hints) -> str:
        """An instance of a class made on the spot, with the attributes that the body reads."""
        parts = []
        for name, called in sorted(hints.attributes.items()):
            plain = self.rng.random() < 0.7
            value = self.scalar(Hints()) if plain else self.many(lambda: self.scalar(Hints()), Hints())
            parts.append(f"{name!r}: " + (f"lambda *a: {value}" if called else value))
        return "type('O', (), {" + ", ".join(parts) + "})()"


def _draw(weights: dict[str, float], rng: random.Random) -> str:
    return rng.choices(tuple(weights), tuple(weights.values()))[0]


def _part_of(text: str, rng: random.Random) -> tuple[str, str] | None:
    """Kind and source of something in a value: a piece of a string, an element, a key. Functions that look for one
    thing in another rarely find it by chance."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    if not isinstance(value, str | list | tuple | dict) or not value:
        return None
    if isinstance(value, str):
        start = rng.randrange(len(value))
        return "str", repr(value[start : start + rng.randint(1, 3)])
    part = rng.choice(list(value))
    return {int: "int", str: "str"}.get(type(part), "none"), repr(part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument of a call: which parameter, which kind of value, its source."""

    parameter: int
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A call that may become a check."""

    call: str
    arguments: tuple[Argument, ...]
    plausible: float
    """Mean over the arguments of the weight of their kind, relative to the likeliest kind of that parameter."""
    in_place: str
    """The call in a form whose value is the first list, dict or set passed, for functions that change it and return
    None; empty where none is passed."""
    target: str
    """The source of that list, dict or set."""


class Search:
    """Draws calls of one function and learns from their outcomes.

    >>> search = Search("clamp", evidence, random.Random(0))
    >>> search.draw(40)                       # -> [Candidate(call="clamp(3, 0, 5)", ...), ...]
    >>> search.learn(candidate, works=True, new=True)
    """

    def __init__(self, name: str, evidence: Evidence, rng: random.Random) -> None:
        self.name = name
        self.rng = rng
        self.parameters = evidence.parameters
        self.values = Values(evidence, rng)
        self.tried: set[str] = set()
        self.good: list[Candidate] = []
        self.counts: list[dict[str, list[int]]] = [{} for _ in evidence.parameters]

    def draw(self, count: int) -> list[Candidate]:
        """Up to `count` new calls, none drawn before."""
        drawn: list[Candidate] = []
        for _ in range(count * 3):
            vary = self.good and self.rng.random() < 0.6
            arguments = self._vary(self.rng.choice(self.good)) if vary else self._fresh()
            call = self._render(arguments)
            if len(call) <= MAX_CALL_CHARS and call not in self.tried:
                self.tried.add(call)
                drawn.append(self._candidate(call, arguments))
                if len(drawn) == count:
                    break
        return drawn

    def _candidate(self, call: str, arguments: tuple[Argument, ...]) -> Candidate:
        shares = []
        for argument in arguments:
            weights = self.parameters[argument.parameter].hints.weights
            shares.append(weights[argument.kind] / max(weights.values()))
        in_place = target = ""
        for at, argument in enumerate(arguments):
            if argument.text[0] in "[{" and self.parameters[argument.parameter].style == "plain":
                named = [*arguments]
                target = argument.text
                named[at] = replace(argument, text=f"(it := {argument.text})")
                in_place = f"{self._render(tuple(named))} or it"
                break
        plausible = sum(shares) / max(len(shares), 1)
        return Candidate(call=call, arguments=arguments, plausible=plausible, in_place=in_place, target=target)

    def learn(self, candidate: Candidate, *, works: bool, new: bool) -> None:
        """`works`: it gave a value, or an error that is the function's own. `new`: it reached something new."""
        for argument in candidate.arguments:
            tally = self.counts[argument.parameter].setdefault(argument.kind, [0, 0])
            tally[0] += works
            tally[1] += 1
        if works and (new or len(self.good) < 8):
            self.good.append(candidate)

    def _weights(self, index: int) -> dict[str, float]:
        weights = dict(self.parameters[index].hints.weights)
        for kind, (works, tries) in self.counts[index].items():
            weights[kind] *= ((works + 0.3) / (tries + 0.6)) ** 2 * 4
        return weights

    def _argument(self, index: int, before: list[Argument]) -> Argument:
        weights = self._weights(index)
        parameter = self.parameters[index]
        if before and self.rng.random() < 0.3 and weights[before[-1].kind] >= 1.0:
            # Neighbours are often of one kind (two strings to compare), and sometimes equal or nearly so.
            kind = before[-1].kind
            if self.rng.random() < 0.3:
                return Argument(parameter=index, kind=kind, text=before[-1].text)
        else:
            kind = _draw(weights, self.rng)
        if before and self.rng.random() < 0.2:
            part = _part_of(before[-1].text, self.rng)
            if part is not None and weights[part[0]] >= 1.0:
                return Argument(parameter=index, kind=part[0], text=part[1])
        return Argument(parameter=index, kind=kind, text=self.values.make(kind, parameter.hints))

    def _fresh(self) -> tuple[Argument, ...]:
        chosen: list[Argument] = []
        for index, parameter in enumerate(self.parameters):
            if parameter.style == "double_star":
                chosen.extend(self._keywords(index) if self.rng.random() < 0.5 else ())
            elif parameter.style == "star":
                first = self._argument(index, chosen)
                chosen.append(first)
                for _ in range(self.rng.choice((0, 1, 1, 2, 3))):
                    text = self.values.make(first.kind, parameter.hints)
                    chosen.append(Argument(parameter=index, kind=first.kind, text=text))
            elif not parameter.optional or self.rng.random() < 0.6:
                chosen.append(self._argument(index, chosen))
        return tuple(chosen)

    def _keywords(self, index: int) -> list[Argument]:
        taken = {parameter.name for parameter in self.parameters}
        names = sorted(self.parameters[index].hints.keys | {"key", "x", "n"} - taken)
        picked = self.rng.sample(names, self.rng.randint(1, min(2, len(names))))
        return [
            Argument(parameter=index, kind="mixed", text=f"{name}={self.values.scalar(Hints())}")
            for name in picked
            if name.isidentifier() and name not in taken
        ]

    def _vary(self, candidate: Candidate) -> tuple[Argument, ...]:
        arguments = list(candidate.arguments)
        if not arguments:
            return self._fresh()
        at = self.rng.randrange(len(arguments))
        old = arguments[at]
        parameter = self.parameters[old.parameter]
        if parameter.style == "double_star":
            return self._fresh()
        kind = old.kind if self.rng.random() < 0.6 else _draw(self._weights(old.parameter), self.rng)
        arguments[at] = Argument(parameter=old.parameter, kind=kind, text=self.values.make(kind, parameter.hints))
        return tuple(arguments)

    def _render(self, arguments: tuple[Argument, ...]) -> str:
        """The call; once an optional parameter is left out, those after it are named."""
        parts: list[str] = []
        expected = 0
        for argument in arguments:
            parameter: Parameter = self.parameters[argument.parameter]
            named = parameter.style == "keyword" or (parameter.style == "plain" and argument.parameter != expected)
            parts.append(f"{parameter.name}={argument.text}" if named else argument.text)
            if parameter.style == "plain" and not named:
                expected = argument.parameter + 1
        return f"{self.name}({', '.join(parts)})"
