"""Packing: samples -> micro-batches of about equal cost, each one flat row of tokens.

    samples of a group --same prompt, same prompt routes--> tree     prompt | member | member | ...
    trees --first fit by cost--> micro-batches                       tree | tree | ...

A tree computes a prompt once for all members that share it: a member's tokens see the prompt and their own earlier
tokens, at the positions that they had alone, so that result and gradient are those of separate rows (docs/semantics.md
4.4, 7.1). Whoever's prompt took other routes gets a tree of its own, counted in `Packed.split_groups`.

Loss positions are listed, not masked: the forward of token `sources[j]` predicts `targets[j]`, so that the last prompt
token can predict the first token of every member. Tokens after a sample's last loss position are dropped, for nothing
depends on them. Cost counts tokens, and pairs of tokens that attend to each other times `pair_cost`.

numpy alone, pure, and deterministic: equal samples give equal micro-batches. What it does not do: cut a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from etude.errors import RunError
from etude.types import Sample


@dataclass(frozen=True, slots=True)
class Tree:
    """Where one prompt and those who share it lie in the row: prompt first, then the members, back to back."""

    start: int
    prompt: int
    """Tokens of the prompt; 1 or more."""
    members: tuple[int, ...]
    """Tokens of each member after the prompt; 0 for one whose only loss position is at the prompt's end."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward. `tokens` is the row's length, `targets` the number of loss positions."""

    ids: np.ndarray
    """[tokens] int64."""
    positions: np.ndarray
    """[tokens] int64: the token's place in its own sample."""
    trees: tuple[Tree, ...]
    experts: np.ndarray | None
    """[tokens, moe_layers, top_k] int64; None if no sample has routes."""
    valid: np.ndarray
    """[tokens] bool: where `experts` was recorded."""
    sources: np.ndarray
    """[targets] int64: row index of the token whose forward predicts the target."""
    targets: np.ndarray
    """[targets] int64: id that was sampled."""
    advantages: np.ndarray
    """[targets] float32."""
    logprobs: np.ndarray
    """[targets] float32: behaviour log-probs (mu)."""
    samples: np.ndarray
    """[targets] int64: number of the sample in the batch."""
    places: np.ndarray
    """[targets] int64: index of the target in its sample."""


