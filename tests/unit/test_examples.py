"""The examples are read one file after the other, so no two of their modules need each other."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_there_is_no_circle() -> None:
    graph = grimp.build_graph("examples", cache_dir=None)  # with what is imported for type checkers alone
    order = TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    assert len(list(order.static_order())) == len(graph.modules)  # raises CycleError, which names the circle


def test_there_is_one_style_of_import() -> None:
    """`examples.…`, whole and not relative: a file run as a script would need another path than one run with -m."""
    own = {path.stem for path in EXAMPLES.iterdir()}
    found = []
    for path in sorted(EXAMPLES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = ["." * node.level + (node.module or "")]
            # The part before the first dot is empty where the import is relative.
            found += [f"{path.name}:{node.lineno} {name}" for name in names if name.partition(".")[0] in {"", *own}]
    assert not found
