"""One step of the network over a mixed batch: requests that decode and stretches that are prefilled, in one flat row.

    sequences --plan--> ids, positions --network (attention.attend per layer)--> logits of the last tokens, routes

The network is transformers' own; what is ours is the attention function and the KV that it reads. A family whose
attention our function does not reproduce is refused before it serves (`check_family`).

What it does not do: sample, or decide what runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch

from etude.errors import ModelError
from etude.inference import attention
from etude.inference.fast import FastForward, supports
from etude.inference.kv import KVMemory, LayerShape
from etude.inference.requests import Sequence
from etude.models.load import Model
from etude.models.routers import routers
from etude.models.routing import Captured, capture, replay
from etude.types import Routes

TOLERANCE = 1e-3
"""Of log-probs between the engine's attention and the family's own, in float32; 30 times that in 16 bits."""
SCORE_ROWS = 512
"""Logits that `score` holds at once."""


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one sequence in this step: `count` of them from its context's `computed` on."""

    sequence: Sequence
    count: int


def use_engine_attention(model: Model, *, max_context: int, records_routes: bool = True) -> None:
    """Let the network attend through our function. Errors: ModelError for what that cannot do."""
    text = model.config.get_text_config()
    sliding = getattr(text, "sliding_window", None)
    layers = getattr(text, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"]
    odd = sorted({kind for kind in layers if kind not in ("full_attention", "sliding_attention")})
    if odd or ("sliding_attention" in layers and sliding and sliding < max_context):
        raise ModelError(
            f"the attention of {model.family!r} is not supported by engine kind torch",
            cause=f"it has {odd[0] if odd else f'a sliding window of {sliding} tokens'}",
            hint="use a family with full attention (docs/support.md)",
        )
    if records_routes:
        routers(model)  # refuses a mixture whose routes cannot be recorded
    model.network.set_attn_implementation(attention.NAME)


def layer_shapes(model: Model) -> list[LayerShape]:
    """What each attention layer keeps of a token, seen on one forward of one token."""
    shapes: dict[int, LayerShape] = {}

    def watch(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object,
              **options: object) -> tuple[torch.Tensor, None]:  # fmt: skip
        layer = module.layer_idx
        assert isinstance(layer, int)
        shapes[layer] = LayerShape(heads=key.shape[1], key_dim=key.shape[-1], value_dim=value.shape[-1])
        return attention.attend(module, query, key, value, None, **options)  # type: ignore[arg-type]

    attention.AttentionInterface.register("etude_engine_watch", watch)
    model.network.set_attn_implementation("etude_engine_watch")
    with torch.no_grad(), attention.using(None):
        model.network(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    model.network.set_attn_implementation(attention.NAME)
    if sorted(shapes) != list(range(len(shapes))) or not shapes:
        raise ModelError(f"{model.family!r} keeps its context elsewhere than in attention", hint="see docs/support.md")
    return [shapes[layer] for layer in range(len(shapes))]


class Forward:
    """Runs steps. Used by the engine's thread alone."""

    def __init__(self, model: Model, memory: KVMemory, *, use_fast: bool = True, records_routes: bool = True) -> None:
        """use_fast: take the fast path where the family has one; tests compare it with the other. records_routes:
        of a mixture of experts."""
        self.model = model
        self.memory = memory
        self._records = records_routes and model.num_moe_layers > 0
        self._fast = FastForward(model) if use_fast and supports(model) else None

    def step(self, decode: Items[Work], prefill: Items[Work]) -> torch.Tensor:
        """Compute the work and record its routes. decode: one token each, in the order of their slots.

        Returns logits [decode + prefill, vocabulary] after the last token of each work.
        """
        plan = self._plan(decode, prefill)
        work = [*decode, *prefill]
        ids = torch.from_numpy(np.concatenate([_ids(item) for item in work]).astype(np.int64))
        positions = torch.from_numpy(np.concatenate([_positions(item) for item in work]))
        ends = np.cumsum([item.count for item in work]) - 1
        if self._fast is not None:
            logits, experts = self._fast(ids, positions, torch.from_numpy(ends), plan)
        else:
            logits, experts = self._plain(ids, positions, torch.from_numpy(ends), plan)
        if self._records and experts is not None:
            _record(work, ends, experts.numpy())
        return logits

    def refresh(self) -> None:
        """After the parameters changed."""
        if self._fast is not None:
            self._fast.refresh()

    def _plain(
        self, ids: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor, plan: attention.Plan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """By transformers' modules."""
        with attention.using(plan), self._captured() as routes:
            logits = self.model.network(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=ends
            ).logits[0]
        return logits, None if routes is None else routes.experts()

    def _captured(self) -> contextlib.AbstractContextManager[Captured | None]:
        return capture(self.model) if self._records else contextlib.nullcontext()

    def score(self, ids: np.ndarray, routes: Routes | None) -> tuple[np.ndarray, Routes | None]:
        """See protocols.Engine.score."""
        length = len(ids)
        with attention.using(None), torch.inference_mode():
            if routes is None or not self._records:
                hidden, experts = self._hidden(ids)
            else:
                forced, valid = _all_rows(routes, length)
                with replay(self.model, forced, valid):
                    hidden, experts = self._hidden(ids)
            head = self.model.network.get_output_embeddings()
            logprobs = np.zeros(length, np.float32)
            for start in range(0, length - 1, SCORE_ROWS):
                end = min(start + SCORE_ROWS, length - 1)
                targets = torch.from_numpy(ids[start + 1 : end + 1].astype(np.int64))[:, None]
                rows = head(hidden[start:end]).float().log_softmax(dim=-1).gather(-1, targets)
                logprobs[start + 1 : end + 1] = rows[:, 0].numpy()
        if experts is None:
            return logprobs, None
        taken = experts[: length - 1].astype(route_dtype(self.model))
        return logprobs, Routes(experts=taken, valid=np.ones(length - 1, bool))

    def _hidden(self, ids: np.ndarray) -> tuple[torch.Tensor, np.ndarray | None]:
        with self._captured() as routes:
            body = self.model.network.base_model
            output = body(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
        return output.last_hidden_state[0], None if routes is None else routes.experts().numpy()

    def _plan(self, decode: Items[Work], prefill: Items[Work]) -> attention.Plan:
        return attention.Plan(self.memory, [_span(work) for work in decode], [_span(work) for work in prefill])


def route_dtype(model: Model) -> type[np.generic]:
    """1 byte up to 256 experts, else 2."""
    return np.uint8 if model.num_experts <= 256 else np.int16


def _span(work: Work) -> attention.Span:
    context = work.sequence.context
    assert context is not None
    assert context.slot is not None
    return attention.Span(
        slot=context.slot.index,
        start=context.computed - context.base,
        count=work.count,
        parent=context.parent.index if context.parent is not None else 0,
        base=context.base,
    )


def _ids(item: Work) -> np.ndarray:
    context = item.sequence.context
    assert context is not None
    return context.ids[context.computed : context.computed + item.count]


def _positions(item: Work) -> np.ndarray:
    context = item.sequence.context
    assert context is not None
    return np.arange(context.computed, context.computed + item.count)


def _record(work: Items[Work], ends: np.ndarray, experts: np.ndarray) -> None:
    """Write the chosen experts [tokens, moe_layers, top_k] into the contexts' rows."""
    for item, end in zip(work, ends.tolist(), strict=True):
        context = item.sequence.context
        assert context is not None
        assert context.routes is not None
        start = end + 1 - item.count
        context.routes[context.computed : context.computed + item.count] = experts[start : end + 1]


def _all_rows(routes: Routes, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes of length - 1 rows, extended by a row without a route. Errors: ModelError if the rows do not fit."""
    if routes.experts.ndim != 3 or routes.valid.shape != (length - 1,) or len(routes.experts) != length - 1:
        raise ModelError("the routes do not fit the ids", cause=f"{len(routes.experts)} rows for {length} ids")
    experts = np.concatenate([routes.experts, np.zeros((1, *routes.experts.shape[1:]), routes.experts.dtype)])
    valid = np.concatenate([routes.valid, [False]])
    return torch.from_numpy(experts.astype(np.int64)), torch.from_numpy(valid.astype(bool))
