from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.errors import LostRaceError, MissingError, RunError
from etude.frames import Client, Server, read_file, write_file
from etude.train.checkpoint import Checkpoints
from etude.train.client import TrainerClient
from etude.train.corrections import Correction
from etude.train.kl import KL
from etude.train.recipe import TrainRecipe
from etude.train.service import TrainerService, open_trainer
from etude.train.step import Trainer
from etude.types import Batch, Version
from etude.weights.manifests import lineage, pins
from etude.weights.publish import take_incarnation
from etude.weights.recipe import WeightsRecipe
from etude.weights.replica import fetch
from etude.weights.store import Store, open_store
from etude.weights.subscribe import latest
from tiny import tiny_model
from train.batches import make_batch


def start(
    run: Path, store: Store, *, every: int = 3, publish_dtype: str = "float32", reference: str = ""
) -> TrainerService:
    recipe = TrainRecipe(lr=1e-3, micro_batch_tokens=60)
    kl = KL(coef=0.5 if reference else 0.0)
    trainer = Trainer(tiny_model("qwen3_moe"), recipe, publish_dtype=publish_dtype, correction=Correction(), kl=kl)
    return open_trainer(
        trainer, store=store, checkpoints=run / "checkpoints", checkpoint_every=every,
        weights=WeightsRecipe(publish_dtype=publish_dtype), reference=reference,
    )  # fmt: skip


def write_batches(run: Path, count: int) -> list[Path]:
    paths = []
    for step in range(1, count + 1):
        paths.append(run / f"{step}.mp")
        write_file(paths[-1], make_batch(tiny_model("qwen3_moe"), step, stale=0.2))
    return paths


def weights(service: TrainerService) -> dict[str, np.ndarray]:
    arrays = service._trainer.state()
    return {name: array for name, array in arrays.items() if not name.startswith("updates")}


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def test_a_fresh_start_publishes_its_weights_as_step_0(tmp_path: Path) -> None:
    store = open_store("memory://")
    service = start(tmp_path, store)
    manifest = latest(store)
    assert manifest is not None
    assert manifest.version == service.state().version == Version(incarnation=1, n=0, step=0)
    found = fetch(store, manifest)
    for name, tensor in tiny_model("qwen3_moe").hub_tensors().items():
        assert np.array_equal(found[name], tensor.numpy())
    service.close()


@pytest.mark.parametrize("publish_dtype", ["float32", "bfloat16"])
def test_three_steps_a_kill_and_three_steps_are_bitwise_six_steps(tmp_path: Path, publish_dtype: str) -> None:
    batches = [make_batch(tiny_model("qwen3_moe"), step, stale=0.2) for step in range(1, 7)]
    straight = start(tmp_path / "a", open_store("memory://"), publish_dtype=publish_dtype)
    for batch in batches:
        straight.step(batch)
    store = open_store("memory://")
    killed = start(tmp_path / "b", store, publish_dtype=publish_dtype)
    for batch in batches[:4]:
        killed.step(batch)
    killed._background.wait()
    torch.manual_seed(999)
    resumed = start(tmp_path / "b", store, publish_dtype=publish_dtype)
    assert resumed.state().step == resumed.state().checkpoint_step == 3
    assert resumed.state().version == Version(incarnation=2, n=0, step=3)
    for batch in batches[3:]:
        resumed.step(batch)
    assert same(weights(straight), weights(resumed))
    assert resumed._trainer.state()["updates"] == 6
    for service in (straight, resumed):
        service.close()
    killed.step(batches[4])
    with pytest.raises(LostRaceError):
        killed.close()


def test_after_a_resume_readers_leave_the_versions_that_the_crash_cut_off(tmp_path: Path) -> None:
    store = open_store("memory://")
    first = start(tmp_path, store)
    for step in range(1, 6):
        first.step(make_batch(tiny_model("qwen3_moe"), step))
    assert first._background.wait().version.step == 5
    second = start(tmp_path, store)
    assert latest(store).version == Version(incarnation=2, n=0, step=3)
    surviving = lineage(store)
    dead = first._background.head.version
    assert not surviving.survives(dead.incarnation, dead.n)
    assert surviving.survives(*(lambda v: (v.incarnation, v.n))(pins(store)[-1].version))
    second.close()


def test_finish_saves_and_publishes_the_newest_step(tmp_path: Path) -> None:
    store = open_store("memory://")
    service = start(tmp_path, store, every=100)
    service.step(make_batch(tiny_model("qwen3_moe"), 1))
    state = service.finish()
    assert (state.step, state.checkpoint_step, state.version.step) == (1, 1, 1)
    assert service.finish() == state
    service.close()
    resumed = start(tmp_path, store, every=100)
    assert resumed.state().step == 1
    assert same(weights(service), weights(resumed))
    resumed.close()


def test_live_tokens_are_those_of_our_own_newest_version(tmp_path: Path) -> None:
    store = open_store("memory://")
    service = start(tmp_path, store, every=1)
    row = service.step(make_batch(tiny_model("qwen3_moe"), 1, version=Version(incarnation=1, n=0, step=0)))
    assert row["mismatch_live_count"] == row["loss_tokens"]
    old = make_batch(tiny_model("qwen3_moe"), 2, version=Version(incarnation=1, n=0, step=0))
    assert service.step(old)["mismatch_live_count"] == 0
    service.finish()
    parent = service.state().version
    resumed = start(tmp_path, store, every=1)
    row = resumed.step(make_batch(tiny_model("qwen3_moe"), 3, version=parent))
    assert row["mismatch_live_count"] == row["loss_tokens"], "the parent's weights are ours until the first step"
    resumed.close()


