"""A server process to be killed: scripted engine, turns through the real journal into a database. Says its address.

python tests/serve/killed_server.py DATABASE_URL JOURNAL
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from etude.sessions.opening import open_recorder
from etude.sessions.recipe import SessionsRecipe
from serve.speaking import QwenChat, calls, says, serving


async def main() -> None:
    script = [calls("shell", "I look.", command="ls"), says("one two three four five six seven"), says("ok")] * 10_000
    recipe = SessionsRecipe(db=sys.argv[1], journal=sys.argv[2])
    async with (
        open_recorder(recipe, QwenChat().renderer(()).spell) as recorder,
        serving(script, recorder=recorder, consent="train") as site,
    ):
        print(site.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
