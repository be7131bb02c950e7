r"""Text <-> ids: the nano's own byte-level BPE, and the loader of any `tokenizer.json`.

    samples of text --train--> tokenizer.json, in the model's folder --Tokenizer--> ids

Pieces (PATTERN) never merge with their neighbors, and FORCED pieces are one token each whatever the samples say, so
that what an edit names (a line number, an operator, a small number) looks the same to the model wherever it stands.
Control tokens are for `render` alone: where they occur in a text they stay text.

What it does not do: chat formats (`render`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from etude.errors import ModelError

CONTROLS = (
    "<|pad|>", "<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|call|>", "<|arg|>", "<|result|>", "<|end|>",
)  # fmt: skip
"""Ids 0 to 8, in this order."""

TOOL_NAMES = ("read_file", "edit_file", "run_tests", "finish")

OPERATORS = (
    "==", "!=", "<=", ">=", "+=", "-=", "*=", "/=", "//=", "%=", "|=", "&=", "^=", "//", "**", "->", "<<", ">>", ":=",
)  # fmt: skip

WORDS = ("Repair", "ok", " expected", "expected", "raises", " of", " fail", "Done", "True", "False", "None")
"""Words of the harness: the prompt, a test run's answer, the last message."""

PATTERN = "|".join((
    r"(?<![^\n])[0-9]{1,2}\t",  # "12<tab>" at the start of a line: the number of a shown line
    r"solution\.py|read_file|edit_file|run_tests",
    r"(?<=[\n\t]) +|\A {2,}",  # indentation; a fragment that begins with one space keeps it on its word
    r"[ .]?\p{L}+",
    r" ?_+\p{L}*",
    r" ?[0-9]{1,2}",  # numbers up to 99 are one token, longer ones go by pairs
    r" ?(?://=|<<=|>>=|\*\*=|==|!=|<=|>=|[-+*/%|&^]=|//|\*\*|->|<<|>>|:=)",
    r'\(\)|\[\]|\{\}|""|\'\'|\):|\),|\n',
    r" ?[^\s\p{L}\p{N}_]",
    r" +(?= )|\s|\p{N}",
))  # fmt: skip
"""Pieces, tried in this order (Oniguruma syntax)."""


def _forced() -> list[str]:
    numbers = [str(n) for n in range(10, 100)]
    lines = [f"{n}\t" for n in range(1, 100)]
    operators = [space + text for text in OPERATORS for space in ("", " ")]
    small = [f" {n}" for n in range(0, 11)]
    indents = [" " * n for n in (2, 3, 4, 6, 8, 12, 16, 20, 24)]
    return [*lines, *numbers, *small, *operators, *indents, "solution.py", *TOOL_NAMES, *WORDS,
            "):", "()", "[]", "{}", "),"]  # fmt: skip


FORCED = tuple(_forced())
"""Pieces that are one token each."""


def _bytes_to_alphabet(text: str) -> str:
    """A piece as the byte-level alphabet spells it."""
    return "".join(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
                   .pre_tokenize_str(text))  # fmt: skip


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train(texts: Iterable[str], vocab_size: int = 2048) -> tokenizers.Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens: controls, 256 bytes, FORCED pieces, then learned merges.

    The result depends on the texts alone. Errors: ModelError if the texts hold too few merges for `vocab_size`.
    """
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), special_tokens=list(CONTROLS),
    )  # fmt: skip
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]["merges"]
    vocab = {name: number for number, name in enumerate(CONTROLS)}
    for piece in (*sorted(pre_tokenizers.ByteLevel.alphabet()), *map(_bytes_to_alphabet, FORCED)):
        vocab.setdefault(piece, len(vocab))
    merges: list[tuple[str, str]] = []
    for left, right in learned:
        if len(vocab) == vocab_size:
            break
        vocab.setdefault(left + right, len(vocab))
        merges.append((left, right))
    if len(vocab) != vocab_size:
        raise ModelError(f"cannot train a tokenizer of {vocab_size}", cause=f"only {len(vocab)} pieces were found",
                         hint="give more text")  # fmt: skip
    # ignore_merges: a piece that is in the vocabulary is one token even where no merges lead to it.
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=True)
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = _pre_tokenizer()
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(CONTROLS))
    return made


class Tokenizer:
    """Text <-> ids of one model folder. Texts never become control ids."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True
        self.vocab_size: int = backend.get_vocab_size()

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The `tokenizer.json` of a model folder. Errors: ModelError."""
        path = Path(folder) / "tokenizer.json"
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except OSError as error:
            hint = "name a Hugging Face model folder"
            raise ModelError(f"no tokenizer in {folder}", cause=str(error), hint=hint) from error
        except Exception as error:  # the library raises bare Exception on a malformed file
            raise ModelError(f"{path} is not a tokenizer", cause=str(error)) from error

    def save(self, folder: str | Path) -> None:
        self._backend.save(str(Path(folder) / "tokenizer.json"))

    def control(self, name: str) -> int:
        """Id of a control token. Errors: ModelError if this tokenizer lacks it."""
        number = self._backend.token_to_id(name)
        if number is None:
            raise ModelError(f"the tokenizer has no token {name}", hint="is this the nano's folder?")
        return int(number)

    def encode(self, text: str) -> np.ndarray:
        """[n] int32."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int32) for one in found]

    def pieces(self, text: str) -> list[tuple[int, int]]:
        """Character spans of the tokens of a text, in order; a character of several tokens is spanned by each."""
        return list(self._backend.encode(text, add_special_tokens=False).offsets)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; control ids are spelled out, bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode([int(number) for number in ids], skip_special_tokens=False))


