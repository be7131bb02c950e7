"""What recording costs: turns acknowledged a second and how long one waits, beside the bare sync of the same disk.

    python benchmarks/sessions.py [--json FILE]        about a minute

A turn of 4,000 characters with 500 tokens, from 1, 16 and 256 callers at once; SQLite takes them from the journal.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from etude.protocols import Consent, Message, Owner, Reply, ServedTokens, ServedTurn
from etude.sessions.recorder import JournalRecorder
from etude.sessions.redact import redact
from etude.sessions.store import SessionStore
from etude.types import Effort, Opened, Run, StopReason, Version

SECONDS = 6.0
TEXT = Path(asyncio.__file__).read_text()[:200] + Path(argparse.__file__).read_text()[:3800]


def turn(number: int) -> ServedTurn:
    sampled = np.arange(500) >= 400
    tokens = ServedTokens(
        start=0, ids=np.arange(500, dtype=np.int32), sampled=sampled, logprobs=np.zeros(500, np.float32),
        versions=(Run(start=400, version=Version(incarnation=1, n=1, step=1)),), kv_epochs=(),
    )  # fmt: skip
    reply = Reply(text="done", calls=(), stop=StopReason.END, effort=Effort(turns=1), span=None)
    return ServedTurn(
        turn_id=f"t{number}", session_id=f"s{number % 50}", number=number,
        owner=Owner(tenant="t", user="u", consent=Consent.TRAIN), source="openai", model="m", started_at=time.time(),
        first_token_s=0.1, wall_s=1.0, messages=(Message(role="user", text=TEXT),), reply=reply, opened=Opened.TASK,
        tokens=tokens,
    )  # fmt: skip


async def measure(folder: Path, callers: int) -> dict[str, float]:
    """Acknowledged turns a second, and the wait of one in milliseconds."""
    store = SessionStore(f"sqlite:///{folder / 'sessions.db'}")
    recorder = JournalRecorder(store, folder / "journal", decode=lambda ids: "")
    await recorder.start()
    numbers, waits = itertools.count(), []
    end = time.perf_counter() + SECONDS

    async def call() -> None:
        while time.perf_counter() < end:
            made = turn(next(numbers))
            began = time.perf_counter()
            await recorder.record(made)
            waits.append(time.perf_counter() - began)

    await asyncio.gather(*(call() for _ in range(callers)))
    backlog = recorder.waiting()
    await recorder.close()
    store.close()
    ordered = sorted(waits)
    p50, p99 = (1e3 * ordered[int(len(waits) * share)] for share in (0.5, 0.99))
    return {"callers": callers, "turns_per_s": round(len(waits) / SECONDS), "p50_ms": round(p50, 2),
            "p99_ms": round(p99, 2), "backlog_mb": round(backlog / 1e6, 2)}  # fmt: skip


def bare_sync(folder: Path) -> float:
    """Milliseconds of one write of a turn's size and its sync."""
    times = []
    with (folder / "bare").open("wb") as file:
        for _ in range(300):
            began = time.perf_counter()
            file.write(bytes(8000))
            file.flush()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for callers in (1, 16, 256):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(asyncio.run(measure(Path(folder), callers)))
        print(rows[-1])
    with tempfile.TemporaryDirectory() as folder:
        sync_ms = bare_sync(Path(folder))
    began = time.process_time()
    for _ in range(200):
        redact(TEXT)
    redact_ms = 1e3 * (time.process_time() - began) / 200
    found = {"rows": rows, "bare_sync_ms": round(sync_ms, 3), "redact_ms": round(redact_ms, 3)}
    print(f"bare sync {sync_ms:.2f} ms, redaction of a turn {redact_ms:.2f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
