"""Loading: what comes in is what the files hold, under hub names; anything wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from etude.errors import ModelError
from etude.models.load import TEXT_PARTS, Model, load_model, model_from_config
from tiny import ALL, random_ids, tiny_config, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen3_moe").network.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", [family for family in ALL if family not in TEXT_PARTS])
def test_save_and_load_is_bitwise_equal_and_hub_names_are_those_of_the_file(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.network.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = load_model(str(tmp_path)).hub_tensors()
    assert loaded.keys() == stored.keys() == model.hub_tensors().keys()
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor), name
        assert torch.equal(model.hub_tensors()[name], tensor), name


def write_kimi(folder: Path) -> Model:
    """A checkpoint in the layout of the hub's: language model, tower of images, projector."""
    model = tiny_model("kimi_k25")
    stored = {name: tensor.clone() for name, tensor in model.hub_tensors().items()}
    stored["vision_tower.patch_embed.proj.weight"] = torch.zeros(16, 3, 14, 14)
    stored["mm_projector.proj.0.weight"] = torch.zeros(64, 64)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    tiny_config("kimi_k25").save_pretrained(folder)
    return model


def test_of_a_model_of_images_and_text_the_language_model_is_loaded(tmp_path: Path) -> None:
    model = write_kimi(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.family == "kimi_k25"
    assert loaded.hub_tensors().keys() == model.hub_tensors().keys()
    assert all(name.startswith("language_model.") for name in loaded.hub_tensors())
    assert all(torch.equal(loaded.hub_tensors()[name], tensor) for name, tensor in model.hub_tensors().items())


def test_it_computes_what_transformers_computes_with_the_whole_checkpoint(tmp_path: Path) -> None:
    write_kimi(tmp_path)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = random_ids(40)[None]
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
        assert torch.equal(load_model(str(tmp_path)).network(ids).logits, expected)


def test_a_text_part_that_lacks_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    write_kimi(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["language_model.model.layers.1.mlp.gate.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing: 'model\.layers\.1\.mlp\.gate\.weight'"):
        load_model(str(tmp_path))


def test_a_text_part_that_is_quantized_is_refused_with_its_method(tmp_path: Path) -> None:
    write_kimi(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    _change_config(tmp_path, text_config={**text, "quantization_config": {"quant_method": "compressed-tensors"}})
    with pytest.raises(ModelError, match="compressed-tensors"):
        load_model(str(tmp_path))


def test_a_sharded_folder_loads_the_same(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.network.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load_model(str(tmp_path)).hub_tensors()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.hub_tensors().items())


def test_hub_tensors_are_views_so_that_writing_them_changes_what_the_network_computes() -> None:
    model = tiny_model("qwen3_moe")
    ids = random_ids(7)[None]
    with torch.no_grad():
        before = model.network(ids).logits
        for name, tensor in model.hub_tensors().items():
            if ".experts." in name:
                tensor.zero_()
        after = model.network(ids).logits
    assert not torch.equal(before, after)


def test_tied_embeddings_are_published_once() -> None:
    assert "lm_head.weight" not in tiny_model("qwen3").hub_tensors()
    assert "lm_head.weight" in tiny_model("llama").hub_tensors()


def test_assign_moves_a_whole_version_over_and_keeps_ties() -> None:
    old, new = tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2)
    ids = random_ids(9)[None]
    old.assign({name: tensor.clone() for name, tensor in new.hub_tensors().items()})
    with torch.no_grad():
        assert torch.equal(old.network(ids).logits, new.network(ids).logits)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "dtype"])
def test_assign_refuses_what_does_not_fit_and_changes_nothing(damage: str) -> None:
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.hub_tensors().items()}
    tensors = {name: tensor + 1 for name, tensor in before.items()}
    last = list(tensors)[-1]
    if damage == "missing":
        del tensors[last]
    elif damage == "extra":
        tensors["model.stranger"] = torch.zeros(1)
    elif damage == "shape":
        tensors[last] = tensors[last][:-1]
    else:
        tensors[last] = tensors[last].double()
    with pytest.raises(ModelError, match=r"model\.stranger" if damage == "extra" else last.replace(".", r"\.")):
        model.assign(tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.hub_tensors().items())


def test_bfloat16_keeps_the_router_bias_in_float32(tmp_path: Path) -> None:
    tiny_model("deepseek_v3").network.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="bfloat16").hub_tensors()
    bias = next(name for name in loaded if name.endswith("e_score_correction_bias"))
    assert loaded[bias].dtype == torch.float32
    assert loaded["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_float32_tensor_of_a_16_bit_checkpoint_is_not_rounded_silently(tmp_path: Path) -> None:
    tiny_model("llama", dtype="bfloat16").network.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.norm.weight"] = stored["model.norm.weight"].float()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        load_model(str(tmp_path), dtype="bfloat16")
    assert load_model(str(tmp_path)).hub_tensors()["model.norm.weight"].dtype == torch.float32


def test_the_same_seed_gives_the_same_new_model_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two = (model_from_config(tiny_config("llama"), seed=3).hub_tensors() for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_counts_describe_the_mixture() -> None:
    moe, dense = tiny_model("qwen3_moe"), tiny_model("llama")
    assert (moe.num_moe_layers, moe.num_experts, moe.top_k) == (3, 4, 2)
    assert (dense.num_moe_layers, dense.num_experts, dense.top_k) == (0, 0, 0)
    assert moe.vocab_size == 97
    assert moe.max_context == 128


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "not a model"])
def test_a_missing_folder_is_named(path: str) -> None:
    with pytest.raises(ModelError, match="no model at"):
        load_model(path)


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="float12"):
        load_model(str(folder), dtype="float12")


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="not a folder"):
        load_model(str(folder / "config.json"))


def test_a_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model(str(folder))


def test_a_damaged_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match="damaged"):
        load_model(str(folder))


def test_missing_weights_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        load_model(str(folder))


def test_a_cut_weights_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load_model(str(folder))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_model("llama").network.save_pretrained(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load_model(str(tmp_path))


@pytest.mark.parametrize("change", ["lack", "extra", "shape"])
def test_weights_that_do_not_fit_the_config_are_refused(folder: Path, change: str) -> None:
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.gate.weight"
    if change == "lack":
        del stored[name]
    elif change == "extra":
        name = "model.layers.9.mlp.gate.weight"
        stored[name] = torch.zeros(4, 32)
    else:
        stored[name] = torch.zeros(5, 32)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError):
        load_model(str(folder))


def test_a_quantized_checkpoint_is_refused_with_its_method(folder: Path) -> None:
    _change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match="gptq"):
        load_model(str(folder))


def test_an_unknown_architecture_is_refused_by_name(folder: Path) -> None:
    _change_config(folder, model_type="tarantella", auto_map={"AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(ModelError, match="tarantella"):
        load_model(str(folder))


def test_a_family_with_another_hub_layout_is_refused_by_name() -> None:
    from transformers import PhimoeConfig

    config = PhimoeConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    with pytest.raises(ModelError, match="phimoe"):
        model_from_config(config, seed=0)


def test_loading_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = load_model(str(folder))
    assert isinstance(model, Model)
    assert not model.network.training
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_smollm2_loads_and_round_trips(tmp_path: Path) -> None:
    from smollm2 import smollm2_folder

    model = load_model(str(smollm2_folder()))
    assert sum(tensor.numel() for tensor in model.hub_tensors().values()) == 134_515_008
    assert "lm_head.weight" not in model.hub_tensors()


def _change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
