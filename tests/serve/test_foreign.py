"""Foreign coding agents, unmodified, each repairs a folder with the server as its model; exact ids come out of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serve.foreign import BROKEN, FIXED, PROGRAMS, Program, repair
from serve.speaking import check_exact, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_foreign_agent_repairs_a_folder_and_its_ids_are_exact(program: Program, tmp_path: Path) -> None:
    if not program.path.exists():
        pytest.skip(f"{program.name} is not installed: sh tests/serve/install-foreign")
    folder, home = tmp_path / "repository", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    (folder / "clamp.py").write_text(BROKEN)

    async def run() -> None:
        async with serving(repair, names=("*",)) as site:
            done = await asyncio.to_thread(program.run, folder, home, site.url, 600)
            words = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            assert (folder / "clamp.py").read_text() == FIXED, words
            assert done.returncode == 0, words
            turns = site.recorder.turns
            assert turns
            check_exact(turns, site.engine, site.engine.answers)
            told = sum(int(turn.tokens.sampled.sum()) for turn in turns if turn.tokens)
            assert told == sum(map(len, site.engine.answers.values()))
            opened = [turn.opened.value if turn.opened else "goes on" for turn in turns]
            print(f"{program.name}: {len(turns)} turns in {len({t.session_id for t in turns})} sessions: {opened}")

    asyncio.run(run())
