"""Imports go one way (docs/architecture.md), inside functions too; what decoding needs is declared and no more."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "hvd"
ROOMS = [
    ("types", "config", "errors", "jit"),
    ("chat_template", "detokenizer", "tokenizer"),
    ("models",),
    ("drafters",),
    ("payoff",),
    ("verify",),
    ("engine",),
    ("traces",),
    ("training",),
    ("analysis",),
    ("bench",),
    ("report",),
    ("cli",),
]
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
BESIDE = {"testing": RANK["engine"]}
"""Fakes for users' tests: they see what the engine sees, and nothing of ours imports them."""

MODULES = sorted(SOURCE.rglob("*.py"))
OPTIONAL = {"torch", "safetensors", "transformers", "llama_cpp", "vllm"}
PEERS = {"torch", "transformers", "llama_cpp", "vllm"}
"""Programs that a benchmark runs beside ours: imported by their adapters alone, inside functions."""


def imports(path: Path, *, top_level: bool = False) -> Iterator[tuple[str, int]]:
    """Every absolute dotted name that a module imports, and the line. `top_level`: only what its import runs."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in _run_at_import(tree) if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes outside functions and outside `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _run_at_import(child)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_every_file_is_in_a_known_room() -> None:
    assert {room_of(path) for path in MODULES} - set(RANK) - set(BESIDE) == {"__init__", "__main__"}


def test_the_architecture_page_lists_the_same_rooms_in_the_same_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    listed = [line.split() for line in re.findall(r"^    ([a-z_ ]+)$", page, re.MULTILINE)]
    assert [rank for rooms in listed for rank in {RANK[room] for room in rooms}] == list(range(len(ROOMS)))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_itself_and_rooms_above(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return  # the package's front: it re-exports, lazily; the program's
    rank = RANK.get(room, BESIDE.get(room))
    assert rank is not None
    for name, line in imports(path):
        if not name.startswith("hvd."):
            continue
        other = name.split(".")[1]
        if other == "__version__":
            continue
        assert other not in BESIDE or other == room, f"{path}:{line} imports {name}, which is for tests"
        assert RANK[other] <= rank, f"{path}:{line}: {room} must not import {name}"
        same_rank = RANK[other] == rank and room in RANK and len(ROOMS[rank]) == 1
        assert RANK[other] < rank or other == room or same_rank or rank <= 1 or room in BESIDE


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_torch_is_imported_by_the_torch_backend_and_head_training_alone(path: Path) -> None:
    name = str(path.relative_to(SOURCE))
    everywhere = {imported.split(".")[0] for imported, _ in imports(path)}
    at_import = {imported.split(".")[0] for imported, _ in imports(path, top_level=True)}
    adapter = re.match(r"bench/peers", name)
    assert adapter or not everywhere & (PEERS - {"torch"}), f"{name} imports a peer"
    assert not at_import & (PEERS - {"torch"}), f"{name} imports a peer at its top"
    if not re.match(r"(models/torch_|training/eagle3)", name):
        assert "torch" not in at_import, f"{name} imports torch at its top"
    for imported, line in imports(path, top_level=True):
        allowed = name.startswith(("models/torch_", "training/eagle3"))
        assert allowed or not imported.startswith("hvd.models.torch_"), f"{name}:{line} imports {imported} at its top"


def test_every_dependency_is_declared_and_every_declared_one_is_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {re.split(r"[<>=!~\[; ]", entry)[0].lower() for entry in project["dependencies"]}
    foreign = {name.split(".")[0] for path in MODULES for name, _ in imports(path)}
    foreign -= {"hvd", *sys.stdlib_module_names} | OPTIONAL
    used = {name.lower() for name in foreign}
    assert used - declared == set(), "imported, but not in pyproject.toml"
    assert declared - used == {"onnxruntime"}, (
        "in pyproject.toml, but not imported (the runtime is loaded as a library)"
    )
