"""Bytes and seconds of a published version, as a difference from the one before, beside other lossless codes.

    python benchmarks/delta.py --json FILE [--models smollm2 nano] [--rates 1e-6 3e-6 1e-5] [--pairs 10] [--warm 50]

Versions: AdamW (betas .9, .95) on real text, the Python sources of the standard library; fp32 masters, published in
bfloat16; `--warm` steps first, since masters that still lie on the bfloat16 grid change too little. Then each of
`--pairs` consecutive versions is coded against the one before it, piece by piece (8 MB), on two cores, by

    etude                   weights/delta.py
    zstandard               the new version's bytes
    xor                     old XOR new, through zstandard
    xor shuffled            the same, byte planes apart
    sparse                  int32 index and 16-bit value of what changed, through zstandard
    gaps                    gaps between changed indices (a byte, 255 = more follows) and XOR bits, through zstandard

each at zstandard's level 3, Etude's own, and at the highest level that takes no longer than Etude's code took. Every
result is decoded (ours) or bounded by its size alone (the others: their decoders are obvious). Entropy bound of a pair:
see weights/compare.py. Memory: what coding and applying one pair adds to a process that has both versions mapped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import zstandard
from measuring import Row, arguments, report

from etude.models.load import Model, load_model
from etude.train.optimizer import Masters
from etude.train.recipe import TrainRecipe
from etude.weights import delta
from etude.weights.compare import compare
from etude.weights.pieces import Piece, Snapshot, Stored, cut
from etude.weights.workers import in_order

THREADS = 2
LEVELS = (1, 3, 5, 7, 9, 12, 15, 19)
ROWS, LENGTH = 2, 192
Code = Callable[[np.ndarray, np.ndarray], list[bytes]]


# Versions


def texts(model_path: str) -> Iterator[torch.Tensor]:
    """[ROWS, LENGTH] ids of the standard library's sources, without end."""
    tokens = np.array(_tokens(model_path))
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, len(tokens) - LENGTH, ROWS)
        yield torch.from_numpy(np.stack([tokens[start : start + LENGTH] for start in starts]).astype(np.int64))


def _tokens(model_path: str) -> list[int]:
    sources = sorted(Path(json.__file__).parents[1].glob("*.py"))[:40]
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)
    if model_path == "etude-nano":
        from etude.data.tokenizer import Tokenizer
        from etude.models.recipe import model_folder

        return Tokenizer.load(model_folder(model_path)).encode(text).tolist()
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(model_path)(text)["input_ids"])