@dataclass(frozen=True, slots=True)
class Packed:
    """All micro-batches of a batch, and what sharing saved."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    """Tokens that go through the network."""
    unshared_tokens: int
    """What it would be without sharing prompts."""
    split_groups: int
    """Groups whose equal prompts could not be shared because their routes differ."""


@dataclass(slots=True)
class _Bundle:
    """Samples that share a prompt, while trees are being made. Lengths in tokens."""

    prompt: int
    numbers: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def cost(self, pair_cost: float) -> float:
        own = sum(n * (self.prompt + (n + 1) / 2) for n in self.lengths)
        pairs = self.prompt * (self.prompt + 1) / 2 + own
        return self.prompt + sum(self.lengths) + pair_cost * pairs


def pack(samples: Sequence[Sample], *, max_cost: float, pair_cost: float) -> Packed:
    """Micro-batches whose cost is at most `max_cost`, except for a sample that alone costs more.

    `pair_cost`: what a pair of attending tokens costs, in tokens: about 1 / (6 * hidden size) for a transformer.
    Errors: RunError for a sample that cannot be trained on, naming its origin.
    """
    spans = [_span(sample) for sample in samples]
    bundles, split_groups = _bundles(samples, spans, max_cost, pair_cost)
    order = sorted(range(len(bundles)), key=lambda i: (-bundles[i].cost(pair_cost), i))
    bins: list[tuple[float, list[_Bundle]]] = []
    for index in order:
        bundle = bundles[index]
        cost = bundle.cost(pair_cost)
        for place, (used, inside) in enumerate(bins):
            if used + cost <= max_cost:
                bins[place] = (used + cost, [*inside, bundle])
                break
        else:
            bins.append((cost, [bundle]))
    micro_batches = tuple(_micro_batch(samples, spans, inside) for _, inside in bins)
    return Packed(
        micro_batches=micro_batches,
        tokens=sum(len(micro.ids) for micro in micro_batches),
        unshared_tokens=sum(end for _, end in spans),
        split_groups=split_groups,
    )


def _span(sample: Sample) -> tuple[int, int]:
    """(prompt, rows): tokens before the first sampled one, and tokens whose forward is needed at all."""
    origin = f"sample {sample.origin.key}/{sample.origin.member}/{sample.origin.context}"
    n = len(sample.ids)
    if not len(sample.mask) == len(sample.logprobs) == n:
        raise RunError(f"{origin} is malformed", cause="ids, mask and log-probs differ in length")
    if sample.routes is not None and not len(sample.routes.experts) == len(sample.routes.valid) == n - 1:
        raise RunError(f"{origin} is malformed", cause=f"{len(sample.routes.experts)} route rows for {n} tokens")
    sampled = np.flatnonzero(sample.mask)
    if len(sampled) == 0 or sampled[0] == 0:
        cause = "it has no sampled token" if len(sampled) == 0 else "its first token has nothing before it"
        raise RunError(f"{origin} cannot be trained on", cause=cause)
    return int(sampled[0]), int(sampled[-1])


def _bundles(
    samples: Sequence[Sample], spans: Sequence[tuple[int, int]], max_cost: float, pair_cost: float
) -> tuple[list[_Bundle], int]:
    """Group the samples by group, prompt and prompt routes, in order of first appearance; cut what costs too much."""
    found: dict[tuple[str, bytes, bytes], list[_Bundle]] = {}
    for number, (sample, (prompt, rows)) in enumerate(zip(samples, spans, strict=True)):
        key = (sample.origin.key, sample.ids[:prompt].tobytes(), _routes_key(sample, prompt))
        bundles = found.setdefault(key, [_Bundle(prompt)])
        bundle = bundles[-1]
        bundle.numbers.append(number)
        bundle.lengths.append(rows - prompt)
        if len(bundle.numbers) > 1 and bundle.cost(pair_cost) > max_cost:
            bundle.numbers.pop()
            bundle.lengths.pop()
            bundles.append(_Bundle(prompt, [number], [rows - prompt]))
    ways: dict[tuple[str, bytes], int] = {}
    for group, ids, _ in found:
        ways[group, ids] = ways.get((group, ids), 0) + 1
    return [bundle for bundles in found.values() for bundle in bundles], sum(count > 1 for count in ways.values())


def _routes_key(sample: Sample, prompt: int) -> bytes:
    if sample.routes is None:
        return b""
    valid = sample.routes.valid[:prompt]
    experts = np.where(valid[:, None, None], sample.routes.experts[:prompt], 0)
    return valid.tobytes() + experts.tobytes()


def _micro_batch(samples: Sequence[Sample], spans: Sequence[tuple[int, int]], bundles: Sequence[_Bundle]) -> MicroBatch:
    rows: list[tuple[int, int, int]] = []
    """(sample, from, to): pieces of samples, in the order of the row."""
    trees: list[Tree] = []
    columns: list[tuple[np.ndarray, ...]] = []
    at = 0
    for bundle in bundles:
        trees.append(Tree(at, bundle.prompt, tuple(bundle.lengths)))
        rows.append((bundle.numbers[0], 0, bundle.prompt))
        member = at + bundle.prompt
        for number, length in zip(bundle.numbers, bundle.lengths, strict=True):
            rows.append((number, bundle.prompt, bundle.prompt + length))
            columns.append(_targets(samples[number], number, bundle.prompt, at, member))
            member += length
        at = member
    ids = np.concatenate([samples[number].ids[start:end] for number, start, end in rows]).astype(np.int64)
    experts, valid = _routes(samples, rows)
    joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
    return MicroBatch(
        ids=ids,
        positions=np.concatenate([np.arange(start, end) for _, start, end in rows]),
        trees=tuple(trees),
        experts=experts,
        valid=valid,
        sources=joined[0],
        targets=joined[1],
        advantages=joined[2],
        logprobs=joined[3],
        samples=joined[4],
        places=joined[5],
    )


def _targets(sample: Sample, number: int, prompt: int, start: int, member: int) -> tuple[np.ndarray, ...]:
    """Columns sources .. places of one sample whose prompt lies at `start` and whose own tokens lie at `member`."""
    places = np.flatnonzero(sample.mask)
    before = places - 1
    sources = np.where(before < prompt, start + before, member + before - prompt)
    count = len(places)
    return (
        sources,
        sample.ids[places].astype(np.int64),
        np.full(count, sample.advantage, np.float32),
        sample.logprobs[places].astype(np.float32),
        np.full(count, number),
        places,
    )


def _routes(samples: Sequence[Sample], rows: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray | None, np.ndarray]:
    """experts and valid of the row; where a sample has no routes, `valid` is False."""
    recorded = [routes for number, _, _ in rows if (routes := samples[number].routes) is not None]
    shape = recorded[0].experts.shape[1:] if recorded else None
    experts, valid = [], []
    for number, start, end in rows:
        routes = samples[number].routes
        if routes is None:
            valid.append(np.zeros(end - start, bool))
            if shape is not None:
                experts.append(np.zeros((end - start, *shape), np.int64))
        else:
            valid.append(routes.valid[start:end].astype(bool))
            experts.append(routes.experts[start:end].astype(np.int64))
    return (np.concatenate(experts) if shape is not None else None), np.concatenate(valid)
