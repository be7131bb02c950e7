"""The `model` table of a recipe, and where a model's folder is. Light: it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from etude.errors import ModelError

SHIPPED = {"etude-nano": Path(__file__).parent / "etude_nano"}
"""Models that come with Etude."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """Which model to start from."""

    path: str
    """A folder with config.json and safetensors, a hub id, or `etude-nano`."""


def model_folder(path: str) -> Path:
    """The folder of a model; a hub id is downloaded. Errors: ModelError naming what is missing."""
    if path in SHIPPED:
        folder = SHIPPED[path]
        if not folder.is_dir():
            raise ModelError(f"{path} is not in this installation", cause=f"no {folder}", hint="run `make nano`")
        return folder
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{path} is not a folder", hint="give the folder that holds config.json")
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(f"no model at {path}", hint="give a folder with config.json, a hub id, or `etude-nano`")
    return _download(path)


def _download(path: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    except (OSError, HFValidationError, ValueError) as error:
        raise ModelError(
            f"no model {path}",
            cause=f"there is no such folder, and the hub did not give it: {str(error).splitlines()[0]}",
            hint="give a folder with config.json, a hub id, or `etude-nano`",
        ) from error
