"""The nano's tokenizer and pretraining corpus, from harvested functions of split `base`.

    functions.jsonl.zst --split base--> tokenizer.json
                                    --mutate, data.corpus--> corpus.bin (to train on), probes.bin (to measure on)
                                    --> corpus.json (packages, versions, licences, counts, hashes)

The same functions and settings give the same files, byte for byte. What it does not do: harvest, or train.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from etude import frames
from etude.data import corpus, tokenizer
from etude.data.recipe import CorpusSettings
from etude.data.render import NanoRenderer
from etude.errors import TaskError
from etude.tasks.harvest import Function, read
from etude.tasks.mutate import TRAIN_KINDS, Mutation, mutate
from etude.tasks.packages import PACKAGES
from etude.types import FORMAT

CORPUS, PROBES, MANIFEST = "corpus.bin", "probes.bin", "corpus.json"
_CHUNK = 500
"""Functions a worker takes at a time."""
_HARNESS_TEXT = (
    "Repair f.\nsolution.py\n1\tf(1, [2, 3]) -> [2], expected [2, 3]\n3 of 8 fail\nok\nDone.\n"
    "f('ab', -1) -> raises ValueError, expected 'a'\nold does not occur in the file\ntimeout\n"
)


def build(functions: Path, folder: Path, settings: CorpusSettings, *, workers: int = 2,
          progress: Callable[[float], None] = lambda share: None) -> None:  # fmt: skip
    """Write tokenizer.json, corpus.bin, probes.bin and corpus.json into `folder`.

    Errors: TaskError if there are no functions of split `base`; ModelError if they are too few for the tokenizer.
    """
    base = [function for function, split in read(functions) if split == "base"]
    if not base:
        raise TaskError(f"{functions} holds no functions of split base", hint="build it: etude tasks functions")
    if unknown := sorted(set(settings.kinds) - set(TRAIN_KINDS)):
        raise TaskError(f"corpus.kinds: no kind {unknown[0]!r}", hint=f"there are {', '.join(TRAIN_KINDS)}")
    folder.mkdir(parents=True, exist_ok=True)
    base.sort(key=lambda function: hashlib.blake2b(f"{settings.seed} {function.body_key}".encode()).digest())
    probes, rest = base[: settings.num_probes], base[settings.num_probes :]
    made = tokenizer.Tokenizer(tokenizer.train(_texts(rest), settings.vocab_size))
    made.save(folder)
    selected = [(function, passes) for function in rest if (passes := _passes(function, settings))]
    chunks = [selected[start : start + _CHUNK] for start in range(0, len(selected), _CHUNK)]
    found: list[tuple[int, corpus.Document]] = []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        jobs = ((str(folder), chunk, settings) for chunk in chunks)
        for number, part in enumerate(pool.imap(_documents_of, jobs), 1):
            found += part
            progress(number / len(chunks))
    held = [
        document
        for _, document in corpus.documents(
            NanoRenderer(made), probes, _faults(settings), passes=1, max_faults=1, max_tokens=settings.max_tokens,
            seed=settings.seed,
        )
    ]  # fmt: skip
    joined = corpus.join(_in_order(found, settings.seed), functions.name)
    frames.write_file(folder / CORPUS, joined)
    frames.write_file(folder / PROBES, corpus.join(held, functions.name))
    manifest = _manifest(base, functions, joined)
    frames.write_bytes(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def _passes(function: Function, settings: CorpusSettings) -> int:
    if function.callable:
        return settings.passes_callable
    if function.source.split("(", 1)[1].startswith(("self", "cls")):
        return settings.passes_method if function.lines >= settings.min_lines_method else 0
    return settings.passes_free


def _texts(functions: Sequence[Function]) -> Iterator[str]:
    for number, function in enumerate(functions):
        yield function.prelude + "\n" + function.source + "\n"
        if number % 20 == 0:
            yield _HARNESS_TEXT


def _faults(settings: CorpusSettings) -> corpus.FaultMaker:
    def faults(source: str, rng: random.Random, limit: int) -> list[Mutation]:
        return mutate(source, rng, settings.kinds or TRAIN_KINDS, limit=limit)

    return faults


def _documents_of(
    job: tuple[str, Sequence[tuple[Function, int]], CorpusSettings],
) -> list[tuple[int, corpus.Document]]:
    folder, chunk, settings = job
    renderer = NanoRenderer(tokenizer.load_cached(folder))
    return [
        item
        for function, passes in chunk
        for item in corpus.documents(
            renderer, [function], _faults(settings), passes=passes, max_faults=settings.max_faults,
            max_tokens=settings.max_tokens, seed=settings.seed, wrongs=settings.wrong_edits,
        )
    ]  # fmt: skip


def _in_order(found: Sequence[tuple[int, corpus.Document]], seed: int) -> list[corpus.Document]:
    """Shuffled, and the documents of one function spread evenly over the whole."""
    rng = random.Random(seed)
    functions: list[list[corpus.Document]] = []
    for number, document in found:
        if number == 0 or not functions:
            functions.append([])
        functions[-1].append(document)
    placed = []
    for documents in functions:
        start = rng.random()
        placed += [((start + place / len(documents)) % 1.0, one) for place, one in enumerate(documents)]
    return [document for _, document in sorted(placed, key=lambda item: item[0])]


def _manifest(base: Sequence[Function], functions: Path, joined: corpus.Corpus) -> dict[str, object]:
    packages = Counter((function.package, function.version, function.licence) for function in base)
    wheels = {package.name: package.sha256 for package in PACKAGES}
    bodies = hashlib.blake2b("".join(sorted(function.body_key for function in base)).encode(), digest_size=16)
    return {
        "format": FORMAT,
        "what": "functions that the tokenizer and the pretraining documents were made of; no code of the packages "
                "is shipped",
        "functions": len(base), "functions_digest": bodies.hexdigest(),
        "file": functions.name, "file_digest": hashlib.blake2b(functions.read_bytes(), digest_size=16).hexdigest(),
        "documents": len(joined), "tokens": len(joined.ids),
        "corpus_digest": hashlib.blake2b(joined.ids.tobytes(), digest_size=16).hexdigest(),
        "packages": [
            {"name": name, "version": version, "licence": licence, "functions": count, "sha256": wheels.get(name, "")}
            for (name, version, licence), count in sorted(packages.items())
        ],
    }  # fmt: skip
