"""A Hugging Face causal language model from a folder, checked before anything runs on it.

Trainer and engine both start here. The network is transformers' own module, in eval mode. Experts are computed by its
grouped matrix multiplication, the default: on one CPU thread it is the only one that is good from one token to
thousands. What a version is made of goes through `Model.hub_tensors`.

What it does not do: run code that a checkpoint brings along, dequantize, or tokenize.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from etude.errors import ModelError
from etude.models.hub import hub_views, moe_layers
from etude.models.recipe import model_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TextPart:
    """Where a checkpoint of images and text keeps its language model; its other parts are left out."""

    prefix: str
    others: tuple[str, ...]


TEXT_PARTS = {"kimi_k25": TextPart(prefix="language_model.", others=("vision_tower.", "mm_projector."))}
"""By model_type; the language model is the causal LM of the config's `text_config`. transformers 5.24 reads the whole
of such a checkpoint but writes it under other names than it reads, so the part is taken out here."""


@dataclass(frozen=True, slots=True)
class HubPlace:
    """Where a hub tensor lies in the network: elements from `start` on of a parameter, flat."""

    parameter: str | None
    """None: a buffer."""
    start: int
    shape: tuple[int, ...]


class Model:
    """A network and what Etude knows about it.

    >>> model = load_model("etude-nano")
    >>> model.hub_tensors()["model.layers.0.mlp.up_proj.weight"].shape
    torch.Size([256, 128])
    """

    def __init__(self, network: PreTrainedModel, family: str = "") -> None:
        """family: the checkpoint's, where `network` is a part of it. Errors: ModelError if its layout is unknown."""
        self.network = network
        self.family = family or str(network.config.model_type)
        self.config: PreTrainedConfig = network.config
        self.num_moe_layers = len(moe_layers(network))
        text = network.config.get_text_config()
        self.num_experts = _first(text, ("num_experts", "num_local_experts", "n_routed_experts"), self.num_moe_layers)
        self.top_k = _first(text, ("num_experts_per_tok",), self.num_moe_layers)
        self.vocab_size = int(text.vocab_size)
        self.max_context = int(getattr(text, "max_position_embeddings", 0)) or 1 << 30
        """Tokens that one window may hold."""
        self.renew_views()

    def hub_tensors(self) -> dict[str, torch.Tensor]:
        """All parameters and persistent buffers under the hub checkpoint's names and shapes, as views."""
        return dict(self._views)

    def hub_places(self) -> dict[str, HubPlace]:
        """Where each hub tensor lies, by name. It holds for a sharded network too, if asked before sharding."""
        owners = {parameter.untyped_storage().data_ptr(): (name, parameter.storage_offset())
                  for name, parameter in self.network.named_parameters()}  # fmt: skip
        places = {}
        for name, view in self._views.items():
            owner, offset = owners.get(view.untyped_storage().data_ptr(), (None, 0))
            assert owner is None or view.is_contiguous()
            places[name] = HubPlace(owner, int(view.storage_offset() - offset), tuple(view.shape))
        return places

    def release_views(self) -> None:
        """Let go of the parameters' memory, after they were sharded: there are no hub tensors from now on."""
        self._views.clear()

    def renew_views(self) -> None:
        """After parameters were moved to other memory."""
        part = TEXT_PARTS.get(self.family)
        self._views = hub_views(self.network, part.prefix if part else "")

    def assign(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy a whole version in. Everything is checked first, so that a refusal leaves the network as it was.

        Errors: ModelError naming the first tensor that is missing, unknown, or of another shape or dtype.
        """
        self.check(tensors)
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(tensors[name])

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Whether `assign` would take these. Errors: ModelError as `assign`."""
        if odd := sorted(self._views.keys() ^ set(tensors)):
            what = "is missing" if odd[0] in self._views else "is not part of this model"
            raise ModelError(f"the weights do not fit: {odd[0]!r} {what}", cause=f"{len(odd)} names differ")
        for name, view in self._views.items():
            got = tensors[name]
            if got.shape != view.shape or got.dtype != view.dtype:
                raise ModelError(
                    f"the weights do not fit: {name!r}",
                    cause=f"{tuple(got.shape)} {got.dtype}, expected {tuple(view.shape)} {view.dtype}",
                )


def load_model(path: str, *, dtype: str = "float32") -> Model:
    """The causal LM in folder `path`, a shipped model's name (`etude-nano`), or a hub id.

    Errors: ModelError, naming what is missing, damaged or unsupported.
    """
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}", hint=f"one of {', '.join(DTYPES)}")
    folder = model_folder(path)
    family, config = _config(folder)
    part = TEXT_PARTS.get(family)
    stored = _stored_tensors(folder)
    with _quiet():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=DTYPES[dtype],
                key_mapping={"^" + re.escape(part.prefix): ""} if part else None,
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=True,
            )
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise ModelError(f"{folder} cannot be loaded", cause=_first_line(error)) from error
    network, info = loaded
    for kind in ("missing", "unexpected", "mismatched"):
        if odd := sorted(str(key) for key in info[f"{kind}_keys"] if not part or not str(key).startswith(part.others)):
            raise ModelError(
                f"{folder} does not fit its config.json", cause=f"{kind}: {odd[0]!r} and {len(odd) - 1} more"
            )
    model = Model(network.eval(), family)
    _check_kept_precision(folder, model, stored)
    return model


