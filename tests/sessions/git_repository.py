"""A real git repository for tests, with commits at chosen times."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


class Git:
    """Commits files at given times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.run("init", "-q", "-b", "main")

    def run(self, *arguments: str, at: float = 0.0) -> str:
        stamp = f"@{int(at)} +0000"
        names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.com", "GIT_COMMITTER_NAME": "a",
                 "GIT_COMMITTER_EMAIL": "a@example.com", "GIT_AUTHOR_DATE": stamp,
                 "GIT_COMMITTER_DATE": stamp}  # fmt: skip
        done = subprocess.run(["git", *arguments], cwd=self.folder, env={**os.environ, **names}, capture_output=True,
                              text=True, check=True)  # fmt: skip
        return done.stdout.strip()

    def commit(self, files: Mapping[str, str | None], at: float) -> str:
        """Write (None: delete) and commit; the commit's name."""
        for path, text in files.items():
            target = self.folder / path
            if text is None:
                target.unlink()
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        self.run("add", "-A")
        self.run("commit", "-q", "--allow-empty", "-m", "x", at=at)
        return self.run("rev-parse", "HEAD")
