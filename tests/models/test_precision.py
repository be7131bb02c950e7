"""Emulated int8 and NVFP4: every number is one that the format has, and the nearest of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from etude.errors import ModelError
from etude.models.precision import BLOCK, emulate, round_int8, round_nvfp4
from tiny import random_ids, tiny_model

GRID = sorted({sign * value for sign in (-1, 1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)})


def rows(count: int = 64, width: int = 64) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=draw) * torch.logspace(-3, 2, count)[:, None]


def test_int8_holds_255_steps_of_a_row_and_takes_the_nearest() -> None:
    x = rows()
    found = round_int8(x)
    step = x.abs().amax(-1, keepdim=True) / 127
    units = found / step
    assert (units - units.round()).abs().max() < 1e-3
    assert bool(((found - x).abs() <= step / 2 * 1.0001).all())
    assert not round_int8(torch.zeros(2, 8)).any()


def test_nvfp4_takes_the_nearest_number_of_its_grid_in_every_block() -> None:
    x = rows(16)
    found = round_nvfp4(x)
    for row, near in zip(x, found, strict=True):
        for start in range(0, 64, BLOCK):
            block, got = row[start : start + BLOCK], near[start : start + BLOCK]
            peak = row.abs().max() / (6 * 448)
            scale = float((block.abs().max() / (6 * peak)).to(torch.float8_e4m3fn).float() * peak)
            wanted = [min((abs(float(value) - unit * scale), unit * scale) for unit in GRID)[0] for value in block]
            assert torch.allclose(
                (got - block).abs(), torch.tensor(wanted), rtol=1e-4, atol=1e-6 * float(row.abs().max())
            )


def test_what_the_grid_has_stays() -> None:
    x = torch.tensor(list(itertools.islice(itertools.cycle(GRID), 32)))[None] * 448
    assert torch.equal(round_nvfp4(x), x)
    assert not round_nvfp4(torch.zeros(1, 16)).any()
    assert round_nvfp4(x.bfloat16()).dtype == torch.bfloat16


def test_a_token_is_rounded_alone() -> None:
    x = rows()
    assert torch.equal(round_nvfp4(x)[:3], round_nvfp4(x[:3]))


def test_rows_that_have_no_blocks_are_refused() -> None:
    with pytest.raises(ModelError, match="rows of 24 numbers"):
        round_nvfp4(torch.zeros(2, 24))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("precision", ["int8", "nvfp4"])
def test_an_emulated_network_is_near_the_exact_one_and_coarser_is_farther(family: str, precision: str) -> None:
    exact, ids = tiny_model(family, moe_intermediate_size=32, initializer_range=0.05), random_ids(40)[None]
    model = tiny_model(family, moe_intermediate_size=32, initializer_range=0.05)
    emulate(model, precision)
    with torch.no_grad():
        wanted, found = (one.network(ids, use_cache=False).logits.log_softmax(-1) for one in (exact, model))
    gap = float((wanted - found).abs().mean())
    low, high = {"int8": (1e-6, 1e-2), "nvfp4": (1e-4, 0.2)}[precision]
    assert low < gap < high
    routers = [name for name, _ in exact.network.named_parameters() if name.endswith("gate.weight")]
    for name in routers:
        assert torch.equal(exact.network.get_parameter(name), model.network.get_parameter(name))
