"""Replies that no model should write, through every format's parser and on through the check of a tool's arguments.

    python tests/data/fuzz.py --count 100000          outputs of each format; the first that breaks anything is printed
    python tests/data/fuzz.py --formats nano qwen3

An output is a real reply (words, thinking, several calls of all kinds of arguments) that was cut, doubled, spliced with
another, sprinkled with control ids or spelled from text that was itself damaged; or ids drawn at random. What must
hold: nothing is raised, every token is counted once, and whatever came out as a call without an error has a name and
arguments that a tool takes or refuses.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from data.test_formats import FAMILIES, FORMATS, MARKS, controls, renderer_of, spelled
from data.vocabularies import o200k
from etude.agent.tool import ToolError, checked
from etude.agent.tools import TOOLS
from etude.data.render import NanoRenderer
from etude.frames import encode
from etude.types import ToolCall

CHUNK = 2000
LONGEST = 4000
DAMAGE = ['"', "{", "}", "[" * 400, "\\", "\\ud800", "1e999", "9" * 30, "-", "\x00", "NaN", "null", ",", ":", "\n",
          "</function>", "<function=grep>", "<parameter=path>", "é", "\U0001f600", '{"name": 5}', "functions.grep:0",
          *MARKS]  # fmt: skip
_ARGUMENTS: list[dict[str, object]] = [
    {"path": "a.py"},
    {"path": "a.py", "old": "x\n", "new": "<|im_end|>", "line": 3},
    {"path": "b", "edits": [{"old": "1", "new": "2"}]},
    {},
]


class Fuzz:
    """Outputs of one format, from one seed."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.random = name, random.Random(f"{name}/{seed}")
        self.renderer = renderer_of(name)
        self._controls = sorted(controls(name))
        self._names = ["read_file"] if name == "nano" else ["read_file", "edit_file", "grep", "no_tool"]
        self._arguments = _ARGUMENTS[:1] if name == "nano" else _ARGUMENTS
        self._most = 1 if name in ("nano", "llama-3") else 3
        self.real = [self._reply() for _ in range(20)]

    def _reply(self) -> list[int]:
        draw = self.random
        calls = [
            ToolCall(name=draw.choice(self._names), arguments=draw.choice(self._arguments))
            for _ in range(draw.randint(0, self._most))
        ]
        return spelled(self.name, draw.choice(["", "so\n", "All is done."]), calls)

    def output(self) -> list[int]:
        ids = list(self.random.choice(self.real))
        for _ in range(self.random.randint(1, 4)):
            ids = self.random.choice(MUTATIONS)(self, ids)
        return ids[:LONGEST]

    def place(self, ids: Sequence[int]) -> int:
        return self.random.randint(0, len(ids))

    def control(self) -> int:
        return self.random.choice(self._controls[-60:])


def _cut(fuzz: Fuzz, ids: list[int]) -> list[int]:
    return ids[: fuzz.place(ids)]


def _lose(fuzz: Fuzz, ids: list[int]) -> list[int]:
    start, end = sorted((fuzz.place(ids), fuzz.place(ids)))
    return ids[:start] + ids[end:]


def _double(fuzz: Fuzz, ids: list[int]) -> list[int]:
    start, end = sorted((fuzz.place(ids), fuzz.place(ids)))
    return ids[:end] + ids[start:end] * fuzz.random.randint(1, 3) + ids[end:]


def _nest(fuzz: Fuzz, ids: list[int]) -> list[int]:
    at, other = fuzz.place(ids), fuzz.random.choice(fuzz.real)
    return ids[:at] + other[: fuzz.place(other)] + ids[at:]


def _sprinkle(fuzz: Fuzz, ids: list[int]) -> list[int]:
    for _ in range(fuzz.random.randint(1, 6)):
        ids.insert(fuzz.place(ids), fuzz.control())
    return ids


def _turn(fuzz: Fuzz, ids: list[int]) -> list[int]:
    return [fuzz.random.randint(0, 1500) if fuzz.random.random() < 0.1 else number for number in ids]


def _anything(fuzz: Fuzz, ids: list[int]) -> list[int]:
    return [fuzz.control() if fuzz.random.random() < 0.3 else fuzz.random.randint(0, 1500) for _ in range(30)]


def _damage(fuzz: Fuzz, ids: list[int]) -> list[int]:
    """Its text, damaged and tokenized anew: text that only looks like a call's frame, and frames around broken text."""
    at = fuzz.place(ids)
    return ids[:at] + text_ids(fuzz, fuzz.random.choice(DAMAGE)) + ids[at:]


def text_ids(fuzz: Fuzz, text: str) -> list[int]:
    if isinstance(fuzz.renderer, NanoRenderer):
        return list(text.encode("utf-8"))  # its first ids are bytes
    return [int(number) for number in fuzz.renderer._tokenizer.encode(text)]  # type: ignore[attr-defined]


MUTATIONS: list[Callable[[Fuzz, list[int]], list[int]]] = [
    _cut, _lose, _double, _nest, _sprinkle, _turn, _anything, _damage, _damage
]  # fmt: skip


def look(fuzz: Fuzz, ids: list[int]) -> tuple[int, str | None]:
    """(calls without an error, what does not hold of this output)"""
    try:
        parsed = fuzz.renderer.parse(ids)
        if parsed.thinking_tokens + parsed.call_tokens + parsed.message_tokens != len(ids):
            return 0, "tokens are not counted once each"
        encode(parsed.calls)  # as an episode keeps them
        parsed.text.encode()
        good = [call for call in parsed.calls if call.error is None]
        for call in good:
            if call.name in TOOLS:
                _check(call)
    except Exception as error:  # which is what is looked for
        return 0, f"{type(error).__name__}: {error}"
    return len(good), None


def _check(call: ToolCall) -> None:
    for strict in (True, False):
        try:
            checked(TOOLS[call.name], call.arguments, strict=strict)
        except ToolError as error:
            str(error).encode()


def fuzz_some(job: tuple[str, int, int]) -> tuple[str, int, int, str | None]:
    """(format, outputs, calls without an error among them, the first that broke anything)."""
    name, seed, count = job
    fuzz, calls = Fuzz(name, seed), 0
    for number in range(count):
        ids = fuzz.output()
        good, what = look(fuzz, ids)
        if what is not None:
            return name, number, calls, f"{what}\n    {ids}"
        calls += good
    return name, count, calls, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="outputs of each format")
    known = [name for name in FORMATS if name != "gpt-oss" or o200k() is not None]
    parser.add_argument("--formats", nargs="+", choices=known, default=known)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    chosen = parser.parse_args()
    jobs = [
        (name, seed, min(CHUNK, chosen.count - seed * CHUNK))
        for name in chosen.formats
        for seed in range(-(-chosen.count // CHUNK))
    ]
    started, done, calls, failures = time.monotonic(), dict.fromkeys(chosen.formats, 0), dict.fromkeys(FORMATS, 0), []
    with multiprocessing.Pool(chosen.processes) as pool:
        for name, count, good, failure in pool.imap_unordered(fuzz_some, jobs):
            done[name] += count
            calls[name] += good
            failures += [f"{name}: {failure}"] if failure else []
            print(f"\r{sum(done.values()):,} of {chosen.count * len(done):,}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for name, count in done.items():
        vocabulary = FAMILIES.get(name, name)
        print(f"{name:<12} {vocabulary:<12} {count:>8,} outputs {calls[name]:>8,} calls without an error")
    print(f"{time.monotonic() - started:.0f} s; broken: {len(failures)}")
    print("\n".join(failures[:5]))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
