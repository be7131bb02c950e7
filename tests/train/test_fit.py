"""Fitting a small network: the quick forward is the plain one, and a fit goes on where it stopped."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.data.corpus import FILE, FIX, UNTRAINED, Corpus, Document, join
from etude.errors import RunError
from etude.models.load import Model, model_from_config
from etude.models.nano import NanoShape, nano_config
from etude.train.fit import Fit, micro_batches, pack, rate
from etude.train.muon import orthogonalize
from etude.train.pretrain_recipe import ScheduleSettings

SHAPE = NanoShape(
    hidden=32, layers=2, heads=2, head_dim=16, experts=4, intermediate=16, context_tokens=64, vocab_size=40
)
SCHEDULE = ScheduleSettings(wall_s=2.0, batch_tokens=200, micro_tokens=64, evaluate_every_s=0.5, ranks=1)


class Rows:
    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, float]]] = []

    def record(self, kind: str, row: dict[str, float]) -> None:
        self.rows.append((kind, dict(row)))


def model(shape: NanoShape = SHAPE) -> Model:
    return model_from_config(nano_config(shape, pad_id=0, begin_id=1, end_id=8), seed=0)


def corpus(count: int = 40) -> Corpus:
    """Each document ends as it begins: what the repair is can be learned."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        head = rng.integers(10, 40, size=rng.integers(5, 15))
        ids = np.concatenate([head, [9], head[:2], [8]]).astype(np.uint16)
        marks = np.where(np.arange(len(ids)) > len(head), FIX, FILE).astype(np.uint8)
        made.append(Document(ids=ids, marks=marks))
    return join(made, "copies")


def test_a_gradient_is_that_of_the_documents_one_by_one(tmp_path: Path) -> None:
    made = corpus(6)
    fit = Fit(model(), made, SCHEDULE, tmp_path / "checkpoint.pt")
    packed = pack(made, list(range(6)))
    weights = (packed.marks != UNTRAINED).astype(np.float32)
    grads, (loss, _) = fit._gradients(packed, weights, 0.0)
    network = fit.model.network
    network.zero_grad()
    total = 0.0
    for number in range(6):
        ids = torch.from_numpy(made.ids[made.starts[number] : made.starts[number + 1]].astype(np.int64))
        logits = network(ids[None]).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
        each.backward()
        total += each.item()
    assert loss == pytest.approx(total, rel=1e-5)
    for mine, param in zip(grads, network.parameters(), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(mine, param.grad, rtol=1e-4, atol=1e-5 * float(param.grad.abs().max()) + 1e-7)


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(3, 24, 8, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_the_rate_rises_stays_and_falls_to_zero() -> None:
    schedule = ScheduleSettings(warmup_share=0.1, decay_share=0.5)
    assert [round(rate(share, schedule), 3) for share in (0.0, 0.05, 0.1, 0.5, 0.75, 1.0, 1.1)] == [
        0, 0.5, 1, 1, 0.5, 0, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_micro_batches_hold_every_document_once_and_are_of_like_size(multiple: int) -> None:
    made = corpus()
    rows = micro_batches(made, list(range(len(made))), 64, multiple)
    assert sorted(itertools.chain(*rows)) == list(range(len(made)))
    assert len(rows) % multiple == 0
    sizes = [sum(int(made.starts[number + 1] - made.starts[number]) for number in row) for row in rows]
    longest = int(np.diff(made.starts).max())
    assert max(sizes) - min(sizes) <= 2 * longest
    assert max(sizes) <= 64 + longest


def test_there_are_no_more_micro_batches_than_documents() -> None:
    made = corpus(3)
    assert sorted(map(len, micro_batches(made, [0, 1, 2], 1, 2))) == [1, 1, 1]


def test_no_document_predicts_the_next_ones_first_token() -> None:
    made = corpus(3)
    packed = pack(made, [2, 0, 1])
    ends = [tree.start + tree.members[0] - 1 for tree in packed.trees]
    assert (packed.marks[ends] == UNTRAINED).all()
    assert int((packed.marks != UNTRAINED).sum()) == len(made.ids) - 3
    assert packed.ids[: len(made.ids) - int(made.starts[2])].tolist() == made.ids[made.starts[2] :].tolist()


def test_a_fit_learns_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    made, rows = corpus(), Rows()
    first = Fit(model(), made, SCHEDULE, tmp_path / "checkpoint.pt")
    _, _, untrained = first._probe(made, list(range(len(made))))
    first.run(made, rows, lambda share: None)
    probes = [row for kind, row in rows.rows if kind == "probe"]
    assert probes[-1]["fix_nll"] < untrained.mean()
    again = Fit(model(), made, SCHEDULE, tmp_path / "checkpoint.pt")
    assert again.state == first.state
    for mine, theirs in zip(again.params, first.params, strict=True):
        assert torch.equal(mine, theirs)


def test_measured_exactness_is_that_of_greedy_decoding(tmp_path: Path) -> None:
    made = corpus(12)
    fit = Fit(model(), made, SCHEDULE, tmp_path / "checkpoint.pt")
    fit.run(made, Rows(), lambda share: None)
    exact, _, _ = fit._probe(made, list(range(12)))
    for number in range(12):
        ids = made.ids[made.starts[number] : made.starts[number + 1]].astype(np.int64)
        tokens = torch.from_numpy(ids[:-3])[None]
        for _ in range(3):
            tokens = torch.cat([tokens, fit.model.network(tokens).logits[:, -1:].argmax(-1)], dim=1)
        assert bool(exact[number]) == (tokens[0, :-1].tolist() == ids[:-1].tolist())


def test_a_damaged_checkpoint_and_an_empty_corpus_are_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(RunError, match=r"cannot continue from .*checkpoint\.pt"):
        Fit(model(), corpus(), SCHEDULE, path)
    with pytest.raises(RunError, match="holds no documents"):
        Fit(model(), join([], "nothing"), SCHEDULE, tmp_path / "other.pt")
