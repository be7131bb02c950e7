"""Which chat format a model folder has: the nano's own, a known family's, or the one that its template says.

    tokenizer.json with <|arg|>           NanoRenderer
    config.json of a family by name       families.py, by the package `renderers`
    chat_template                         template.py

What it does not do: guess. A folder without any of these is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.data.families import NAMES, FamilyRenderer
from etude.data.render import NANO_TOOLS, NanoRenderer, Renderer
from etude.data.template import TemplateRenderer
from etude.data.tokenizer import SafeTokenizer, load_cached
from etude.errors import ModelError

_MARKS = {
    "qwen3": "<tool_call>",
    "qwen3_moe": "<tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "kimi_k25": "<|tool_calls_section_begin|>",
    "deepseek_v3": "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "glm4_moe": "<|assistant|>",
    "gpt_oss": "<|channel|>",
    "llama": "<|start_header_id|>",
}
"""model_type -> a token that a tokenizer of that format has: a fine-tuned Llama may speak another format."""


class ChatFormat:
    """Of the model in one folder: its vocabulary is read once, and each list of tools has a renderer of its own."""

    def __init__(self, folder: Path, *, thinking: str = "keep") -> None:
        """Errors: ModelError for a format that is not known."""
        self._folder, self._thinking = folder, thinking
        self._tokenizer = SafeTokenizer.load(folder)
        config, settings = _read(folder / "config.json"), _read(folder / "tokenizer_config.json")
        template, kind = _template(folder, settings), str(config.get("model_type", ""))
        if template and "<function=" in template:  # Qwen3-Coder: a Qwen3 with another format
            kind = ""
        self._is_nano = self._tokenizer.convert_tokens_to_ids("<|arg|>") is not None
        is_family = kind in NAMES and self._tokenizer.convert_tokens_to_ids(_MARKS[kind]) is not None
        self._family = NAMES[kind] if is_family else ""
        self._template_text = template
        self._specials = {
            name: _text(settings[name]) for name in ("bos_token", "eos_token", "pad_token") if settings.get(name)
        }
        self.max_context = int(config.get("max_position_embeddings") or 0)
        """Tokens of a window, as the model's config has it; 0: it does not say."""
        if self._is_nano or self._family:
            return
        if not template:
            raise ModelError(f"{folder} has no chat format", cause="no chat_template", hint="use an instruct model")
        if "eos_token" not in self._specials:
            raise ModelError(f"{folder} does not say what ends a reply", cause="no eos_token in tokenizer_config.json")

    def renderer(self, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        """tools: JSON schemas. Errors: ModelError if the format cannot speak of them."""
        if self._is_nano:
            return _nano(self._folder, tools)
        if self._family:
            return FamilyRenderer(self._family, self._tokenizer, tools, thinking=self._thinking)
        return TemplateRenderer(
            self._tokenizer, self._template_text, tools, specials=self._specials,
            stop_tokens=[self._specials["eos_token"]],
        )  # fmt: skip


def open_renderer(folder: Path, tools: Sequence[Mapping[str, Any]], *, thinking: str = "keep") -> Renderer:
    """The chat format of the model in `folder`. tools: JSON schemas. Errors: ModelError for one that is not known."""
    return ChatFormat(folder, thinking=thinking).renderer(tools)


def _nano(folder: Path, tools: Sequence[Mapping[str, Any]]) -> Renderer:
    names = [str(tool["name"]) for tool in tools]
    if unknown := [name for name in names if name not in NANO_TOOLS]:
        raise ModelError(
            f"{folder} does not know the tool {unknown[0]}", hint=f"agent.tools may hold {', '.join(NANO_TOOLS)}"
        )
    return NanoRenderer(load_cached(str(folder)), {name: NANO_TOOLS[name] for name in names})


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template") or ""
    if isinstance(found, list):  # several by name
        named = {entry.get("name"): entry.get("template", "") for entry in found if isinstance(entry, dict)}
        found = named.get("tool_use") or named.get("default") or ""
    return str(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged", cause=str(error), hint="copy the model again") from error
    return found if isinstance(found, dict) else {}


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
