"""Identify a function by its source, the same on every Python.

AST dumps and code objects differ between Python versions, so the lines themselves are hashed: without comments, without
docstrings, without blank lines, without the indentation they share.
"""

from __future__ import annotations

import ast
import hashlib
import io
import textwrap
import tokenize
from dataclasses import dataclass
from typing import TypeAlias

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


@dataclass(frozen=True)
class Source:
    """One function as it stands on disk: 16 hex digits of the SHA-256 of its lines, and how it is called."""

    digest: str
    signature: str
    decorated: bool


def find(tree: ast.Module, name: str) -> Function | None:
    """The last definition of `function` or `Class.method` at the top level of a module, also inside if and try."""
    body: list[ast.stmt] = tree.body
    node: ast.AST | None = None
    for part in name.split("."):
        node = None
        for statement in _flat(body):
            if getattr(statement, "name", None) == part:
                node = statement
        if node is None:
            return None
        body = getattr(node, "body", [])
    return node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for statement in body:
        found.append(statement)
        if isinstance(statement, ast.If):
            found += _flat(statement.body) + _flat(statement.orelse)
        elif isinstance(statement, ast.Try):
            handlers = [inner for handler in statement.handlers for inner in handler.body]
            found += _flat(statement.body) + _flat(handlers) + _flat(statement.orelse)
    return found


def signature(function: Function) -> str:
    """Parameter names, kinds and which have a default. Annotations and default values do not count."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    parts = [a.arg + ("=" if i >= first_default else "") for i, a in enumerate(positional)]
    if given.posonlyargs:
        parts.insert(len(given.posonlyargs), "/")
    if given.vararg:
        parts.append("*" + given.vararg.arg)
    elif given.kwonlyargs:
        parts.append("*")
    parts += [
        a.arg + ("" if default is None else "=") for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        parts.append("**" + given.kwarg.arg)
    return f"({', '.join(parts)})"


def read(text: str, name: str) -> Source | None:
    """Fingerprint one function of a module's text, None where it is not there.

    Raises SyntaxError where the text is not Python of this interpreter.
    """
    function = find(ast.parse(text), name)
    if function is None:
        return None
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    last = function.end_lineno or function.lineno
    lines = text.splitlines()[first - 1 : last]
    for start, end in _docstrings(function):
        lines[start - first : end - first + 1] = [""] * (end - start + 1)
    source = textwrap.dedent("\n".join(lines))
    kept = [line.rstrip() for line in _without_comments(source) if line.strip()]
    digest = hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]
    return Source(digest, signature(function), bool(function.decorator_list))


def _docstrings(function: Function) -> list[tuple[int, int]]:
    spans = []
    for node in ast.walk(function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            head = node.body[0]
            if isinstance(head, ast.Expr) and isinstance(getattr(head.value, "value", None), str):
                spans.append((head.lineno, head.end_lineno or head.lineno))
    return spans


def _without_comments(source: str) -> list[str]:
    lines = source.splitlines()
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, IndentationError):
        # Cutting a docstring out can leave an empty body, which only the tokenizer minds.
        return lines
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return lines
