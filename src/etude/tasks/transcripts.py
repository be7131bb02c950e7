"""Expert transcripts for fine-tuning: episodes on tasks of split `base`, with mistakes and how they are put right.

    task + reference --mutate--> wrong edits --run in isolation--> real failure texts
                     --choices of the recipe--> replies and results, in the agent's format --> ids and marks

Wrong edits are shown but not learned (marked UNTRAINED); what follows them is: reading the failure, undoing, repairing,
testing, finishing. Failing tests are those that the wrong code really fails.

What it does not do: sample from a model, or train.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from etude import frames
from etude.agent.prompts import opening
from etude.code.edit import apply_edit
from etude.code.view import failure_text, numbered
from etude.data import corpus
from etude.data.corpus import PATH, Document, Edit, Pen, edit_call, edit_for, smallest_edit
from etude.data.recipe import TranscriptSettings
from etude.data.render import NanoRenderer
from etude.data.tokenizer import load_cached
from etude.errors import TaskError
from etude.sandbox.iochecks import CheckOutcome
from etude.tasks.checks import FAULTY_LINES
from etude.tasks.file import load_references, load_tasks
from etude.tasks.isolation import Prober
from etude.tasks.mutate import PLAIN_KINDS, mutate
from etude.types import Task, ToolCall

TRANSCRIPTS = "transcripts.bin"
MESSAGE = "Done."
_CHUNK = 200
_FINISH = ToolCall(name="finish", arguments={"message": MESSAGE})
_TEST = ToolCall(name="run_tests", arguments={})


def build(address: str, model: Path, path: Path, settings: TranscriptSettings, *, workers: int = 2,
          progress: Callable[[float], None] = lambda share: None) -> None:  # fmt: skip
    """Write the transcripts of the tasks at `address` (`etude:repair/base`), spelled by the tokenizer of `model`.

    Errors: TaskError, ModelError; SandboxError where code cannot be run in isolation.
    """
    references = load_references(address)
    tasks = load_tasks(address)
    if not tasks:
        raise TaskError(f"{address} holds no tasks")
    chunks = [tasks[start : start + _CHUNK] for start in range(0, len(tasks), _CHUNK)]
    found: list[Document] = []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        jobs = (([(task, references[task.task_id]) for task in chunk], str(model), settings) for chunk in chunks)
        for number, part in enumerate(pool.imap(_documents_of, jobs), 1):
            found += part
            progress(number / len(chunks))
    random.Random(settings.seed).shuffle(found)
    frames.write_file(path, corpus.join(found, address))


def _documents_of(job: tuple[Sequence[tuple[Task, str]], str, TranscriptSettings]) -> list[Document]:
    chunk, model, settings = job
    renderer = NanoRenderer(load_cached(model))
    found = []
    with Prober(hash_seed=1) as prober:
        for task, reference in chunk:
            for number in range(settings.per_task):
                rng = random.Random(f"{settings.seed} {task.task_id} {number}")
                made = transcript(renderer, task, reference, prober, rng, settings)
                if made is not None and len(made.ids) <= settings.max_tokens:
                    found.append(made)
    return found


def repair(renderer: NanoRenderer, broken: str, reference: str) -> Edit:
    """The edit from one text to the other, which differ in one line. Errors: ValueError if they differ in more."""
    was, now = reference.split("\n"), broken.split("\n")
    first = next((n for n, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    if len(was) == len(now) and was[first + 1 :] == now[first + 1 :]:
        return edit_for(renderer.tokenizer, broken, first + 1, was[first], now[first])
    if len(was) == len(now) + 1 and was[first + 1 :] == now[first:]:
        return edit_for(renderer.tokenizer, broken, first + 1, was[first], "")
    raise ValueError("the texts differ in more than one line")


def transcript(renderer: NanoRenderer, task: Task, reference: str, prober: Prober, rng: random.Random,
               settings: TranscriptSettings) -> Document | None:  # fmt: skip
    """One transcript; None where the task's fault is no edit of one line."""
    broken = task.workspace[PATH]
    try:
        right = repair(renderer, broken, reference)
    except (ValueError, StopIteration):
        return None
    count = rng.choices(range(len(settings.wrong_edits)), settings.wrong_edits)[0]
    wrongs = _wrong_edits(renderer, task, broken, reference, rng, count)
    failure, *failures = _failures(prober, task, [broken, *(text for _, text in wrongs)])
    pen = Pen(renderer, opening(task))
    if rng.random() < settings.read_first:
        pen.reply([(ToolCall(name="read_file", arguments={"path": PATH}), True)], [numbered(broken)])
    if failure != "ok" and rng.random() < settings.test_first:
        pen.reply([(_TEST, True)], [failure])
    undo: list[tuple[ToolCall, bool]] = []
    for (edit, text), said in zip(wrongs, failures, strict=True):
        if said == "ok":  # harmless, or not told apart by the visible checks: no mistake to learn from
            continue
        pen.reply([*undo, (edit_call(edit), False), (_TEST, True)], ["ok"] * (len(undo) + 1) + [said])
        if rng.random() < settings.give_up:
            pen.reply([(_FINISH, True)], None)
            return pen.document()
        # Also where the wrong edit was in the fault's own line: two plain edits are learned, one of both is not.
        undo = [(edit_call(repair(renderer, text, broken)), True)]
    last = [*undo, (edit_call(right), True)]
    if rng.random() < settings.test_after:
        pen.reply([*last, (_TEST, True)], ["ok"] * (len(last) + 1))
        pen.reply([(_FINISH, True)], None)
    else:
        pen.reply([*last, (_FINISH, True)], None)
    return pen.document()


def _wrong_edits(renderer: NanoRenderer, task: Task, broken: str, reference: str, rng: random.Random,
                 count: int) -> list[tuple[Edit, str]]:  # fmt: skip
    """Up to `count` edits of the broken file, each with the text that it leaves behind."""
    head = broken.rfind(f"\ndef {task.source['function'].rpartition('.')[2]}(") + 1
    offset = broken.count("\n", 0, head)
    found: list[tuple[Edit, str]] = []
    for mutation in mutate(broken[head:].rstrip("\n"), rng, PLAIN_KINDS, limit=count + 2):
        old, new = smallest_edit(renderer.tokenizer, mutation.old_line, mutation.new_line)
        edit = Edit(old=old, new=new, line=mutation.line + offset)
        text = apply_edit(broken, edit.old, edit.new, edit.line)
        if text != reference and len(found) < count:
            found.append((edit, text))
    return found


def _failures(prober: Prober, task: Task, sources: Sequence[str]) -> list[str]:
    """What run_tests says of each source."""
    visible = [check for check in task.verifier.checks if check.visible]
    calls = [check.call for check in visible]
    answers = prober.run(list(sources), [calls] * len(sources), lines=FAULTY_LINES, fresh=True)
    return [
        failure_text([
            CheckOutcome(call=check.call, expected=check.expected, got=seen.text, passed=seen.text == check.expected)
            for check, seen in zip(visible, answer, strict=True)
        ])
        for answer in answers
    ]  # fmt: skip
