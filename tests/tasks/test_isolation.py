"""The isolated Python that tasks are built in: what it answers and what it keeps out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.tasks.isolation import Observed, Prober


@pytest.fixture(scope="module")
def prober() -> Iterator[Prober]:
    with Prober(hash_seed=1) as started:
        yield started


def texts(prober: Prober, source: str, *calls: str, lines: int = 2_000, fresh: bool = False) -> list[str]:
    answer = prober.run([source], [calls], lines=lines, fresh=fresh)
    return [seen.text for seen in answer[0]]


def test_values_come_back_with_the_lines_that_were_taken(prober: Prober) -> None:
    source = "def f(x):\n    if x:\n        return 1\n    return 2\n"
    answer = prober.run([source], [["f(0)", "f(1)", "f(0)"]], lines=100)
    zero, one, again = answer[0]
    assert (zero.text, one.text) == ("2", "1")
    assert zero == again
    assert zero.arcs & one.arcs
    assert zero.arcs & ~one.arcs
    assert one.arcs & ~zero.arcs


def test_a_loop_ends_by_the_count_of_its_lines(prober: Prober) -> None:
    source = "def f(x):\n    while x > 0:\n        x -= 1\n    return x\n"
    assert texts(prober, source, "f(10)", "f(100000)", lines=1_000) == ["0", "timeout"]


def test_what_runs_long_in_one_line_ends_too(prober: Prober) -> None:
    source = "import itertools\ndef f():\n    return sum(itertools.count())\n"
    assert texts(prober, source, "f()", "1") == ["died", "died"]


def test_a_call_that_ends_its_process_takes_only_its_source_with_it(prober: Prober) -> None:
    sources = ["def f():\n    return 1\n", "import os\ndef f():\n    os._exit(0)\n", "def f():\n    return 3\n"]
    answer = prober.run(sources, [["f()", "2"]] * 3, lines=100)
    assert [[seen.text for seen in entries] for entries in answer] == [["1", "2"], ["died", "died"], ["3", "2"]]


def test_a_fresh_module_remembers_nothing(prober: Prober) -> None:
    source = "seen = []\ndef f(x, into=seen):\n    into.append(x)\n    return len(seen)\n"
    assert texts(prober, source, "f(1)", "f(2)") == ["1", "2"]
    assert texts(prober, source, "f(1)", "f(2)", fresh=True) == ["1", "1"]


@pytest.mark.parametrize(
    ("value", "wrap"),
    [
        ("iter([1])", "iterator"), ("{}.keys()", "list"), ("range(3)", "list"), ("bytearray(b'a')", "bytes"),
        ("__import__('collections').OrderedDict(a=1)", "dict"), ("__import__('decimal').Decimal(1)", "str"),
        ("__import__('datetime').date(2020, 1, 2)", "str"), ("object()", ""), ("3", ""), ("[1]", ""),
    ],
)  # fmt: skip
def test_values_that_are_nearly_plain_name_their_wrapper(prober: Prober, value: str, wrap: str) -> None:
    answer = prober.run([""], [[value]], lines=100)
    assert answer[0][0].wrap == wrap


def test_a_source_that_does_not_compile_or_run_is_data(prober: Prober) -> None:
    assert texts(prober, "def f(:\n", "f()") == ["raises SyntaxError"]
    assert texts(prober, "1 / 0\n", "f()") == ["raises ZeroDivisionError"]


def test_printing_and_asking_disturb_nothing(prober: Prober) -> None:
    source = "def f():\n    print('[[]]')\n    return input()\n"
    assert texts(prober, source, "f()", "1") == ["raises EOFError", "1"]


def test_the_machine_cannot_be_seen_or_changed(prober: Prober) -> None:
    source = "import os, socket\n"
    found = texts(
        prober, source, "os.listdir('/tmp')", "os.listdir('/home')", "sorted(os.environ)", "open('/etc/x', 'w')",
        "socket.create_connection(('192.0.2.1', 80), 1)", "os.path.exists('/proc/1/root/tmp/x')", "os.cpu_count() > 0",
        lines=100_000,
    )  # fmt: skip
    assert found[0] == "[]"
    assert found[1] == "[]" or Path("/home").is_symlink()
    assert set(eval(found[2])) <= {"LC_ALL", "LC_CTYPE", "PWD", "PYTHONHASHSEED", "PYTHONPATH", "TZ"}
    assert found[3] == "raises OSError"
    assert found[4].startswith("raises ")
    assert found[6] == "True"


def test_hash_seeds_are_those_asked_for() -> None:
    with Prober(hash_seed=1) as one, Prober(hash_seed=1) as same, Prober(hash_seed=2) as other:
        first, second, third = (texts(prober, "", "hash('etude')") for prober in (one, same, other))
    assert first == second != third


def test_a_machine_without_bubblewrap_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    with pytest.raises(SandboxError, match="bubblewrap") as caught:
        Prober(hash_seed=1)
    assert "apt install bubblewrap" in caught.value.hint


def test_an_ended_process_is_an_error_not_an_answer() -> None:
    with Prober(hash_seed=1) as prober:
        prober.run([""], [["1"]], lines=10)
        prober.process.kill()
        prober.process.wait()

        def ask() -> None:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:  # the inner process follows its parent within moments
                prober.run([""], [["1"]], lines=10)
                time.sleep(0.01)

        with pytest.raises(SandboxError, match="ended"):
            ask()


def group_exists(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("delay_ms", range(0, 12, 2))
def test_a_prober_that_is_closed_at_once_leaves_nothing_behind(delay_ms: int) -> None:
    prober = Prober(hash_seed=1)
    time.sleep(delay_ms / 1000)
    prober.close()
    deadline = time.monotonic() + 10
    while group_exists(prober.process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_observation_is_a_value() -> None:
    assert Observed("1", "", 3) == Observed("1", "", 3)
