"""Private names of torch stand in one file, so that a new release of torch breaks one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("models", "pipelining_dualpipev") for path in sorted((ROOT / folder).rglob("*.py"))]
# What torch's objects offer under a private name; our own private attributes have other names.
PRIVATE_ATTRIBUTES = {
    name
    for thing in (torch.nn.Module(), torch.zeros(1), torch.zeros(1).untyped_storage(), torch.ops.aten.add.Tensor, torch)
    for name in dir(thing)
    if name.startswith("_") and not name.endswith("__")
}


def private_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (name for name in names if name.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            yield from () if own else (node.attr,)


def test_private_names_of_torch_stand_in_one_file():
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES
        if path.name != "_torch.py"
        for name in private_names(ast.parse(path.read_text()))
    }
    assert not found


def test_the_one_file_has_them():
    assert set(private_names(ast.parse((ROOT / "pipelining_dualpipev/_torch.py").read_text()))) >= {"_Action", "_C"}
