"""How often a policy solved each task: what tasks of the right difficulty are chosen by.

    a measurement --write_rates--> FILE.zst --choose--> the tasks whose share of solved attempts lies in between

A group whose attempts all fail, or all succeed, teaches next to nothing and costs as much as any. Rates are measured
once, with the policy that a run starts from; which of its attempts succeed is drawn anew in the run.

What it does not do: measure (bench does), or change with training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import zstandard

from etude.errors import TaskError
from etude.frames import write_bytes
from etude.types import FORMAT, Noun, Task

SHIPPED = {"etude:repair": Path(__file__).parent / "repair.rates.zst"}
"""Of the shipped model on the shipped training tasks."""
MAX_BYTES = 1 << 26
_KIND = "etude rates"


class Rates(Noun, frozen=True):
    """Solved attempts by task id, of `k` each."""

    tasks: str
    """Address of the tasks."""
    model: str
    """The policy that was measured, as its recipe names it."""
    k: int
    solved: Mapping[str, int]
    kind: str = _KIND
    format: int = FORMAT


def write_rates(path: Path, rates: Rates) -> None:
    """Whole or not at all. Errors: OSError."""
    write_bytes(path, zstandard.ZstdCompressor(level=19, write_checksum=True).compress(msgspec.json.encode(rates)))


def load_rates(address: str) -> Rates:
    """`etude:repair`, or a file. Errors: TaskError."""
    path = SHIPPED.get(address, Path(address))
    hint = "write it from a measured run: etude tasks rates RUN"
    try:
        packed = path.read_bytes()
        if zstandard.frame_content_size(packed) > MAX_BYTES:  # what the frame claims, max_output_size does not bound
            raise TaskError(f"{path} holds no rates", cause="it claims to be too large", hint=hint)
        data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_BYTES)
        rates = msgspec.json.decode(data, type=Rates)
    except OSError as error:
        raise TaskError(f"cannot read the rates {path}", cause=error.strerror, hint=hint) from error
    except (zstandard.ZstdError, ValueError, RecursionError) as error:
        raise TaskError(f"{path} holds no rates", cause=str(error), hint=hint) from error
    if (rates.kind, rates.format) != (_KIND, FORMAT) or rates.k < 1:
        raise TaskError(f"{path} holds no rates of format {FORMAT}", cause=f"{rates.kind} {rates.format}", hint=hint)
    return rates


def choose(tasks: Sequence[Task], rates: Rates, span: tuple[float, float]) -> tuple[Task, ...]:
    """The tasks whose rate lies within `span`, both ends included; tasks that were not measured are left out.

    Errors: TaskError if none is left.
    """
    low, high = span
    chosen = tuple(
        task
        for task in tasks
        if (solved := rates.solved.get(task.task_id)) is not None and low <= solved / rates.k <= high
    )
    if not chosen:
        known = sum(task.task_id in rates.solved for task in tasks)
        raise TaskError(
            f"no task has a rate between {low} and {high}",
            cause=f"{known} of {len(tasks)} tasks were measured, {rates.k} attempts each, on {rates.tasks}",
            hint="widen tasks.solve_rate ([0, 1]: all tasks), or measure these tasks: etude tasks rates --help",
        )
    return chosen
