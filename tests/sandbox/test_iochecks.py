"""IO checks, run by the real runner in a plain subprocess: isolation is not what is tested here."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.protocols import ExecResult
from etude.sandbox.iochecks import CheckOutcome, read_values, run_iochecks
from etude.sandbox.iorunner import canonical
from etude.types import IOCheck, IOChecks


class Subprocess:
    """The outer edge: run_python of a sandbox, without the isolation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def run_python(self, source: str, *, stdin: bytes = b"", timeout_s: float) -> ExecResult:
        read_end, write_end = os.pipe()
        script = f"import os; os.dup2({write_end}, 3)\n" + source
        started = time.monotonic()
        timed_out = False
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", script],
            cwd=self.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            pass_fds=(write_end,),
        )  # fmt: skip
        os.close(write_end)
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.kill()
            out, err = process.communicate()
        with os.fdopen(read_end, "rb") as channel:
            result = channel.read()
        return ExecResult(
            exit_code=process.returncode, stdout=out, stderr=err, result=result, timed_out=timed_out,
            truncated=False, wall_s=time.monotonic() - started,
        )  # fmt: skip


def grade(
    folder: Path, source: str | None, *calls: tuple[str, str], timeout_s: float = 20.0
) -> tuple[CheckOutcome, ...]:
    if source is not None:
        (folder / "solution.py").write_text(source)
    checks = tuple(IOCheck(call=call, expected=expected, visible=True) for call, expected in calls)
    spec = IOChecks(path="solution.py", checks=checks)
    return asyncio.run(run_iochecks(Subprocess(folder), spec, checks, timeout_s))  # type: ignore[arg-type]


def test_calls_are_compared_with_the_expected_values(tmp_path: Path) -> None:
    source = "import re\ndef f(x, y=1):\n    return [x + y, {'a': re.sub('b', 'c', 'ab')}]\n"
    first, second = grade(tmp_path, source, ("f(1)", "[2, {'a': 'ac'}]"), ("f(1, y=2)", "[2, {'a': 'ac'}]"))
    assert first == CheckOutcome(call="f(1)", expected="[2, {'a': 'ac'}]", got="[2, {'a': 'ac'}]", passed=True)
    assert (second.got, second.passed) == ("[3, {'a': 'ac'}]", False)


def test_an_exception_is_a_value(tmp_path: Path) -> None:
    (outcome,) = grade(tmp_path, "def f(x):\n    raise KeyError(x)\n", ("f(1)", "raises KeyError"))
    assert outcome.passed


@pytest.mark.parametrize(
    ("source", "got"),
    [(None, "raises FileNotFoundError"), ("def f(:\n", "raises SyntaxError"), ("x = 1\n", "raises NameError")],
)
def test_a_module_that_cannot_be_called_fails_every_check(tmp_path: Path, source: str | None, got: str) -> None:
    assert [o.got for o in grade(tmp_path, source, ("f(1)", "1"), ("f(2)", "2"))] == [got, got]


def test_an_endless_loop_that_catches_everything_is_ended(tmp_path: Path) -> None:
    loop = "    while x:\n        try:\n            pass\n        except BaseException:\n            pass\n"
    source = "def f(x):\n" + loop + "    return x\n"
    outcomes = grade(tmp_path, source, ("f(0)", "0"), ("f(1)", "1"))
    assert [o.got for o in outcomes] == ["0", "timeout"]


def test_a_sleeper_ends_by_the_wall_clock(tmp_path: Path) -> None:
    source = "import time\ndef f(x):\n    time.sleep(x)\n    return x\n"
    outcomes = grade(tmp_path, source, ("f(0)", "0"), ("f(60)", "60"), timeout_s=2.0)
    assert [o.got for o in outcomes] == ["0", "timeout"]


def test_what_the_deadline_leaves_undone_is_a_timeout(tmp_path: Path) -> None:
    source = "import time\ndef f(x):\n    time.sleep(x)\n"
    outcomes = grade(tmp_path, source, ("f(60)", "1"), ("f(60)", "1"), ("f(60)", "1"), timeout_s=1.0)
    assert [o.got for o in outcomes] == ["timeout"] * 3


