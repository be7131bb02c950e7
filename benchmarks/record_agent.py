"""Records `etude agent` at work on a real package, in a real terminal, as a picture for the README.

    python benchmarks/record_agent.py docs/agent.svg

The package is `iniconfig` as pip installs it (a development dependency), copied and put under git. The model is a
script, spoken over HTTP as by any OpenAI-compatible server; tools, sandbox, diffs and questions are what they always
are. What the person types is typed into the terminal.
"""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from agent.chat_server import calls, chat_server, says  # noqa: E402

COLUMNS, ROWS = 104, 60
PROMPT = "Give SectionWrapper a repr that shows its name and keys."
OLD = """    def lineof(self, name: str) -> int | None:
        return self.config.lineof(self.name, name)
"""
NEW = (
    OLD
    + """
    def __repr__(self) -> str:
        return f"<SectionWrapper {self.name!r}: {', '.join(self)}>"
"""
)
CHECK = """python3 -c "
from iniconfig import IniConfig
print(IniConfig('x.ini', data='[tool]\\na=1\\nb=2\\n')['tool'])"
"""
SCRIPT = [
    calls(("grep", {"pattern": "class SectionWrapper"}), ("glob", {"pattern": "*.py"}), text="I look for the class."),
    calls(("read_file", {"path": "iniconfig/__init__.py", "start": 24, "end": 36})),
    calls(("edit_file", {"path": "iniconfig/__init__.py", "old": OLD, "new": NEW}), ("shell", {"command": CHECK})),
    says("SectionWrapper now shows its name and keys, ", "as the last command printed."),
]
TYPED = ["", "yes"]


def repository(folder: Path) -> Path:
    spec = find_spec("iniconfig")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / "iniconfig", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "-q", folder], check=True)
    return folder


async def _serve(url: list[str], stop: threading.Event) -> None:
    async with chat_server(SCRIPT) as server:
        url.append(server.url)
        while not stop.is_set():
            await asyncio.sleep(0.02)


def record(repo: Path, url: str) -> str:
    """What the terminal showed."""
    main, other = pty.openpty()
    environment = dict(os.environ) | {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color",
                                      "XDG_STATE_HOME": str(repo.parent / "state")}  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "etude.cli.main",
        "agent",
        PROMPT,
        "--repo",
        ".",
        "--url",
        url,
        "--model",
        "script",
    ]
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, cwd=repo, env=environment)
    os.close(other)
    shown, typed, deadline = b"", list(TYPED), time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([main], [], [], 0.1)[0]:
            try:
                shown += os.read(main, 1 << 16)
            except OSError:
                break
        elif typed and re.search(rb"(end\)|\[yes/no\]) (\x1b\[0m)?$", shown):
            os.write(main, typed.pop(0).encode() + b"\n")
            time.sleep(0.2)
    while select.select([main], [], [], 0.2)[0]:
        try:
            shown += os.read(main, 1 << 16)
        except OSError:  # the terminal's other end is closed
            break
    if process.wait(10):
        raise SystemExit(f"etude agent failed:\n{shown.decode(errors='replace')}")
    return shown.decode(errors="replace").replace("\r\n", "\n")


def picture(shown: str, path: Path) -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(f'[bold]$[/] etude agent "{PROMPT}" --repo .')
        console.print(Text.from_ansi(shown))
        svg = console.export_svg(title="etude agent")
    svg = re.sub(r"@font-face \{.*?\}\n?", "", svg, flags=re.DOTALL)  # nothing is fetched from elsewhere
    path.write_text(svg, encoding="utf-8")


def main() -> None:
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".svg"):
        raise SystemExit(__doc__)
    url: list[str] = []
    stop = threading.Event()
    server = threading.Thread(target=lambda: asyncio.run(_serve(url, stop)))
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        while not url:
            time.sleep(0.01)
        repo = Path(folder) / "iniconfig-repository"
        repo.mkdir()
        try:
            shown = record(repository(repo), url[0])
        finally:
            stop.set()
            server.join()
        assert "def __repr__" in (repo / "iniconfig/__init__.py").read_text()
    picture(shown, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
