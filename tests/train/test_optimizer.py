from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.errors import ModelError
from etude.train.optimizer import Masters, from_stored, output_scales, to_stored
from etude.train.recipe import TrainRecipe
from etude.weights.pieces import DTYPES
from tiny import ALL, tiny_model


def masters(family: str = "qwen3_moe", publish_dtype: str = "float32", **recipe: object) -> Masters:
    return Masters(tiny_model(family), TrainRecipe(**recipe), publish_dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(("publish_dtype", "name"), [("float32", "F32"), ("bfloat16", "BF16")])
def test_published_tensors_are_the_hub_tensors_in_the_published_rounding(publish_dtype: str, name: str) -> None:
    kept = masters(publish_dtype=publish_dtype)
    original = tiny_model("qwen3_moe").hub_tensors()
    published = kept.published()
    assert published.keys() == original.keys()
    for tensor, stored in ((original[key], published[key]) for key in original):
        assert stored.dtype == name
        assert stored.array.dtype == DTYPES[name]
        assert torch.equal(from_stored(stored), tensor.to(getattr(torch, publish_dtype)))


def test_a_buffer_is_published_unrounded_and_never_trained() -> None:
    kept = masters("deepseek_v3", "bfloat16")
    bias = next(name for name in kept.published() if name.endswith("e_score_correction_bias"))
    assert kept.published()[bias].dtype == "F32"
    assert not any(name.endswith("e_score_correction_bias") for name in kept.tensors)


def test_masters_in_sixteen_bits_are_refused() -> None:
    with pytest.raises(ModelError, match="bfloat16"):
        Masters(tiny_model("qwen3", dtype="bfloat16"), TrainRecipe(), "bfloat16")


def test_the_gradient_is_clipped_to_its_global_norm_and_adamw_is_torchs_own() -> None:
    kept = masters("llama", lr=0.1, clip_norm=0.5, weight_decay=0.0)
    twin = tiny_model("llama").network.requires_grad_(True)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.0)
    network = kept._model.network
    for model in (network, twin):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.01 * (number + 1))
    norm = float(torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5))
    assert norm > 0.5
    assert kept.step() == pytest.approx(norm)
    reference.step()
    for ours, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", ALL)
def test_the_output_scale_is_the_last_norm(family: str) -> None:
    (name,) = output_scales(tiny_model(family))
    assert name.endswith("model.norm.weight")


def test_the_output_scale_moves_as_one_number_at_its_own_rate_and_nothing_else_changes() -> None:
    kept, plain = (masters("qwen3", lr=1e-3, weight_decay=0.0, output_scale_rate=rate) for rate in (50.0, 1.0))
    (name,) = output_scales(tiny_model("qwen3"))
    before = kept.tensors[name].detach().clone()
    for each in (kept, plain):
        for number, parameter in enumerate(each._model.network.parameters()):
            parameter.grad = torch.linspace(-1, 1.5, parameter.numel()).view(parameter.shape) * 1e-3 * (number + 1)
    assert kept.step() == plain.step()
    torch.testing.assert_close(kept.tensors[name], before - 0.05 * before.sign(), rtol=1e-4, atol=1e-6)
    assert len({round(float(step), 5) for step in (plain.tensors[name] - before).detach()}) > 1
    for other, tensor in kept.tensors.items():
        assert torch.equal(tensor, plain.tensors[other]) == (other != name)


def test_a_learning_rate_of_nothing_leaves_the_output_scale() -> None:
    kept = masters("qwen3", lr=0.0, output_scale_rate=50.0)
    before = {name: tensor.clone() for name, tensor in kept.tensors.items()}
    for parameter in kept._model.network.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept.tensors.items())


def test_state_of_another_model_is_refused_and_changes_nothing() -> None:
    kept, other = masters("qwen3"), masters("qwen3", lr=1.0)
    before = {name: tensor.clone() for name, tensor in kept.tensors.items()}
    state = other.state()
    first = next(name for name in state if name.startswith("master/"))
    state[first] = state[first][:-1]
    with pytest.raises(ModelError, match="belongs to another model"):
        kept.restore(state)
    with pytest.raises(ModelError, match="belongs to another model"):
        kept.restore(masters("llama").state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept.tensors.items())


def test_a_tensor_comes_back_from_its_stored_form() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(3, 4).to(dtype)
        assert torch.equal(from_stored(to_stored(tensor.t())), tensor.t())
    assert to_stored(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)).array.tolist() == [0x3F80, 0xC000]
    assert np.shares_memory(to_stored(t := torch.zeros(3)).array, t.numpy())