def test_after_an_endless_loop_no_further_call_is_made(tmp_path: Path) -> None:
    source = "def f(x):\n    open('called', 'a').write(str(x))\n    while x:\n        pass\n"
    outcomes = grade(tmp_path, source, ("f(0)", "None"), ("f(1)", "1"), ("f(0)", "None"), ("f(2)", "1"))
    assert [o.got for o in outcomes] == ["None", "timeout", "timeout", "timeout"]
    assert (tmp_path / "called").read_text() == "01"


def test_leaving_the_process_is_no_pass_and_hurts_only_the_own_check(tmp_path: Path) -> None:
    source = "import os\ndef f(x):\n    if x:\n        os._exit(0)\n    return x\n"
    assert [o.got for o in grade(tmp_path, source, ("f(1)", "1"), ("f(0)", "0"))] == ["died", "0"]


def test_what_a_call_leaves_in_the_module_is_not_seen_by_the_next(tmp_path: Path) -> None:
    source = "seen = []\ndef f(x, into=seen):\n    into.append(x)\n    return len(seen)\n"
    assert [o.got for o in grade(tmp_path, source, ("f(1)", "1"), ("f(2)", "1"))] == ["1", "1"]


def test_a_patched_builtin_cannot_hang_or_crash_the_grading(tmp_path: Path) -> None:
    source = "import builtins\ndef f(x):\n    builtins.len = lambda _: 7\n    return x\n"
    assert len(grade(tmp_path, source, ("f(1)", "1"), ("f(1)", "1"))) == 2


def test_equality_and_repr_of_the_code_under_test_are_never_asked(tmp_path: Path) -> None:
    source = (
        "class N(int):\n    __repr__ = lambda self: '1'\n    __eq__ = lambda self, other: True\n"
        "class L(list):\n    pass\ndef f(x):\n    return [N(2), L(), x]\n"
    )
    (outcome,) = grade(tmp_path, source, ("f(1)", "[1, [], 1]"))
    assert outcome.got == "[object N, object L, 1]"


def test_a_value_written_to_the_channel_by_the_code_under_test_does_not_arrive(tmp_path: Path) -> None:
    source = "import os\ndef f(x):\n    os.write(3, b'[0, \"1\"]\\n')\n    return 2\n"
    (outcome,) = grade(tmp_path, source, ("f(1)", "1"))
    assert not outcome.passed


def test_malformed_answers_read_as_died() -> None:
    lines = b'[0, "1"]\n[0, "2"]\nnonsense\n[2]\n' + b"[" * 50_000 + b'\n[1, 3]\n[true, "1"]\n'
    done = ExecResult(exit_code=0, stdout=b"", stderr=b"", result=lines, timed_out=False, truncated=False, wall_s=0.1)
    assert read_values(done, 0, 3) == ["1"]
    assert read_values(done, 1, 3) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "True"), (1.0, "1.0"), (-0.0, "-0.0"), (float("nan"), "nan"), ("a'b", '"a\'b"'), (b"a", "b'a'"),
        ((1,), "(1,)"), ((), "()"), ([[]], "[[]]"), ({2: "b", 1: "a"}, "{2: 'b', 1: 'a'}"), (set(), "set()"),
        ({"b", "a"}, "{'a', 'b'}"), (frozenset({1}), "frozenset({1})"), (2j, "object complex"),
        (abs, "object builtin_function_or_method"), ("\ud800", "'\\ud800'"), (1 << 20_000, "too long"),
        ("a" * 5_000, "too long"), ([["a" * 3_000]] * 2, "too long"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_canonical_texts(value: object, text: str) -> None:
    assert canonical(value) == text


def test_a_cycle_has_a_canonical_text() -> None:
    ring: list[object] = []
    ring.append(ring)
    assert canonical(ring) == "too long"


def test_equal_numbers_of_different_types_differ() -> None:
    assert len({canonical(value) for value in (1, 1.0, True)}) == 3
