"""A server process to be killed: scripted engine, turns in a journal. Says its address.

python tests/serve/killed_server.py JOURNAL
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from serve.journal import Journal
from serve.speaking import calls, says, serving


async def main() -> None:
    script = [calls("shell", "I look.", command="ls"), says("one two three four five six seven"), says("ok")] * 10_000
    async with serving(script, recorder=Journal(Path(sys.argv[1])), consent="train") as site:
        print(site.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