class _Formatting(threading.local):
    """What a thread is encoding just now (SafeTokenizer.formatting)."""

    texts: frozenset[str] | None = None
    spelled: frozenset[str] = frozenset()
    """Added tokens that one of them spells."""


class SafeTokenizer:
    """The tokenizer of any model folder, for chat formats: texts are encoded without any of its added tokens.

    `encode` and `decode` also take what the package `renderers` passes to Hugging Face's: pieces in which a format's
    words and somebody's text may stand side by side. An added token is the format's there, unless a text spells it.
    """

    unk_token_id = None

    def __init__(self, source: str, name: str = "") -> None:
        """source: a tokenizer.json; name: for messages. Errors: ModelError."""
        self.name_or_path = name
        self._now = _Formatting()
        try:
            self._whole = tokenizers.Tokenizer.from_str(source)
            bare = json.loads(source)
            bare["added_tokens"], bare["post_processor"] = [], None
            self._bare = tokenizers.Tokenizer.from_str(json.dumps(bare))
            added = [re.escape(str(token["content"])) for token in json.loads(source)["added_tokens"]]
            self._controls = re.compile("|".join(sorted(added, key=len, reverse=True)) or "(?!)")
        except Exception as error:  # the library raises bare Exception on a malformed file
            raise ModelError(f"{name or 'this'} is not a tokenizer", cause=str(error)) from error

    @classmethod
    def load(cls, folder: Path) -> SafeTokenizer:
        """Errors: ModelError."""
        try:
            return cls((folder / "tokenizer.json").read_text(encoding="utf-8"), str(folder))
        except OSError as error:
            raise ModelError(f"no tokenizer in {folder}", cause=str(error), hint="tokenizer.json is missing") from error

    @contextlib.contextmanager
    def formatting(self, texts: Iterable[str] = ()) -> Iterator[None]:
        """Inside, what this thread encodes is a format's, around `texts`."""
        given = frozenset(part for text in texts for part in (text, text.strip()))
        self._now.spelled = frozenset(found for text in given for found in self._controls.findall(text))
        self._now.texts = given
        try:
            yield
        finally:
            self._now.texts = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Of a text: no id of it is an added token's."""
        texts, spelled = self._now.texts, self._now.spelled
        if texts is None or text in texts:
            return list(self._bare.encode(text, add_special_tokens=False).ids)
        if not spelled or not self._controls.sub("", text):
            return list(self._whole.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        start = 0
        for match in self._controls.finditer(text):
            if match[0] not in spelled:
                ids += [*self._bare.encode(text[start : match.start()]).ids, self.control(match[0])]
                start = match.end()
        return [*ids, *self._bare.encode(text[start:]).ids]

    def encode_format(self, text: str) -> np.ndarray:
        """[n] int32, of what a format writes: added tokens are added tokens."""
        return np.array(self._whole.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: object) -> str:
        return str(self._whole.decode([int(number) for number in ids], skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._whole.token_to_id(token)

    def pieces(self) -> dict[str, int]:
        """Piece -> id, without added tokens."""
        return dict(self._bare.get_vocab(with_added_tokens=False))

    def control(self, token: str) -> int:
        """Errors: ModelError if there is no such token."""
        number = self._whole.token_to_id(token)
        if number is None:
            raise ModelError(f"the tokenizer {self.name_or_path} has no token {token!r}")
        return int(number)


@functools.cache
def load_cached(folder: str) -> Tokenizer:
    """One shared tokenizer a folder."""
    return Tokenizer.load(folder)
