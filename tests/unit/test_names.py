"""One word, one class: whoever reads `Row` or `Report` knows which."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for package in ("ultra_patches", "compat"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name.startswith("test_"):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(found) > 30, "classes are found"
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
