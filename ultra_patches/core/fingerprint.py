"""Identify a function by its source, the same on every Python.

AST dumps and code objects differ between Python versions, so the lines themselves are hashed: without comments, without
docstrings, without blank lines, without the indentation they share.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import tokenize
from dataclasses import dataclass
from typing import TypeAlias

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


@dataclass(frozen=True)
class Fingerprint:
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


def read(text: str, name: str) -> Fingerprint | None:
    """Fingerprint one function of a module's text, None where it is not there.

    Raises SyntaxError where the text is not Python of this interpreter.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    function = find(_parsed(text), name)
    if function is None:
        return None
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    last = function.end_lineno or function.lineno
    # str.splitlines would also split at form feeds and U+2028, which end no line for Python.
    lines = ["", *text.split("\n")]
    inside: set[int] = set()  # lines that begin inside a string: what looks like indentation there is text
    for start, end in _comments_and_strings(lines, first, last, inside):
        lines[start[0]] = lines[start[0]][: start[1]] + lines[end[0]][end[1] :]
    for (row, column), (end_row, end_column) in sorted(_docstrings(function, lines), reverse=True):
        lines[row : end_row + 1] = [lines[row][:column] + lines[end_row][end_column:], *[""] * (end_row - row)]
        inside -= set(range(row + 1, end_row + 1))
    margin = function.col_offset
    kept = []
    for row in range(first, last + 1):
        line = lines[row] if row + 1 in inside else lines[row].rstrip()
        if row in inside:
            kept.append(line)
        elif line.strip():
            kept.append(line[margin:] if not line[:margin].strip() else line.lstrip())
    digest = hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]
    # The descriptors leave no wrapper behind; the overlay looks through them.
    plain = {"staticmethod", "classmethod"}
    decorated = any(getattr(d, "id", None) not in plain for d in function.decorator_list)
    return Fingerprint(digest, signature(function), decorated)


@functools.lru_cache(maxsize=4)  # the functions of one file are read in turn
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


_Place: TypeAlias = "tuple[int, int]"


def _comments_and_strings(lines: list[str], first: int, last: int, inside: set[int]) -> list[tuple[_Place, _Place]]:
    """The comments, and into `inside` each line that begins within a string."""
    comments, opened = [], []
    source = "\n".join(lines[first : last + 1])
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        row, end = token.start[0] + first - 1, token.end[0] + first - 1
        if kind == "COMMENT":
            comments.append(((row, token.start[1]), (end, token.end[1])))
        elif kind == "STRING":
            inside.update(range(row + 1, end + 1))
        elif kind == "FSTRING_START":
            opened.append(row)
        elif kind == "FSTRING_END":
            inside.update(range(opened.pop() + 1, end + 1))
    return comments


def _docstrings(function: Function, lines: list[str]) -> list[tuple[_Place, _Place]]:
    spans = []
    for node in ast.walk(function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            head = node.body[0]
            if isinstance(head, ast.Expr) and isinstance(getattr(head.value, "value", None), str):
                end = head.end_lineno or head.lineno, head.end_col_offset or 0
                spans.append((_place(lines, head.lineno, head.col_offset), _place(lines, *end)))
    return spans


def _place(lines: list[str], row: int, offset: int) -> _Place:
    """ast counts bytes where tokenize counts characters."""
    return row, len(lines[row].encode()[:offset].decode())
