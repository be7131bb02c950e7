"""IO checks: evaluate calls in a sandbox, compare their values on the host.

    checks --calls--> sandbox: iorunner --canonical texts over a pipe--> host: compare with `expected`

Shared by the run_tests tool (visible checks), by grading (all of them) and by checking task files. Expected values
never enter the sandbox, so nothing that runs there can forge a pass other than by giving the right value.

What it does not do: choose the sandbox. Grading takes a fresh one; see rewards.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Sequence
from importlib.resources import files

import msgspec

from etude.protocols import ExecResult, Sandbox
from etude.types import IOCheck, IOChecks, Noun

CALL_CPU_S = 0.25
"""CPU seconds one call may use, loading the module included; the tasks' own calls need less than a fifth of it."""
CALL_WALL_S = 5.0
"""Wall seconds after which a call counts as `timeout` whatever it is doing (sleeping, waiting for input)."""

_TIMERS = (-signal.SIGPROF, -signal.SIGALRM)


class CheckOutcome(Noun, frozen=True):
    """What one check gave. `got` is a canonical text, `raises TypeName`, `timeout`, `died` or `too long`.

    >>> CheckOutcome(call="clamp(7, 0, 5)", expected="5", got="7", passed=False)
    """

    call: str
    expected: str
    got: str
    passed: bool


@functools.cache
def runner_source() -> str:
    """The program that `run_python` is given."""
    return files("etude.sandbox").joinpath("iorunner.py").read_text(encoding="utf-8")


async def run_iochecks(
    sandbox: Sandbox, spec: IOChecks, checks: Sequence[IOCheck], timeout_s: float
) -> tuple[CheckOutcome, ...]:
    """One outcome a check, in order. `timeout_s` bounds all of them together.

    A module that is missing or does not compile fails every check with `raises FileNotFoundError` or the like. After a
    `timeout` no further call is made: the rest are `timeout`, as are those that the deadline left undone. Errors:
    SandboxError, if the sandbox itself breaks.
    """
    if not checks:
        return ()
    texts: list[str] = []
    deadline = time.monotonic() + timeout_s
    while len(texts) < len(checks):
        left_s = deadline - time.monotonic()
        new = await _ask(sandbox, spec.path, checks, len(texts), left_s) if left_s > 0 else ["timeout"]
        texts += new
        if new[-1] == "timeout":  # the others would most likely spend their time in the same loop
            texts += ["timeout"] * (len(checks) - len(texts))
    return tuple(
        CheckOutcome(call=check.call, expected=check.expected, got=text, passed=text == check.expected)
        for check, text in zip(checks, texts, strict=True)
    )


async def _ask(sandbox: Sandbox, path: str, checks: Sequence[IOCheck], first: int, timeout_s: float) -> list[str]:
    """Texts from check `first` on, up to and including the first that does not come back; at least one."""
    calls = [check.call for check in checks]
    wall_s = round(max(0.05, min(CALL_WALL_S, timeout_s / 2)), 1)  # equal requests are answered from one run (memo.py)
    request = {"path": path, "calls": calls, "first": first, "cpu_s": CALL_CPU_S, "wall_s": wall_s}
    done = await sandbox.run_python(runner_source(), stdin=msgspec.json.encode(request), timeout_s=timeout_s)
    texts = read_values(done, first, len(checks))
    if len(texts) < len(checks) - first:
        texts.append("timeout" if done.timed_out or done.exit_code in _TIMERS else "died")
    return texts


def read_values(done: ExecResult, first: int, count: int) -> list[str]:
    """The texts that came back, from call `first` on to the last in an unbroken row. Malformed lines do not count."""
    texts: dict[int, str] = {}
    for line in done.result.splitlines():
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            index, text = msgspec.json.decode(line, type=tuple[int, str])
            texts.setdefault(index, text)
    end = next(index for index in range(first, count + 1) if index == count or index not in texts)
    return [texts[index] for index in range(first, end)]