def test_a_trainer_that_was_overtaken_refuses_to_go_on(tmp_path: Path) -> None:
    store = open_store("memory://")
    service = start(tmp_path, store)
    take_incarnation(store)
    service.step(make_batch(tiny_model("qwen3_moe"), 1))
    with pytest.raises(LostRaceError):
        service.finish()
    with pytest.raises(LostRaceError):
        service.step(make_batch(tiny_model("qwen3_moe"), 2))


def test_a_client_trains_through_a_socket_by_the_path_of_a_batch(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/weights")
    service = start(tmp_path, store)
    paths = write_batches(tmp_path, 2)

    async def talk() -> None:
        server = Server(service.handlers())
        await server.listen(tmp_path / "socket")
        wire = await Client.connect(tmp_path / "socket", name="trainer")
        client = TrainerClient(wire)
        assert (await client.state()).step == 0
        row = await client.step(paths[0])
        assert row["loss_tokens"] > 0
        with pytest.raises(RunError, match="batch 1 cannot be trained on"):
            await client.step(paths[0])
        await client.step(paths[1])
        state = await client.finish()
        assert (state.step, state.checkpoint_step, state.version.step) == (2, 2, 2)
        await wire.close()
        await server.close()

    asyncio.run(talk())
    service.close()


SCRIPT = """
import sys
from pathlib import Path
import torch
from tiny import tiny_model
from etude.frames import read_file
from etude.train.corrections import Correction
from etude.train.recipe import TrainRecipe
from etude.train.service import open_trainer
from etude.train.step import Trainer
from etude.types import Batch
from etude.weights.recipe import WeightsRecipe
from etude.weights.store import open_store

run = Path(sys.argv[1])
recipe = TrainRecipe(lr=1e-3, micro_batch_tokens=60)
trainer = Trainer(tiny_model("qwen3_moe"), recipe, publish_dtype="float32", correction=Correction())
service = open_trainer(
    trainer, store=open_store(f"file://{run}/weights"), checkpoints=run / "checkpoints", checkpoint_every=3,
    weights=WeightsRecipe(),
)
for step in range(service.state().step + 1, 7):
    service.step(read_file(run / f"{step}.mp", Batch))
    print(step, flush=True)
service.finish()
service.close()
"""


@pytest.mark.slow
def test_kill_minus_nine_before_and_after_a_checkpoint_ends_in_the_same_weights(tmp_path: Path) -> None:
    paths = write_batches(tmp_path, 6)
    straight = start(tmp_path / "straight", open_store("memory://"))
    for path in paths:
        straight.step(read_file(path, Batch))
    straight.close()
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    for kill_after in (1, 3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) >= kill_after:
                    break
            process.kill()
    last = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    assert last.stdout.split()[0] in ("1", "4"), "the checkpoint of step 3, unless it died before"
    saved = Checkpoints(tmp_path / "checkpoints", open_store(f"file://{tmp_path}/weights"))
    tensors = dict(saved.load(saved.names()[-1]).tensors)
    assert tensors.pop("updates") == 6
    assert same(weights(straight), tensors)


@pytest.mark.parametrize("publish_dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_first_version_also_after_a_kill(tmp_path: Path, publish_dtype: str) -> None:
    store, paths = open_store("memory://"), write_batches(tmp_path, 4)
    service = start(tmp_path, store, every=2, publish_dtype=publish_dtype, reference="start")
    rows = [service.step(read_file(path, Batch)) for path in paths[:2]]
    service.finish()
    (pinned,) = [pin.version for pin in pins(store) if pin.name == "reference"]
    assert (pinned.name, pinned.step) == ("1.0", 0)
    assert abs(rows[0]["kl_k1"]) < 1e-3 < abs(rows[1]["kl_k1"])
    again = start(tmp_path, store, every=2, publish_dtype=publish_dtype, reference="start")
    assert [pin.version for pin in pins(store) if pin.name == "reference"] == [pinned]
    whole = start(tmp_path / "whole", open_store("memory://"), every=9, publish_dtype=publish_dtype, reference="start")
    for path in paths[:2]:
        whole.step(read_file(path, Batch))
    for path in paths[2:]:
        ours, theirs = again.step(read_file(path, Batch)), whole.step(read_file(path, Batch))
        assert ours["kl_k1"] == theirs["kl_k1"]
    assert same(weights(again), weights(whole))
    again.close()
    whole.close()


def test_a_reference_may_be_any_version_by_name_and_one_that_is_gone_is_named(tmp_path: Path) -> None:
    store, paths = open_store("memory://"), write_batches(tmp_path, 2)
    service = start(tmp_path, store, every=1)
    service.step(read_file(paths[0], Batch))
    head = service.finish().version
    service.close()
    near = start(tmp_path, store, reference=head.name)
    assert abs(near.step(read_file(paths[1], Batch))["kl_k1"]) < 1e-5
    near.close()
    with pytest.raises(MissingError, match=r"9\.9"):
        start(tmp_path, store, reference="9.9")
