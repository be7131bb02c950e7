"""How the house is built: bands, sizes, names, what may be loaded. Plain `ast`; import-linter holds the bands too."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "etude"
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))

BANDS = (
    ("cli",),
    ("worker", "stages"),
    ("build",),
    ("roles", "converse", "serving"),
    ("report",),
    ("rl",),
    ("bench", "tasks", "sessions", "serve"),
    ("agent", "rewards", "inference", "train"),
    ("data", "models", "weights", "sandbox", "code"),
    ("metrics",),
    ("config",),
    ("protocols",),
    ("frames",),
    ("types", "errors", "killpoints", "state"),
)
"""From the faces down to the ground: a room or module imports from lower bands only."""
ARROWS = {
    ("bench", "tasks"),
    ("serve", "sessions"),
    ("tasks", "sessions"),
    ("bench", "sessions"),
    ("data", "code"),
    ("cli", "worker"),
}
"""The imports that are allowed inside a band."""
HEAVY = {
    "torch": {"models", "inference", "train"},
    "transformers": {"models", "inference", "train", "data"},
    "ray": set(),
    "vllm": set(),
    "plotly": {"report"},
    "typer": {"cli"},
    "httpx2": {"agent"},
    "mcp": {"agent"},
    "sqlalchemy": {"sessions"},
    "psycopg": {"sessions"},
    "detect_secrets": {"sessions"},
    "fastapi": {"serve"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "prometheus_client": {"serve"},
}
"""Who may import what is slow to load."""

MAX_LINES, MAX_FUNCTION = 400, 80
LONGER_FILES = {
    "types.py": 455,  # the nouns are read as one file
}
DEEPER = {"agent/tools", "sessions/readers"}
"""Folders inside a room: one file a tool or a format, and the folder is the list of them."""
BROAD = {
    "frames.py": 1,  # a process boundary: whatever a handler raised, the caller must hear of it
    "inference/torch_engine.py": 1,  # the engine's thread: whatever ended it, every caller must hear of it
    "roles.py": 1,  # whatever ended a worker's job, the process ends, and is replaced
    "agent/mcp.py": 1,  # whatever the package raises about a server is data for the agent
    "agent/toolbox.py": 1,  # a bug in a tool is data for the agent and counted as `unknown`
    "data/families.py": 1,  # whatever a model sampled, and whatever the package makes of it, is data
    "sandbox/pool.py": 1,  # a task of its own: whoever waits for the sandbox must hear of it
    "tasks/probe.py": 2,  # runs functions of foreign packages, inside the sandbox
    "sandbox/iorunner.py": 1,  # runs an agent's code, inside the sandbox
    "sandbox/inside_child.py": 2,  # runs an agent's code, inside the sandbox
}
"""Handlers of Exception or BaseException that do not raise again: file -> how many, and why."""


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path: Path) -> Iterator[str]:
    """Full names of everything that the file imports anywhere, inside functions too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports are written in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def band_of(room: str) -> int:
    return next(number for number, band in enumerate(BANDS) if room in band)


def line_of(path: Path, node: ast.AST) -> str:
    return f"{name_of(path)}:{getattr(node, 'lineno', 1)}"


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_every_room_has_its_band() -> None:
    known = {room for band in BANDS for room in band} | {"__init__"}
    assert {room_of(path) for path in FILES} <= known


def test_imports_point_down() -> None:
    wrong = []
    for path in FILES:
        here = room_of(path)
        for name in imports_of(path):
            there = name.split(".")[1] if name.startswith("etude.") else here
            if there in (here, "__version__") or (here, there) in ARROWS:
                continue
            if here == "__init__" or band_of(there) <= band_of(here):
                wrong.append(f"{name_of(path)} imports {name}")
    assert wrong == []


def test_heavy_dependencies_stay_in_their_rooms() -> None:
    wrong = []
    for path in FILES:
        for name in imports_of(path):
            rooms = HEAVY.get(name.split(".")[0])
            in_tokenizer = room_of(path) != "data" or path.name == "tokenizer.py"
            if rooms is not None and not (room_of(path) in rooms and in_tokenizer):
                wrong.append(f"{name_of(path)} imports {name}")
    assert wrong == []