def versions(model_path: str, rate: float, warm: int, pairs: int, publish_dtype: str) -> Iterator[Snapshot]:
    """`pairs` + 1 consecutive versions, the first after `warm` steps."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model: Model = load_model(model_path)
    masters = Masters(model, TrainRecipe(lr=rate, eps=1e-8), publish_dtype)
    batches = texts(model_path)
    for step in range(warm + pairs + 1):
        if step >= warm:
            yield Snapshot.take(step, masters.published())
        ids = next(batches)
        logits = model.network(input_ids=ids, use_cache=False).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        masters.step()
        print(f"\r{model_path.rpartition('/')[2]} at {rate:g}: step {step} of {warm + pairs}", end="", file=sys.stderr)


# Codes


def _squeezed(level: int, *arrays: np.ndarray) -> list[bytes]:
    compressor = zstandard.ZstdCompressor(level=level)
    return [compressor.compress(np.ascontiguousarray(array).view(np.uint8).data) for array in arrays]


def _plain(level: int) -> Code:
    return lambda old, new: _squeezed(level, new)


def _xor(level: int) -> Code:
    return lambda old, new: _squeezed(level, old ^ new)


def _shuffled(level: int) -> Code:
    def code(old: np.ndarray, new: np.ndarray) -> list[bytes]:
        planes = (old ^ new).view(np.uint8).reshape(-1, old.itemsize)
        return _squeezed(level, *(planes[:, place] for place in range(old.itemsize)))

    return code


def _sparse(level: int) -> Code:
    def code(old: np.ndarray, new: np.ndarray) -> list[bytes]:
        index = np.flatnonzero(old != new)
        return _squeezed(level, index.astype("<i4"), new[index])

    return code


def _gaps(level: int) -> Code:
    def code(old: np.ndarray, new: np.ndarray) -> list[bytes]:
        index = np.flatnonzero(old != new)
        gaps = np.diff(index, prepend=-1) - 1
        more = gaps // 255
        symbols = np.full(int((more + 1).sum()), 255, np.uint8)
        symbols[np.cumsum(more + 1) - 1] = gaps % 255
        return _squeezed(level, symbols, (old ^ new)[index])

    return code


PEERS: dict[str, Callable[[int], Code]] = {
    "zstandard": _plain, "xor": _xor, "xor shuffled": _shuffled, "sparse": _sparse, "gaps": _gaps,
}  # fmt: skip


def _ours(old: Piece, new: Piece) -> bytes:
    return delta.encode(old.data, new.data, new.dtype)


def timed(code: Callable[[Piece, Piece], Any], old: Snapshot, new: Snapshot) -> tuple[float, list[Any]]:
    """Seconds, and what came out of each piece."""
    pairs = list(zip(cut(old.tensors), cut(new.tensors), strict=True))
    start = time.perf_counter()
    found = list(in_order(lambda pair: code(*pair), pairs, THREADS))
    return time.perf_counter() - start, found


def _peer(code: Code) -> Callable[[Piece, Piece], int]:
    def run(old: Piece, new: Piece) -> int:
        bits = delta.LAYOUTS[new.dtype].bits
        return sum(map(len, code(old.data.view(bits), new.data.view(bits))))

    return run


def measure(old: Snapshot, new: Snapshot) -> dict[str, float]:
    """Sizes and rates of one pair. Errors: SystemExit if a version does not come back."""
    nbytes = sum(tensor.array.nbytes for tensor in new.tensors.values())
    bound = sum(change.bound_bytes for change in compare(old.tensors, new.tensors))
    changed = sum(int((old.tensors[name].array != t.array).sum()) for name, t in new.tensors.items())
    seconds, coded = min((timed(_ours, old, new) for _ in range(2)), key=lambda run: run[0])
    found = {
        "bytes": nbytes,
        "changed share": changed / sum(tensor.array.size for tensor in new.tensors.values()),
        "etude bytes": sum(map(len, coded)),
        "bound bytes": bound,
        "encode MB/s": nbytes / seconds / 1e6,
    }
    found["apply MB/s"] = nbytes / _applied(old, new, coded) / 1e6
    for name, make in PEERS.items():
        for level in LEVELS:
            took, sizes = timed(_peer(make(level)), old, new)
            if level == 3:
                found[f"{name} bytes"], found[f"{name} MB/s"] = sum(sizes), nbytes / took / 1e6
            if took > seconds and level > 3:
                break
            if took <= seconds or level == 1:
                found[f"{name} bytes in our time"] = sum(sizes)
    return found


def _applied(old: Snapshot, new: Snapshot, coded: list[bytes]) -> float:
    """Seconds to apply; the result is compared."""
    pieces = list(zip(cut(old.tensors), cut(new.tensors), coded, strict=True))
    outs = [np.empty_like(piece.data) for _, piece, _ in pieces]
    start = time.perf_counter()
    work = [(was, now, data, out) for (was, now, data), out in zip(pieces, outs, strict=True)]
    list(in_order(lambda item: delta.decode(item[0].data, item[2], item[1].dtype, item[3]), work, THREADS))
    seconds = time.perf_counter() - start
    if not all(np.array_equal(out, now.data) for (_, now, _), out in zip(pieces, outs, strict=True)):
        raise SystemExit("a version did not come back as it was")
    return seconds


# Memory, in a process of its own


def memory(old: Snapshot, new: Snapshot) -> tuple[float, float]:
    """(MB that coding adds, MB that applying adds), with both versions mapped from files."""
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for label, snapshot in (("old", old), ("new", new)):
            for number, (name, tensor) in enumerate(sorted(snapshot.tensors.items())):
                np.save(Path(folder) / f"{label}-{number}.npy", tensor.array)
                names.append((name, tensor.dtype))
        Path(folder, "names.json").write_text(json.dumps(names[: len(new.tensors)]))
        done = subprocess.run([sys.executable, __file__, "--measure-memory", folder], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the memory of a pair was not measured: {done.stderr[-2000:]}")
    coding, applying = json.loads(done.stdout.splitlines()[-1])
    return coding, applying


def measure_memory(folder: Path) -> None:
    names = json.loads((folder / "names.json").read_text())
    old, new = ({name: Stored(dtype, np.load(folder / f"{label}-{number}.npy", mmap_mode="r"))
                 for number, (name, dtype) in enumerate(names)} for label in ("old", "new"))  # fmt: skip
    pairs = list(zip(cut(old), cut(new), strict=True))
    coded: list[bytes] = []
    coding = _peak(lambda: coded.extend(in_order(lambda pair: _ours(*pair), pairs, THREADS)))
    sizes = [len(now.data) for _, now in pairs]
    out = np.memmap(folder / "out", np.uint8, "w+", shape=(sum(sizes),))
    starts = np.cumsum([0, *sizes])

    def apply(number: int) -> None:
        was, now = pairs[number]
        place = out[starts[number] : starts[number] + sizes[number]]
        delta.decode(was.data, coded[number], now.dtype, np.asarray(place))

    applying = _peak(lambda: list(in_order(apply, range(len(pairs)), THREADS)))
    print(json.dumps([coding, applying]))


def _peak(work: Callable[[], object]) -> float:
    """MB of anonymous memory that the process had at most above what it had before."""

    def now() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

    before, most, is_over = now(), [0.0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.002):
            most[0] = max(most[0], now())

    watcher = threading.Thread(target=look)
    watcher.start()
    work()
    is_over.set()
    watcher.join()
    return most[0] - before


def main() -> None:
    if sys.argv[1:2] == ["--measure-memory"]:
        return measure_memory(Path(sys.argv[2]))
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2", "nano"], choices=["smollm2", "nano"])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--warm", type=int, default=50)
    chosen = parser.parse_args()
    rows: list[Row] = []
    values: dict[str, float] = {}
    for name in chosen.models:
        path = "etude-nano" if name == "nano" else _smollm2()
        for rate in chosen.rates:
            label = f"{name}_{rate:g}"
            found = _of_rate(path, rate, chosen.warm, chosen.pairs)
            rows += [_row(label, quantity, raw) for quantity, raw in found.items()]
            middle = {quantity: median(raw) for quantity, raw in found.items()}
            values |= _judged(label, middle)
            print(f"\n{label}: {middle['etude bytes'] / middle['bytes']:.3%} of its size, "
                  f"{middle['etude bytes'] / middle['bound bytes']:.2f} of the bound", flush=True)  # fmt: skip
    report("delta", rows, _with_missing(values), chosen.json)
    return None


def _of_rate(path: str, rate: float, warm: int, pairs: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    before: Snapshot | None = None
    for snapshot in versions(path, rate, warm, pairs, "bfloat16"):
        if before is not None:
            for quantity, value in measure(before, snapshot).items():
                found.setdefault(quantity, []).append(value)
            last = (before, snapshot)
        before = snapshot
    coding, applying = memory(*last)
    largest = max(tensor.array.nbytes for tensor in last[1].tensors.values()) / 1e6
    return found | {"coding adds MB": [coding], "applying adds MB": [applying], "memory allowed MB": [2 * largest + 64]}


def _judged(label: str, middle: Mapping[str, float]) -> dict[str, float]:
    others = [value for quantity, value in middle.items() if quantity.startswith(tuple(PEERS)) and " bytes" in quantity]
    return {
        f"{label}_of_bound": middle["etude bytes"] / middle["bound bytes"],
        f"{label}_of_smallest_peer": middle["etude bytes"] / min(others),
        f"{label}_encode": middle["encode MB/s"],
        f"{label}_memory": max(middle["coding adds MB"], middle["applying adds MB"]) / middle["memory allowed MB"],
    }


def _with_missing(values: Mapping[str, float]) -> dict[str, float]:
    import tomllib

    from measuring import GOALS

    goals = tomllib.loads(GOALS.read_text())["delta"]
    return {goal["name"]: values.get(goal["name"], float("nan")) for goal in goals} | dict(values)


def _row(label: str, quantity: str, raw: list[float]) -> Row:
    return {"arm": label, "quantity": quantity, "median": median(raw), "min": min(raw), "max": max(raw), "raw": raw}


def _smollm2() -> str:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from smollm2 import smollm2_folder

    return str(smollm2_folder())


if __name__ == "__main__":
    main()
