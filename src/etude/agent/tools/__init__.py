"""The agent's tools, one file each. A new tool is a new file in this folder: it is found by being here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

from etude.agent.tool import Tool, schema

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

TOOLS = Tool.registry
"""Name -> class, of every tool there is."""


def schemas(names: Sequence[str]) -> list[dict[str, Any]]:
    """What a model is told of these tools, as `tool.schema` says it."""
    return [schema(TOOLS[name]) for name in names]
