"""The tasks of benchmarks/harness.py: twenty repositories with a planted fault each, and what the scripted agent does.

A repository is an installed package of pure Python, all of its files, and a tests.py. The fault is one changed line of
one file. Eight replies a task: list, look, search, run the tests (they fail), edit, look, run the tests (they pass),
end. `commands` are the first seven as shell commands; `calls` says the same in each harness's own tools.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent ends: the one command that the others do not run."""
TURNS = 8
RUN_TESTS = "python3 -m unittest -q tests"
_HEAD = "import unittest\n\n\nclass Tests(unittest.TestCase):\n    def test_it(self):\n"
_TESTS = {
    "iniconfig": """
        from iniconfig import IniConfig
        ini = IniConfig("x.ini", data="; c\\n[ b ]\\nz = 1\\nA=  2\\n[c]\\nk: v\\n w\\n")
        self.assertEqual({name: dict(ini.sections[name]) for name in ini.sections},
                         {" b ": {"z": "1", "A": "2"}, "c": {"k": "v\\nw"}})
        self.assertEqual(list(ini[" b "]), ["z", "A"])
""",
    "h11": """
        import h11
        from h11._headers import get_comma_header, normalize_and_validate
        from h11._receivebuffer import ReceiveBuffer
        buffer = ReceiveBuffer()
        buffer += b"one\\r\\ntwo\\r\\n\\r\\n"
        self.assertEqual(buffer.maybe_extract_next_line(), b"one\\r\\n")
        self.assertEqual(buffer.maybe_extract_lines(), [b"two"])
        buffer += b"!"
        self.assertFalse(buffer.is_next_line_obviously_invalid_request_line())
        headers = normalize_and_validate([("Transfer-Encoding", "Chunked"), ("Connection", "a,, b")])
        self.assertEqual(list(headers)[0], (b"transfer-encoding", b"chunked"))
        self.assertEqual(get_comma_header(headers, b"connection"), [b"a", b"b"])
        with self.assertRaises(h11.LocalProtocolError):
            normalize_and_validate([("Content-Length", "1, 2")])
""",
    "pluggy": """
        from pluggy._tracing import TagTracer
        tracer, lines, seen = TagTracer(), [], []
        tracer.setwriter(lines.append)
        tracer.setprocessor("a:b", lambda tags, args: seen.append(args))
        tracer.indent = 1
        tracer.get("a").get("b")("hello", {"k": "x y", "m": "1\\n2"})
        self.assertEqual("".join(lines),
                         "  hello [a:b]\\n      k: 'x y'\\n      m:\\n        1\\n        2\\n")
        self.assertEqual(len(seen), 1)
""",
    "sortedcontainers": """
        from sortedcontainers import SortedDict, SortedSet
        pairs = SortedDict(b=2, a=1)
        self.assertEqual(pairs.peekitem(0), ("a", 1))
        self.assertEqual((pairs.setdefault("c", 3), pairs["c"]), (3, 3))
        values = SortedSet([30, 1, 100])
        self.assertEqual(list(iter(values)), [1, 30, 100])
        self.assertTrue(values <= SortedSet(values))
        backwards = SortedSet([1, 2], key=lambda value: -value)
        self.assertEqual(backwards[0], 2)
""",
}
_FAULTS = (
    # package, file, line, the part of it that is changed, to what
    ("iniconfig", "_parse.py", 'COMMENTCHARS = "#;"', ";", ""),
    ("iniconfig", "_parse.py", "            section_name = line[1:-1]", "1:-1", "1:"),
    ("iniconfig", "_parse.py", "        key_name = name.strip()", ".strip()", ""),
    ("iniconfig", "_parse.py", "        value = value.strip()", "strip", "rstrip"),
    ("iniconfig", "__init__.py", "        yield from sorted(section, key=lineof)", ", key=lineof", ""),
    ("h11", "_receivebuffer.py", "        idx = partial_idx + 2", "2", "1"),
    ("h11", "_receivebuffer.py", "        del lines[-2:]", "-2", "-1"),
    ("h11", "_headers.py", "            if len(lengths) != 1:", "!= 1", "> 2"),
    ("h11", "_headers.py", "            value = value.lower()", ".lower()", ""),
    ("h11", "_headers.py", "                if found_split_value:", "if", "if not"),
    ("pluggy", "_tracing.py", '        indent = "  " * self.indent', '"  "', '" "'),
    ("pluggy", "_tracing.py", "        if len(obj.splitlines()) > 1:", "> 1", "> 2"),
    ("pluggy", "_tracing.py", "            if body in ([], [rendered]):", "[], ", ""),
    ("pluggy", "_tracing.py", '            tags = tuple(tags.split(":"))', ":", ","),
    ("pluggy", "_tracing.py", "            args = args[:-1]", ":-1", "1:"),
    ("sortedcontainers", "sorteddict.py", "        key = self._list[index]", "index", "-1"),
    ("sortedcontainers", "sorteddict.py", "        dict.__setitem__(self, key, default)", "default", "None"),
    ("sortedcontainers", "sortedset.py", "        self._list = SortedList(self._set, key=key)", "key=key", "key=None"),
    ("sortedcontainers", "sortedset.py", "    __le__ = __make_cmp(le, '<=', 'a subset of')", "(le", "(lt"),
    ("sortedcontainers", "sortedset.py", "        return iter(self._list)", "_list", "_set"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A task. `mark` is in its prompt: by it the model's server knows which one it is."""

    mark: str
    workspace: Mapping[str, str]
    path: str
    """The file with the fault."""
    line: int
    right: str
    wrong: str

    @property
    def prompt(self) -> str:
        return f"[{self.mark}] The tests fail: {RUN_TESTS}. Find the fault in the package and repair it."

    @property
    def word(self) -> str:
        """What the agent searches for: the longest word of the line."""
        words = "".join(letter if letter.isalnum() or letter == "_" else " " for letter in self.right).split()
        return max(words, key=len)

    def repaired(self) -> str:
        """The text that the file must have in the end."""
        return self.workspace[self.path].replace(f"{self.wrong}\n", f"{self.right}\n")

    def commands(self) -> list[str]:
        """The actions as shell commands."""
        look = f"cat -n {self.path} | sed -n '{max(1, self.line - 20)},{self.line + 20}p'"
        edit = f"sed -i {shlex.quote(f'{self.line}c' + chr(92) + self.right)} {self.path}"
        again = f"cat -n {self.path} | sed -n '{max(1, self.line - 2)},{self.line + 2}p'"
        search = f"grep -rn --include='*.py' {shlex.quote(self.word)} ."
        return ["find . -name '*.py' | sort", look, search, RUN_TESTS, edit, again, RUN_TESTS]

    def tool_calls(self) -> list[tuple[str, dict[str, Any]]]:
        """The actions in Etude's file tools; the tests are a command in both."""
        look = {"path": self.path, "start": max(1, self.line - 20), "end": self.line + 20}
        again = {"path": self.path, "start": max(1, self.line - 2), "end": self.line + 2}
        run = ("shell", {"command": RUN_TESTS})
        edit = {"path": self.path, "old": f"{self.wrong}\n", "new": f"{self.right}\n"}
        return [("glob", {"pattern": "*.py"}), ("read_file", look), ("grep", {"pattern": self.word, "glob": "*.py"}),
                run, ("edit_file", edit), ("read_file", again), run]  # fmt: skip


def repositories(count: int = len(_FAULTS)) -> list[Repository]:
    """Errors: SystemExit if a package is missing or not the one that the faults were made for."""
    found = []
    for number, (package, name, right, part, other) in enumerate(_FAULTS[:count]):
        files = _files(package)
        path = f"{package}/{name}"
        lines = files.get(path, "").splitlines()
        wrong = right.replace(part, other, 1)
        if lines.count(right) != 1 or wrong in lines:
            raise SystemExit(f"{path} has changed: its line {right!r} is not there just once")
        line = lines.index(right) + 1
        workspace = {
            **files,
            path: files[path].replace(f"{right}\n", f"{wrong}\n"),
            "tests.py": _HEAD + _TESTS[package],
        }
        found.append(Repository(mark=f"task-{number:02}", workspace=workspace, path=path, line=line,
                                right=right, wrong=wrong))  # fmt: skip
    return found


def _files(package: str) -> dict[str, str]:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed")
    folder = Path(spec.origin).parent
    return {f"{package}/{path.relative_to(folder)}": path.read_text() for path in sorted(folder.rglob("*.py"))}


def replies(task: Repository, tools: frozenset[str]) -> list[dict[str, Any]]:
    """The model's messages for a harness that offers `tools`: as chat completions have them."""
    if "bash" in tools:
        calls = [("bash", {"command": command}) for command in task.commands()]
        if tools == {"bash"}:
            calls.append(("bash", {"command": END}))
    elif "read_file" in tools:
        calls = [*task.tool_calls(), ("finish", {"message": "repaired"})]
    else:
        calls = [("shell", {"command": command}) for command in task.commands()]
        calls.append(("finish", {"message": "repaired"}))
    found: list[dict[str, Any]] = [
        {"role": "assistant", "content": "I go on.", "tool_calls": [
            {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}]}
        for number, (name, given) in enumerate(calls)
    ]  # fmt: skip
    return found if len(found) == TURNS else [*found, {"role": "assistant", "content": "It is repaired."}]
