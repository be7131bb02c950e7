"""TRL's side of benchmarks/rl_step.py: runs in a Python of its own, prints (seconds, gradient norm) of each step.

    PYTHON benchmarks/trl_peer.py WORK.json

Make that Python with `python -m venv DIR` and `pip install trl==1.16.0 torch==2.13.0`. Seconds are those of a whole
training step without what its rollout function takes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any


def main() -> None:
    with open(sys.argv[1]) as file:
        given = json.load(file)
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(given["threads"])
    work, size = given["work"], given["size"]
    count = len(work["completions"])
    network = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    vocabulary = {str(number): number for number in range(network.config.vocab_size)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="0", eos_token="1", unk_token="0")
    spent = {"rollout": 0.0}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """The fixed completions, in the order in which TRL repeats the prompts."""
        start = time.perf_counter()
        seen: dict[str, int] = {}
        prompt_ids, completions = [], []
        for prompt in prompts:
            member = seen.get(prompt, 0)
            seen[prompt] = member + 1
            prompt_ids.append(work["prompts"][int(prompt)])
            completions.append(work["completions"][int(prompt) * size + member])
        order = [int(prompt) * size for prompt in prompts]
        members: dict[int, int] = {}
        rewards = []
        for first in order:
            rewards.append(work["rewards"][first + members.get(first, 0)])
            members[first] = members.get(first, 0) + 1
        spent["rollout"] += time.perf_counter() - start
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "given": rewards}

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[tuple[float, float]] = []

        def on_step_begin(self, *args: Any, **others: Any) -> None:
            spent["rollout"], self.start = 0.0, time.perf_counter()

        def on_step_end(self, *args: Any, **others: Any) -> None:
            self.seconds = time.perf_counter() - self.start - spent["rollout"]

        def on_log(self, *args: Any, logs: dict[str, float], **others: Any) -> None:
            if "grad_norm" in logs:
                self.steps.append((self.seconds, float(logs["grad_norm"])))

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, learning_rate=1e-6, max_grad_norm=1.0,
            lr_scheduler_type="constant",
            per_device_train_batch_size=given["rows"], gradient_accumulation_steps=count // given["rows"],
            num_generations=size, max_completion_length=len(work["completions"][0]), beta=0.0, num_iterations=1,
            loss_type="dr_grpo", scale_rewards="none", temperature=1.0, gradient_checkpointing=False,
            max_steps=given["steps"] + 1, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            shuffle_dataset=False, seed=0,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=network, args=settings, processing_class=tokenizer, rollout_func=rollout, callbacks=[clock],
            reward_funcs=lambda given, **others: given,
            train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(len(work["prompts"]))]}),
        )  # fmt: skip
        trainer.train()
    print(json.dumps(clock.steps[1:]))


if __name__ == "__main__":
    main()
