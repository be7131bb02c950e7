r"""What the nano is pretrained on: real functions with planted faults, each followed by the edits that repair it.

    functions of split `base` --faults--> broken file + edits --the agent's own chat format--> ids and marks

A document is an episode's opening (the prompt and the numbered file) and the reply that repairs it, spelled by the same
renderer as real episodes. Each pass over the functions plants other faults. An edit is as small as the tokens allow:
the changed tokens of one line, and so much more that they are unique on it. In a share of the documents wrong edits
come first, which are not learned, each undone before what follows: to copy from what was written is a skill of its own.

What it does not do: make the faults (whoever calls gives `faults`), or run anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from etude.code.edit import apply_edit
from etude.code.view import numbered
from etude.data.render import NanoRenderer
from etude.data.tokenizer import Tokenizer
from etude.protocols import Message
from etude.types import FORMAT, Noun, ToolCall, ToolResult

PATH = "solution.py"
UNTRAINED, FILE, FIX = 0, 1, 2
"""Marks of tokens: given by the harness; part of the shown file; part of the repair."""


class Fault(Protocol):
    """One changed line; `tasks.mutate.Mutation` is one. An empty `new_line` means that the line was removed."""

    @property
    def line(self) -> int: ...
    @property
    def old_line(self) -> str: ...
    @property
    def new_line(self) -> str: ...


class Edit(Noun, frozen=True):
    """Arguments of one edit_file call."""

    old: str
    new: str
    line: int


class Document(Noun, frozen=True):
    """One training text."""

    ids: np.ndarray
    """[n] uint16."""
    marks: np.ndarray
    """[n] uint8: UNTRAINED, FILE or FIX."""


def smallest_edit(tokenizer: Tokenizer, wrong: str, right: str) -> tuple[str, str]:
    """(old, new): the fewest tokens of line `wrong` that name the change to `right` and occur once in `wrong`.

    The lines must differ. Both are cut at tokens of the line as it is shown, so that `old` copies what the model saw.
    """
    shown = "1\t"
    cuts = [sorted({0, *(max(0, end - len(shown)) for _, end in tokenizer.pieces(shown + line))})
            for line in (wrong, right)]  # fmt: skip
    first = 0
    for mine, other in zip(*cuts, strict=False):
        if mine != other or wrong[:mine] != right[:mine]:
            break
        first = mine
    ends = {len(right) - cut for cut in cuts[1]}
    last = len(wrong)
    for cut in reversed(cuts[0]):
        rest = len(wrong) - cut
        if rest not in ends or cut < first or len(right) - rest < first or wrong[cut:] != right[len(right) - rest :]:
            break
        last = cut
    start, stop = cuts[0].index(first), cuts[0].index(last)
    grow_left = False
    while start == stop or _count(wrong, wrong[cuts[0][start] : cuts[0][stop]]) > 1:
        grow_left = (not grow_left and start > 0) or stop == len(cuts[0]) - 1
        start, stop = (start - 1, stop) if grow_left else (start, stop + 1)
    begin, end = cuts[0][start], cuts[0][stop]
    return wrong[begin:end], right[begin : len(right) - (len(wrong) - end)]


def _count(text: str, piece: str) -> int:
    return sum(text.startswith(piece, start) for start in range(len(text)))


def edit_for(tokenizer: Tokenizer, text: str, line: int, old_line: str, new_line: str) -> Edit:
    """The edit of `text` that undoes a fault: `old_line` was at `line` (1-based), `new_line` (or nothing) is now.

    A removed line comes back in front of the line that follows it, or after the last one.
    """
    if new_line:
        return _edit_of_line(tokenizer, line, new_line, old_line)
    lines = text.split("\n")
    follows = line <= len(lines) and lines[line - 1] != ""
    anchor = lines[line - 1] if follows else lines[line - 2]
    ends = [end - 2 for _, end in tokenizer.pieces("1\t" + anchor) if end > 2]
    if follows:
        size = next(end for end in ends if anchor[:end].strip() and _count(anchor, anchor[:end]) == 1)
        return Edit(old=anchor[:size], new=f"{old_line}\n{anchor[:size]}", line=line)
    size = next(end for end in (0, *ends)[::-1] if end < len(anchor) and _count(anchor, anchor[end:]) == 1)
    return Edit(old=anchor[size:], new=f"{anchor[size:]}\n{old_line}", line=line - 1)


def _edit_of_line(tokenizer: Tokenizer, line: int, now: str, then: str) -> Edit:
    old, new = smallest_edit(tokenizer, now, then)
    return Edit(old=old, new=new, line=line)


def plant(
    tokenizer: Tokenizer, prelude: str, source: str, faults: Sequence[Fault]
) -> tuple[str, str, tuple[Edit, ...]]:
    """(right file, broken file, edits from the second to the first, from top to bottom).

    `faults` change different lines of `source`. Errors: EditError, ValueError if a fault cannot be undone by an edit.
    """
    head = prelude.rstrip("\n") + "\n\n" if prelude else ""
    offset = head.count("\n")
    right = head + source + "\n"
    lines = right.rstrip("\n").split("\n")
    ordered = sorted(faults, key=lambda fault: fault.line)
    for fault in reversed(ordered):
        place = fault.line + offset - 1
        lines[place : place + 1] = [fault.new_line] if fault.new_line else []
    broken = "\n".join(lines) + "\n"
    text, edits = broken, []
    for fault in ordered:
        # Everything above is right already, so the fault's line has its number in the right file.
        edit = edit_for(tokenizer, text, fault.line + offset, fault.old_line, fault.new_line)
        text = apply_edit(text, edit.old, edit.new, edit.line)
        edits.append(edit)
    if text != right:
        raise ValueError("the edits do not lead back to the right file")
    return right, broken, tuple(edits)


def opening(name: str, files: dict[str, str]) -> tuple[Message, ...]:
    """The conversation that an episode of the repair tasks starts with."""
    shown = "".join(f"{path}\n{numbered(text)}" for path, text in files.items())
    return (Message(role="user", text=f"Repair {name}.\n{shown}"),)


def edit_call(edit: Edit) -> ToolCall:
    return ToolCall(name="edit_file", arguments={"path": PATH, "line": edit.line, "old": edit.old, "new": edit.new})


class Pen:
    """Writes ids and marks of one document. The prompt is marked FILE: it is text to be learned."""

    def __init__(self, renderer: NanoRenderer, messages: Sequence[Message]) -> None:
        self._renderer = renderer
        self._mark = renderer.tokenizer.control("<|arg|>")
        opened = renderer.open(messages)
        self._ids = [opened]
        self._marks = [np.full(len(opened), FILE, np.uint8)]
        self._marks[0][0] = UNTRAINED

    def reply(self, calls: Sequence[tuple[ToolCall, bool]], results: Sequence[str] | None) -> None:
        """Calls, each with whether it is learned, and the texts they got; None after the last reply."""
        for call, is_learned in calls:
            ids = self._renderer.reply("", [call])[:-1]
            # That an edit is tried is right even where this one is wrong: its name and path are learned.
            named = len(ids) if is_learned else int(np.flatnonzero(ids == self._mark)[1])
            self._add(ids[:named], FIX)
            self._add(ids[named:], UNTRAINED)
        self._add(np.array(self._renderer.stop_ids, np.int32), FIX)
        if results is not None:
            self._add(self._renderer.results([ToolResult(text=text) for text in results]), UNTRAINED)

    def _add(self, ids: np.ndarray, mark: int) -> None:
        self._ids.append(ids)
        self._marks.append(np.full(len(ids), mark, np.uint8))

    def document(self) -> Document:
        return Document(ids=np.concatenate(self._ids).astype(np.uint16), marks=np.concatenate(self._marks))


def document(
    renderer: NanoRenderer, name: str, broken: str, edits: Sequence[Edit], wrongs: Sequence[tuple[Edit, Edit]] = ()
) -> Document:
    """The opening and the repair, after `wrongs`: edits of the broken file, each with the one that undoes it."""
    pen = Pen(renderer, opening(name, {PATH: broken}))
    undo: list[tuple[ToolCall, bool]] = []
    for wrong, back in wrongs:
        pen.reply([*undo, (edit_call(wrong), False)], ["ok"] * (len(undo) + 1))
        undo = [(edit_call(back), True)]
    pen.reply([*undo, *((edit_call(edit), True) for edit in edits)], None)
    return pen.document()


def wrong_edits(
    tokenizer: Tokenizer, broken: str, offset: int, faults: Iterable[Fault], count: int
) -> tuple[tuple[Edit, Edit], ...]:
    """Up to `count` edits that put one of `faults` into its line of the broken file, each with the one that undoes it.

    offset: lines of the file before the function's. No line may have been removed from the file or be by a fault.
    """
    lines = broken.split("\n")
    found: list[tuple[Edit, Edit]] = []
    for fault in faults:
        line = fault.line + offset
        now, then = lines[line - 1], fault.new_line
        if len(found) < count and then != now:
            found.append(
                (Edit(*smallest_edit(tokenizer, now, then), line), Edit(*smallest_edit(tokenizer, then, now), line))
            )
    return tuple(found)


class Base(Protocol):
    """What is read of a function; `tasks.harvest.Function` is one."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def prelude(self) -> str: ...


