"""How far apart are trainer and engine in a mixture of experts, and what do replay and its filter give back?

    python studies/precision.py --runs runs/precision [--json FILE]

A mixture (the shipped nano, every block upcycled to eight experts, two a token) is fine-tuned on transcripts of the
base tasks, so that its routers route, and then trained by reinforcement learning for eight steps, all versions kept.
The trainer stands at the last version, in float32. The engine stands 0, 1, 4 or 8 steps before it, and computes in

    same   float32       bf16   weights and activations         int8, nvfp4   emulated, see models/precision.py

For each of the sixteen cells the engine samples replies to training prompts, with log-probs and routes; the trainer
scores the same tokens routing freely, replaying the routes, and replaying with the filter at several alphas. The table
says |log pi - log mu|: mean, median, 99th percentile; how many experts the trainer would have chosen too; and how many
the filter replaced. A cell with less than .1% replaced is "not exercised". Whatever comes out is written down.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, Qwen3MoeConfig

from etude.data.packing import pack
from etude.models.load import Model, load_model, model_from_config
from etude.models.precision import emulate
from etude.models.recipe import SHIPPED
from etude.models.routing import capture
from etude.train.forward import Routing
from etude.train.objective import Objective
from etude.train.optimizer import from_stored
from etude.train.ranks import Ranks
from etude.train.reference import logprobs_of
from etude.types import Batch, Origin, Routes, Sample
from etude.weights.manifests import manifest_numbers, read_manifest
from etude.weights.pieces import Stored
from etude.weights.replica import dtypes, fetch
from etude.weights.store import Store, open_store

EXPERTS, TOP_K, NOISE = 8, 2, 0.02
STEPS = 8
PRECISIONS, AGES = ("same", "bf16", "int8", "nvfp4"), (0, 1, 4, 8)
ALPHAS = (0.5, 0.8, 0.95)
PROMPTS, NEW = 96, 64
LEAST_REPLACED = 0.001


# The mixture, and its versions


def write_mixture(folder: Path) -> Path:
    """Sparse upcycling (Komatsuzaki et al. 2022, arXiv 2212.05055), with some noise to tell the experts apart."""
    dense = load_model("etude-nano")
    config = dense.config.to_dict()
    for name in ("architectures", "model_type"):
        config.pop(name)
    config |= {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "norm_topk_prob": True}
    mixture = model_from_config(Qwen3MoeConfig(**config, moe_intermediate_size=config["intermediate_size"]), seed=0)
    given, draw = dense.hub_tensors(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in mixture.hub_tensors().items():
            if name.endswith("mlp.gate.weight"):
                tensor.normal_(0, 0.1, generator=draw)
            elif ".mlp.experts." in name:
                layer, _, rest = name.partition(".experts.")
                source = given[f"{layer}.{rest.partition('.')[2]}"]
                tensor.copy_(source + torch.randn(source.shape, generator=draw) * (NOISE * source.std()))
            else:
                tensor.copy_(given[name])
    mixture.network.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((SHIPPED["etude-nano"] / "tokenizer.json").read_bytes())
    return folder


def prepare(runs: Path, sft_s: float) -> Path:
    """The run whose versions are compared. Each stage goes on where it was."""
    start = runs / "mixture"
    if not (start / "config.json").exists():
        write_mixture(start)
    etude = [sys.executable, "-m", "etude.cli.main"]
    tuned = runs / "sft"
    subprocess.run(
        [*etude, "sft", "nano-sft.toml", "tasks=etude:repair/base", f"model={start}", f"folder={tuned}",
         f"schedule.wall_s={sft_s}"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.run(
        [*etude, "rl", "quickstart.toml", f"model.path={tuned / 'model'}", f"budget.steps={STEPS}",
         "budget.wall_s=3600", "budget.decay_share=0", "budget.warmup_share=0",
         f"weights.pins={list(range(STEPS + 1))}", "eval.tasks=8", "eval.k=2", "--run", "rl", "--runs", str(runs)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return runs / "rl"


def versions(store: Store) -> dict[int, Mapping[str, torch.Tensor]]:
    """Step -> tensors, of the first incarnation."""
    found = {}
    for number in manifest_numbers(store, 1):
        manifest = read_manifest(store, 1, number)
        kinds = dtypes(manifest)
        tensors = fetch(store, manifest).items()
        found[manifest.version.step] = {name: from_stored(Stored(kinds[name], array)) for name, array in tensors}
    return found


# Engine and trainer


@dataclass(frozen=True, slots=True)
class Sampled:
    """A reply with its prompt, as an engine gave it."""

    ids: np.ndarray
    prompt: int
    logprobs: np.ndarray
    experts: np.ndarray


@torch.no_grad()
def sample(model: Model, prompts: Sequence[np.ndarray], seed: int) -> Iterator[Sampled]:
    """NEW tokens after each prompt, at temperature 1, by the network's own modules with a cache."""
    draw = torch.Generator().manual_seed(seed)
    for prompt in prompts:
        cache, row = DynamicCache(), torch.from_numpy(prompt.astype(np.int64))
        ids, logprobs, routes = row.tolist(), [0.0] * len(prompt), []
        for _ in range(NEW):
            with capture(model) as captured:
                logits = model.network(row[None], past_key_values=cache, use_cache=True).logits[0, -1]
            routes.append(captured.experts())
            logs = torch.log_softmax(logits.float(), -1)
            row = torch.multinomial(logs.exp(), 1, generator=draw)
            ids.append(int(row))
            logprobs.append(float(logs[row]))
        yield Sampled(np.array(ids, np.int32), len(prompt), np.array(logprobs, np.float32), torch.cat(routes).numpy())


