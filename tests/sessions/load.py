"""Records turns as fast as it can and says which ones were acknowledged: the victim of test_kill.py.

python load.py URL JOURNAL FIRST WRITERS      prints one id a line, after `record` has returned
"""

import asyncio
import itertools
import os
import sys
from pathlib import Path

import numpy as np

from etude.sessions.recorder import JournalRecorder
from etude.sessions.store import SessionStore
from sessions import made


async def main(url: str, journal: str, first: int, writers: int) -> None:
    recorder = JournalRecorder(SessionStore(url), Path(journal), decode=_text, retry_s=(0.02, 0.2))
    await recorder.start()
    numbers = itertools.count(first)

    async def write(name: int) -> None:
        while True:
            number = next(numbers)
            turn_id, session_id = f"load-{number}", f"session-{name}"
            turn = made.turn("x" * (number % 5000), turn_id=turn_id, session_id=session_id, tokens=made.tokens())
            await recorder.record(turn)
            os.write(1, f"{turn_id}\n".encode())  # one write: a kill cannot leave half a line of another's
            if number % 10 == 0 and await recorder.note(
                made.owner(), made.event(event_id=f"event-{number}", session_id=session_id)
            ):
                os.write(1, f"event-{number}\n".encode())

    await asyncio.gather(*map(write, range(writers)))


def _text(ids: np.ndarray) -> str:
    return " ".join(map(str, ids))


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