FaultMaker = Callable[[str, random.Random, int], Sequence[Fault]]
"""(source, rng, how many at most) -> faults, each planted in `source` alone."""


def documents(
    renderer: NanoRenderer,
    functions: Iterable[Base],
    faults: FaultMaker,
    *,
    passes: int,
    max_faults: int,
    max_tokens: int,
    seed: int,
    wrongs: Sequence[float] = (1.0,),
) -> Iterator[tuple[int, Document]]:
    """(pass, document) for each function and pass, in the functions' order; fewer where a function has few faults.

    A document holds 1 to `max_faults` faults on different lines; ones longer than `max_tokens` are left out. `wrongs`:
    shares with 0, 1, 2, ... wrong edits before the repair, where that leaves them short enough. The same seed gives the
    same documents, whatever else is in `functions`.
    """
    for function in functions:
        rng = random.Random(f"{seed} {function.name} {function.source}")
        pool = list(faults(function.source, rng, passes * max_faults + 2))
        for number in range(passes):
            chosen: list[Fault] = []
            wanted = 1 + rng.randrange(max_faults)
            for fault in tuple(pool):
                if len(chosen) == wanted:
                    break
                if all(abs(fault.line - other.line) > 1 for other in chosen):
                    chosen.append(fault)
                    pool.remove(fault)
            if not chosen:
                break
            count = rng.choices(range(len(wrongs)), wrongs)[0]
            try:
                right, broken, edits = plant(renderer.tokenizer, function.prelude, function.source, chosen)
            except ValueError:  # EditError is one: a fault that no unique edit undoes
                continue
            tried: tuple[tuple[Edit, Edit], ...] = ()
            if count and all(fault.new_line for fault in (*chosen, *pool)):
                offset = right.count("\n") - function.source.count("\n") - 1
                tried = wrong_edits(renderer.tokenizer, broken, offset, rng.sample(pool, len(pool)), count)
            made = document(renderer, function.name, broken, edits, tried)
            if tried and len(made.ids) > max_tokens:
                made = document(renderer, function.name, broken, edits)
            if len(made.ids) <= max_tokens:
                yield number, made


class Corpus(Noun, frozen=True):
    """Documents end to end, in training order. On disk: `frames.write_file`."""

    ids: np.ndarray
    """[tokens] uint16."""
    marks: np.ndarray
    """[tokens] uint8."""
    starts: np.ndarray
    """[documents + 1] int64: document i is [starts[i], starts[i + 1])."""
    name: str
    """What it was built from."""
    format: int = FORMAT

    def __len__(self) -> int:
        return len(self.starts) - 1


def join(documents: Sequence[Document], name: str) -> Corpus:
    """All documents in one flat array, in order."""
    lengths = [len(document.ids) for document in documents]
    none = [np.zeros(0, np.uint16)]
    return Corpus(
        ids=np.concatenate([*(document.ids for document in documents), *none]).astype(np.uint16),
        marks=np.concatenate([*(document.marks for document in documents), *none]).astype(np.uint8),
        starts=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        name=name,
    )