def samples_of(sampled: Sequence[Sampled]) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            ids=one.ids, mask=np.arange(len(one.ids)) >= one.prompt, logprobs=one.logprobs, advantage=0.0, versions=(),
            kv_epochs=(), origin=Origin(key=str(number), member=0, context=0),
            routes=Routes(experts=one.experts.astype(np.uint8), valid=np.ones(len(one.experts), bool)),
        )
        for number, one in enumerate(sampled)
    )  # fmt: skip


def scored(model: Model, samples: Sequence[Sample], routing: Routing) -> tuple[np.ndarray, dict[str, float]]:
    """|log pi - log mu| of every sampled token, and what the replay counted."""
    objective = Objective(model, routing=routing)
    micros = pack(samples, max_cost=6000, pair_cost=0.002).micro_batches
    gaps = [
        np.abs(logprobs.astype(np.float64) - micro.logprobs)
        for micro, logprobs in zip(micros, logprobs_of(objective, micros, Ranks(), 1.0), strict=True)
    ]
    return np.concatenate(gaps), objective.routes.row()


def engine_of(trainer: Model, tensors: Mapping[str, torch.Tensor], precision: str) -> Model:
    model = Model(copy.deepcopy(trainer.network), trainer.family)
    model.assign(tensors)
    if precision == "bf16":
        return Model(model.network.to(torch.bfloat16), trainer.family)
    if precision != "same":
        emulate(model, precision)
    return model


def measure(run: Path, start: Path) -> Iterator[dict[str, Any]]:
    """One row a cell."""
    by_step = versions(open_store(f"file://{run.resolve()}/weights"))
    prompts = prompts_of(run)
    for age in AGES:
        for precision in PRECISIONS:
            trainer = load_model(str(start))
            trainer.assign(by_step[STEPS])
            engine = engine_of(trainer, by_step[STEPS - age], precision)
            samples = samples_of(list(sample(engine, prompts, seed=age)))
            ways = {"free": Routing(replays=False), "replay": Routing()}
            ways |= {f"filter {alpha}": Routing(plausibility=alpha) for alpha in ALPHAS}
            row: dict[str, Any] = {"precision": precision, "age": age, "tokens": PROMPTS * NEW}
            for way, routing in ways.items():
                gaps, counted = scored(Model(copy.deepcopy(trainer.network)), samples, routing)
                p50, p99 = np.quantile(gaps, (0.5, 0.99))
                row[way] = {"mean": float(gaps.mean()), "p50": float(p50), "p99": float(p99), **counted}
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield row


def prompts_of(run: Path) -> list[np.ndarray]:
    """The first prompts that the run trained on."""
    from etude.frames import read_file

    found: dict[str, np.ndarray] = {}
    for path in sorted((run / "batches").iterdir()):
        for one in read_file(path, Batch).samples:
            found.setdefault(one.origin.key, one.ids[: int(np.flatnonzero(one.mask)[0])])
    return list(found.values())[:PROMPTS]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    ways = ["free", "replay", *(f"filter {alpha}" for alpha in ALPHAS)]
    lines = [
        "| engine | steps behind | " + " | ".join(ways) + " | overlap | replaced, by alpha |",
        "|---|---|" + "---|" * (len(ways) + 2),
    ]
    for row in rows:
        cells = [f"{row[way]['mean']:.1e}, {row[way]['p50']:.1e}, {row[way]['p99']:.1e}" for way in ways]
        replaced = [row[f"filter {alpha}"]["replaced_share"] for alpha in ALPHAS]
        shares = ", ".join(f"{share:.2%}" if share >= LEAST_REPLACED else "not exercised" for share in replaced)
        overlap = f"{row['replay']['route_overlap']:.2%}"
        lines.append(f"| {row['precision']} | {row['age']} | " + " | ".join(cells) + f" | {overlap} | {shares} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/precision"))
    parser.add_argument("--sft-s", type=float, default=120.0, help="seconds of fine-tuning")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    chosen = parser.parse_args()
    torch.set_num_threads(2)
    rows = list(measure(prepare(chosen.runs, chosen.sft_s), chosen.runs / "sft" / "model"))
    print(table(rows))
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
