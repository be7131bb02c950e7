"""Before an engine serves a model: does its attention over KV give what the family's own code gives?

A few tokens are prefilled, decoded and scored through the engine's path and compared with the network as transformers
runs it. A family that attends in a way which our function does not know (or keeps state elsewhere) fails here, by name,
and never serves a wrong distribution.
"""

from __future__ import annotations

import numpy as np
import torch

from etude.errors import ModelError
from etude.inference.contexts import ContextTable
from etude.inference.forward import Forward, Work
from etude.inference.requests import Sequence
from etude.models.load import Model
from etude.protocols import GenerateRequest
from etude.types import Version

LENGTH, PROMPT = 7, 4
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Of log-probs. A wrong mask or scale is far beyond it."""


def plain_logprobs(model: Model) -> torch.Tensor:
    """[LENGTH, vocabulary] of the probe text, by the network as it was loaded."""
    with torch.inference_mode():
        logits = model.network(input_ids=torch.from_numpy(_probe(model)).long()[None], use_cache=False).logits[0]
    return logits.float().log_softmax(dim=-1)


def check_family(forward: Forward, table: ContextTable, expected: torch.Tensor) -> None:
    """Errors: ModelError if the engine's path differs from `expected` (see `plain_logprobs`)."""
    model, ids = forward.model, _probe(forward.model)
    request = GenerateRequest(
        request_id="probe", context_id="probe", ids=ids[:PROMPT], max_new_tokens=LENGTH - PROMPT, stop_ids=()
    )
    sequence = Sequence(request, LENGTH, sink=None)
    context = table.open("probe", request.ids, LENGTH, Version(incarnation=0, n=0, step=0))
    assert context is not None
    sequence.context = context
    rows = []
    with torch.inference_mode():
        for end in range(PROMPT, LENGTH + 1):
            work = [Work(sequence, sequence.pending)]
            rows.append(forward.step([], work) if end == PROMPT else forward.step(work, []))
            context.computed = end
            if end < LENGTH:
                sequence.append(int(ids[end]), 0.0)
    table.forget("probe")
    context.is_busy = False
    table.forget("probe")
    decoded = torch.cat(rows).float().log_softmax(dim=-1)
    scored, _ = forward.score(ids, None)
    chosen = expected[:-1].gather(-1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0]
    worst = max(
        float((decoded - expected[PROMPT - 1 :]).abs().max()),
        float((torch.from_numpy(scored[1:]) - chosen).abs().max()),
    )
    if not worst < TOLERANCE[model.network.dtype]:
        raise ModelError(
            f"engine kind torch does not reproduce {model.family!r}",
            cause=f"log-probs of a probe differ by {worst:.2g}",
            hint="docs/support.md lists the families",
        )


def _probe(model: Model) -> np.ndarray:
    return (np.arange(1, LENGTH + 1) * 7919 % model.vocab_size).astype(np.int32)
