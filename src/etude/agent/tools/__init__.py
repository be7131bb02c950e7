"""The agent's tools, one file each. A new tool is a new file in this folder: it is found by being here."""

from __future__ import annotations

import importlib
import pkgutil

from etude.agent.tool import Tool

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

TOOLS = Tool.registry
"""Name -> class, of every tool there is."""