def test_a_file_fits_in_a_reader_s_head() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > LONGER_FILES.get(name, MAX_LINES)} == {}


def test_a_function_fits_on_a_screen() -> None:
    long = []
    for path in FILES:
        for node in functions_of(path):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > MAX_FUNCTION:
                long.append(f"{line_of(path, node)}: {node.name}")
    assert long == []


def test_a_module_says_what_it_is() -> None:
    assert [name_of(path) for path in FILES if not ast.get_docstring(tree_of(path))] == []


def test_what_a_module_offers_is_documented() -> None:
    """Functions of one statement, and those that a decorator names, speak for themselves."""
    missing = []
    for path in FILES:
        for node in tree_of(path).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            plain = not isinstance(node, ast.ClassDef) and (len(node.body) == 1 or node.decorator_list)
            if not (plain or ast.get_docstring(node) or name_of(path) == "errors.py"):  # drawn on top of that file
                missing.append(f"{line_of(path, node)}: {node.name}")
    assert missing == []


def test_settings_are_frozen_and_every_one_is_explained() -> None:
    wrong = []
    for path in FILES:
        kinds = [node for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
        for kind in kinds if path.name.endswith("recipe.py") else []:
            if "frozen=True" not in ast.unparse(kind.decorator_list[0]):
                wrong.append(f"{line_of(path, kind)}: {kind.name} is not frozen")
            for field, after in zip(kind.body, [*kind.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and "Recipe" not in ast.unparse(field.annotation):
                    explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    if not explained:
                        wrong.append(f"{line_of(path, field)}: {ast.unparse(field.target)} is not explained")
    assert wrong == []


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    odd = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
    assert not [name_of(path) for path in FILES if path.stem in odd or path.parent.name in odd]


def test_rooms_are_one_folder_deep_and_say_what_they_own() -> None:
    for path in FILES:
        parts = path.relative_to(PACKAGE).parts
        assert len(parts) <= 2 or "/".join(parts[:-1]) in DEEPER, name_of(path)
        if len(parts) == 2:
            assert (path.parent / "__init__.py").is_file(), f"{parts[0]} has no __init__.py"


def test_nothing_is_swallowed_without_a_reason() -> None:
    broad: dict[str, int] = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = {"BaseException"} if node.type is None else {ast.unparse(node.type)}
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            if caught & {"Exception", "BaseException"} and not raises:
                broad[name_of(path)] = broad.get(name_of(path), 0) + 1
    assert broad == BROAD


def test_every_test_that_the_docs_name_exists() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    known = {name for text in texts for name in re.findall(r"^ *(?:async )?def (test_\w+)", text, re.MULTILINE)}
    named = {
        name for path in (ROOT / "docs").glob("*.md") for name in re.findall(r"`(test_\w+)`", path.read_text("utf-8"))
    }
    assert len(named) > 50
    assert named - known == set()


def loaded_by(source: str) -> set[str]:
    """Heavy packages in sys.modules after running `source` in a fresh interpreter."""
    names = ("torch", "transformers", "ray", "vllm", "plotly", "tokenizers", "obstore", "fastapi", "uvicorn",
             "sqlalchemy", "detect_secrets")  # fmt: skip
    check = f"\nimport sys\nprint(*(name for name in {names} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", source + check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_etude_and_every_room_s_settings_loads_nothing_heavy() -> None:
    modules = ["etude", "etude.build", "etude.config", "etude.metrics", "etude.protocols"]
    modules += [
        "etude." + name_of(path).removesuffix(".py").replace("/", ".")
        for path in FILES
        if path.name.endswith("recipe.py")
    ]
    assert len(modules) > 8
    assert loaded_by("\n".join(f"import {name}" for name in modules)) == set()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_loads_as_its_stage_and_nothing_heavy_with_it(recipe: Path) -> None:
    source = (
        "from pathlib import Path\nfrom etude import build, config\n"
        f"path = Path({str(recipe)!r})\n"
        "build.load_recipe(path, [], stage=config.read_tree(path)['stage'])"
    )
    assert loaded_by(source) == set()


def test_there_are_recipes() -> None:
    assert RECIPES
