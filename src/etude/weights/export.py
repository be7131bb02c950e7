"""A version out of the store as a safetensors file, as a model folder has one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import TensorSpec, serialize

from etude.frames import write_bytes
from etude.types import Manifest
from etude.weights.replica import dtypes, fetch
from etude.weights.store import Store

_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""safetensors name in a file -> in its writer."""


def write_safetensors(store: Store, manifest: Manifest, path: Path) -> int:
    """Rebuild the version, every digest checked, and write it whole or not at all; returns bytes.

    Errors: MissingError, StoreError, naming what is gone, damaged, or cannot be written.
    """
    names, held = dtypes(manifest), {name: np.ascontiguousarray(a) for name, a in fetch(store, manifest).items()}
    tensors = {
        name: TensorSpec(
            dtype=_NAMES[names[name]], shape=list(array.shape), data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in held.items()
    }
    version = manifest.version
    said = {"etude_version": version.name, "etude_step": str(version.step), "etude_digest": manifest.digest}
    data = serialize(tensors, metadata=said)
    write_bytes(path, data)
    return len(data)
