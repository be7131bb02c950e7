"""The vocabulary of gpt-oss, for the package openai-harmony: out of the model's own tokenizer.json, not the network.

The package takes a folder that holds the ranks of o200k_base, in the form of the package tiktoken, and checks their
digest. A tokenizer.json of gpt-oss has the same pieces under the same numbers, spelled in the byte-level alphabet.
"""

from __future__ import annotations

import base64
import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_FOLDER = "TIKTOKEN_ENCODINGS_BASE"
_FILE = "o200k_base.tiktoken"


@contextlib.contextmanager
def vocabulary(pieces: Mapping[str, int]) -> Iterator[None]:
    """Inside, the package finds `pieces`: those of the byte-level alphabet, without added tokens, and their ids."""
    if _FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="etude-") as folder:
        Path(folder, _FILE).write_bytes(ranks_of(pieces))
        os.environ[_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[_FOLDER]


def ranks_of(pieces: Mapping[str, int]) -> bytes:
    """A line each, in their order: the piece in base64, and its rank."""
    table = _bytes_of_alphabet()
    lines = []
    for piece, rank in sorted(pieces.items(), key=lambda item: item[1]):
        spelled = base64.b64encode(bytes(table[letter] for letter in piece)).decode()
        lines.append(f"{spelled} {rank}\n")
    return "".join(lines).encode()


def _bytes_of_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for a byte -> the byte: Radford et al. 2019, `bytes_to_unicode`."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(hidden)}
