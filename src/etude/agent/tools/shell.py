"""A shell whose folder, variables and functions live on from call to call."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from etude.agent.tool import Tool, ToolError
from etude.protocols import ExecResult
from etude.types import ToolErrorKind

LINE_FEED = "\n"
JOBS = "/tmp/.shell"
"""Inside the sandbox: what background jobs leave."""
_OWN = rb"BASH|EUID|PPID|SHELLOPTS|UID|_|FUNCNAME|PIPESTATUS"
"""Variables that a shell sets for itself."""
_NOT_KEPT = re.compile(rb"declare -[a-zA-Z]*r|declare -[-a-zA-Z]+ (" + _OWN + rb")")
_OPTIONS = re.compile(rb'declare -[-r]+ (__options|BASHOPTS)="(.*)"')
_DECLARED, _WHOLE = b"\n#declared\n", b"\n#whole\n"
_RUN = """
exec 2>&1 {__left}>&3 3>&-
__options=$BASHOPTS
cd /workspace
. /dev/stdin 2>/dev/null
__save() {
    unset -f __save
    unset -v BASH_EXECUTION_STRING COMP_WORDBREAKS DIRSTACK EPOCHREALTIME EPOCHSECONDS GROUPS HISTCMD LINENO RANDOM \\
        SECONDS SRANDOM BASHPID BASH_ARGV0 BASH_COMMAND BASH_SUBSHELL 2>/dev/null
    {
        declare -p
        printf '\\n#declared\\n'
        declare -f
        alias -p
        printf 'cd %q\\n\\n#whole\\n' "$PWD"
    } >&$__left 2>/dev/null
}
trap __save EXIT
eval "$1"
"""
"""What the last call left comes in on standard input, what this one leaves goes out on the sandbox's result channel:
the shell is the only program that is started for it. It writes line by line, and each wakes the reader: what cannot be
given back is not written, and options are told by bash's own list of them."""
_START = f"""
mkdir -p {JOBS}
. /dev/stdin 2>/dev/null
setsid bash -c '(eval "$1"); echo $? > {JOBS}/job-'$2'.code' job "$1" > {JOBS}/job-$2.out 2>&1 < /dev/null &
echo $! > {JOBS}/job-$2.pid
"""


def _state_of(left: bytes) -> bytes | None:
    """What the next call begins with; None if not all of it is there: the call was killed, or left too much."""
    variables, parted, rest = left.rpartition(_DECLARED)
    if not parted or not rest.endswith(_WHOLE):
        return None
    lines = variables.split(b"\n")
    options = {match[1]: set(match[2].split(b":")) for line in lines if (match := _OPTIONS.fullmatch(line))}
    kept = [line for line in lines if not _NOT_KEPT.match(line) and not _OPTIONS.fullmatch(line)]
    before, now = (options.get(name, set()) for name in (b"__options", b"BASHOPTS"))
    kept += [b"shopt %s %s" % (flag, option) for flag, names in ((b"-s", now - before), (b"-u", before - now))
             for option in sorted(names)]  # fmt: skip
    return b"\n".join(kept) + b"\n" + rest


class Shell(Tool):
    """Run a command in a shell. The current folder, variables and functions live on in later calls. In the background
    it goes on after the call: shell_output shows what it wrote, shell_kill ends it."""

    name = "shell"
    cuts_middle = True

    async def run(
        self,
        command: str,
        timeout_s: Annotated[float, Meta(gt=0, description="seconds until it is killed")] | None = None,
        background: bool = False,
    ) -> str:
        limit = min(timeout_s or self.desk.timeout_s, self.desk.timeout_s)
        if background:
            self.desk.jobs += 1
            argv = ["bash", "-c", _START, "bash", command, str(self.desk.jobs)]
            await self.desk.sandbox.exec(argv, stdin=self.desk.shell, timeout_s=limit, leaves=True)
            return f"job {self.desk.jobs} is running"
        argv = ["bash", "-c", _RUN, "bash", command]
        done = await self.desk.sandbox.exec(argv, stdin=self.desk.shell, timeout_s=limit, leaves=True)
        self.desk.shell = _state_of(done.result) or self.desk.shell
        text = done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")
        if done.timed_out:
            shown = self._shown(text)
            raise ToolError(
                ToolErrorKind.TIMEOUT, f"killed after {limit:g} s" + (f"; it wrote:\n{shown}" if text else "")
            )
        if done.truncated:
            text += "\n(more was written than is kept)"
        if done.exit_code == 0:
            return text
        return f"{text}{'' if text.endswith(LINE_FEED) or not text else LINE_FEED}(exit code {done.exit_code})"

    @staticmethod
    def _shown(text: str) -> str:
        return text if len(text) <= 400 else f"{text[:200]}\n...\n{text[-200:]}"


class ShellOutput(Tool):
    """Show what a background job has written so far, and whether it still runs."""

    name = "shell_output"
    cuts_middle = True

    async def run(self, job: int) -> str:
        script = f"cat {JOBS}/job-{job}.out 2>/dev/null; [ -e {JOBS}/job-{job}.code ] && cat {JOBS}/job-{job}.code >&2"
        done = await _of_job(self, job, script)
        code = done.stderr.decode().strip()
        state = f"(ended with exit code {code})" if code else "(running)"
        return f"{done.stdout.decode(errors='replace')}{state}"


class ShellKill(Tool):
    """End a background job."""

    name = "shell_kill"

    async def run(self, job: int) -> str:
        script = f"kill -KILL -- -$(cat {JOBS}/job-{job}.pid) 2>/dev/null; echo killed > {JOBS}/job-{job}.code"
        await _of_job(self, job, script)
        return "ok"


async def _of_job(tool: Tool, job: int, script: str) -> ExecResult:
    if not 1 <= job <= tool.desk.jobs:
        raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, f"no job {job}: {tool.desk.jobs} were started")
    return await tool.desk.sandbox.exec(["bash", "-c", script], timeout_s=tool.desk.timeout_s, leaves=True)
