"""Recipe + role -> what a worker process serves: a trainer, an engine that follows the store, or one that does not.

Everything heavy is imported by the function that needs it. What it does not do: the process itself (worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import EtudeError, RunError
from etude.types import digest_of

if TYPE_CHECKING:
    from etude.frames import Handler
    from etude.inference.torch_engine import TorchEngine
    from etude.rl.stage import RLStage
    from etude.serve.stage import ServeStage
    from etude.train.ranks import Ranks
    from etude.train.step import Trainer
    from etude.weights.store import Store

_RETRY_S = 1.0
"""Between two tries of a weight store that fails; each failure is a line in the engine's log."""


async def handlers_of(run: Path, stage: RLStage, role: str, stack: contextlib.AsyncExitStack) -> dict[str, Handler]:
    """What the process of this role serves. Errors: RunError for an unknown role."""
    kind = role.partition("-")[0]
    if kind == "trainer":
        # One thread for all of it: torch's helper threads belong to the thread that computed first, and those of two
        # are more than there are cores, so that they sleep between operations.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        return await asyncio.get_running_loop().run_in_executor(thread, _trainer, run, stage, stack, thread)
    if kind in ("engine", "eval"):
        return await _engine(run, stage, role, stack, follows=kind == "engine")
    raise RunError(f"no worker role {role!r}", hint="trainer, engine, eval-N")


def num_ranks(stage: RLStage, role: str) -> int:
    """Processes of this role."""
    return stage.train.ranks if role == "trainer" else 1


def follow_trainer(run: Path, stage: RLStage) -> None:
    """What the trainer's ranks after the first do: train as they are told, and publish their part of the weights."""
    from etude.train.launch import PATIENCE, joined
    from etude.train.lead import follow
    from etude.weights.publish import Snapshots
    from etude.weights.publish import follow as follow_publisher
    from etude.weights.store import open_store
    from etude.weights.upload import Uploader

    ranks, snapshots = joined(), Snapshots()
    trainer, peers = new_trainer(stage, ranks), ranks.beside(PATIENCE)
    uploader = Uploader(open_store(stage.weights.url(run)), threads=stage.weights.threads)
    threading.Thread(target=follow_publisher, args=(uploader, peers, snapshots), name="publisher", daemon=True).start()
    follow(trainer, snapshots)


def new_trainer(stage: RLStage, ranks: Ranks | None = None) -> Trainer:
    """A trainer with the model that the run begins with."""
    from etude.models.load import load_model
    from etude.train.corrections import Correction
    from etude.train.forward import Routing
    from etude.train.kl import KL
    from etude.train.step import Trainer

    return Trainer(
        load_model(stage.model.path), stage.train, publish_dtype=stage.weights.publish_dtype, ranks=ranks,
        correction=Correction(kind=stage.rl.correction, clip=stage.rl.clip),
        kl=KL(kind=stage.rl.kl.kind, coef=stage.rl.kl.coef),
        routing=Routing(replays=stage.rl.replay, plausibility=stage.rl.plausibility),
    )  # fmt: skip


def _trainer(
    run: Path, stage: RLStage, stack: contextlib.AsyncExitStack, thread: ThreadPoolExecutor
) -> dict[str, Handler]:
    from etude.train.launch import PATIENCE, joined
    from etude.train.ranks import Ranks
    from etude.train.service import open_trainer
    from etude.weights.store import open_store

    ranks = joined() if stage.train.ranks > 1 else Ranks()
    trainer = open_trainer(
        new_trainer(stage, ranks),
        store=open_store(stage.weights.url(run)),
        checkpoints=run / "checkpoints",
        checkpoint_every=stage.train.checkpoint_every,
        weights=stage.weights,
        peers=ranks.beside(PATIENCE),
        reference=stage.rl.kl.reference if stage.rl.kl.coef else "",
        thread=thread,
    )
    stack.callback(trainer.close)
    return trainer.handlers()


def _end_with(job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run it; when it ends, however, the process ends: one that answers but does no work would not be replaced."""

    async def run() -> None:
        try:
            await job
        except Exception:
            traceback.print_exc()
        os._exit(1)

    return asyncio.create_task(run())


async def _engine(
    run: Path, stage: RLStage, role: str, stack: contextlib.AsyncExitStack, *, follows: bool
) -> dict[str, Handler]:
    from etude.inference.service import handlers
    from etude.inference.torch_engine import TorchEngine
    from etude.models.load import load_model
    from etude.weights.replica import Replica
    from etude.weights.store import open_store

    store = open_store(stage.weights.url(run))
    replica = Replica(store, threads=stage.weights.threads)

    async def download(manifest: Any) -> Any:
        return await asyncio.to_thread(replica.fetch, manifest)

    model = await asyncio.to_thread(load_model, stage.model.path, dtype=stage.weights.publish_dtype)
    engine = TorchEngine(model, stage.engine, fetch=download, records_routes=stage.rl.replay)
    stack.push_async_callback(engine.close)
    stack.callback(_end_with(engine.ended()).cancel)
    if follows:
        _follow(engine, store, f"{digest_of(str(run))[:16]}-{role}", stage.weights.poll_s, stack)
    return handlers(engine)


def _follow(engine: TorchEngine, store: Store, holder: str, poll_s: float, stack: contextlib.AsyncExitStack) -> None:
    """Let the engine load every version that is published, until the stack ends."""
    from etude.weights.subscribe import Subscriber

    reader = Subscriber(store, holder=holder, poll_s=poll_s)

    async def follow() -> None:
        served = None
        while True:
            try:
                async for manifest in reader.manifests():
                    await engine.load(manifest)
                    served = manifest.version
            except EtudeError as error:  # it serves what it has until the store answers, or a newer version loads
                print(f"no newer version can be loaded: {error}", file=sys.stderr, flush=True)
                reader.resume(served)
                await asyncio.sleep(_RETRY_S)

    stack.callback(_end_with(follow()).cancel)


async def serving_handlers(run: Path, stage: ServeStage, stack: contextlib.AsyncExitStack) -> dict[str, Handler]:
    """What the engine of a server serves: versions of a store that it follows, else the model's own weights."""
    from etude.inference.service import handlers
    from etude.inference.torch_engine import TorchEngine
    from etude.models.load import load_model
    from etude.types import Version
    from etude.weights.replica import Replica
    from etude.weights.store import open_store

    if stage.weights is None:
        engine = TorchEngine(await asyncio.to_thread(load_model, stage.model.path), stage.engine)
        stack.push_async_callback(engine.close)
        stack.callback(_end_with(engine.ended()).cancel)
        await engine.set_version(Version(incarnation=1, n=0, step=0))
        return handlers(engine)
    store = open_store(stage.weights.url(run))
    replica = Replica(store, threads=stage.weights.threads)

    async def download(manifest: Any) -> Any:
        return await asyncio.to_thread(replica.fetch, manifest)

    model = await asyncio.to_thread(load_model, stage.model.path, dtype=stage.weights.publish_dtype)
    engine = TorchEngine(model, stage.engine, fetch=download)
    stack.push_async_callback(engine.close)
    stack.callback(_end_with(engine.ended()).cancel)
    _follow(engine, store, f"{digest_of(str(run))[:16]}-serve", stage.weights.poll_s, stack)
    return handlers(engine)