def model_from_config(config: PreTrainedConfig, *, seed: int, dtype: str = "float32") -> Model:
    """A new model with random weights, the same for the same seed. Leaves torch's global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(_language_model(config), dtype=DTYPES[dtype])
    return Model(network.eval(), config.model_type)


def _language_model(config: PreTrainedConfig) -> PreTrainedConfig:
    return config.get_text_config() if config.model_type in TEXT_PARTS else config


def _config(folder: Path) -> tuple[str, PreTrainedConfig]:
    """The checkpoint's family, and the config of its causal LM."""
    path = folder / "config.json"
    try:
        raw: Any = json.loads(path.read_text())
        kind = raw["model_type"]
    except FileNotFoundError as error:
        raise ModelError(f"{folder} is not a model", cause="config.json is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is damaged", cause=_first_line(error), hint="copy the model again") from error
    text = raw.get("text_config")
    if quantization := raw.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config")):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelError(
            f"{folder} is quantized ({method or 'unknown method'})",
            cause="training and publishing need plain weights",
            hint="use the family's 16-bit checkpoint, or dequantize this one and save it again",
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in TEXT_PARTS:
        raise ModelError(
            f"{folder} is of unknown architecture {kind!r}",
            cause="transformers has no causal language model of that type (code inside a checkpoint is never run)",
            hint="docs/support.md lists what works",
        )
    try:
        return kind, _language_model(AutoConfig.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is damaged", cause=_first_line(error)) from error


def _stored_tensors(folder: Path) -> dict[str, str]:
    """Tensor name -> stored dtype, from the files' headers. Errors: ModelError for a missing or damaged file."""
    index = folder / "model.safetensors.index.json"
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else []
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} is damaged", cause=_first_line(error), hint="copy the model again") from error
    stored: dict[str, str] = {}
    for file in files or ["model.safetensors"]:
        path = folder / file
        if not path.is_file():
            raise ModelError(f"{folder} is incomplete", cause=f"{file} is missing", hint="copy the model again")
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118, the handle is no mapping
                    stored[name] = opened.get_slice(name).get_dtype()
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} is damaged", cause=_first_line(error), hint="copy the model again") from error
    return stored


def _check_kept_precision(folder: Path, model: Model, stored: dict[str, str]) -> None:
    """A 16-bit checkpoint's fp32 tensors (router bias, some gates) must not have been rounded on the way in."""
    if set(stored.values()) <= {"F32", "F64"}:
        return
    for name, tensor in model.hub_tensors().items():
        if stored.get(name) == "F32" and tensor.dtype != torch.float32:
            raise ModelError(
                f"{folder} keeps {name!r} in float32 and {model.family!r} would round it to {tensor.dtype}",
                hint='load it with dtype = "float32"',
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no load report: what is wrong with a checkpoint is raised here, not printed."""
    shown, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()


def _first(config: PreTrainedConfig, keys: tuple[str, ...], num_moe_layers: int) -> int:
    if num_moe_layers == 0:
        return 0
    return next((int(getattr(config, key)) for key in keys if getattr(config, key, None)), 0)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
