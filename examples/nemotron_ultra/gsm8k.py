"""GSM8K (Cobbe et al. 2021) as the JSON lines that the driver reads, from JSON lines or Parquet."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.errors import RunError
from examples.grpo.reward import final_number

SPLITS = ("train", "test")


def collect(where: Path) -> dict[str, bytes]:
    """`train.jsonl` and `test.jsonl` of a file or a folder, which may be a copy of the dataset's repository.

    RunError names the line whose answer does not end in `#### <number>`, and says where nothing is found.
    """
    folder = where / "main" if (where / "main").is_dir() else where
    files = [path for path in ([where] if where.is_file() else sorted(folder.glob("*"))) if path.is_file()]
    found: dict[str, list[str]] = {}
    for path in files:
        split = path.name.partition(".")[0].partition("-")[0]
        if path.suffix in _READERS and split in SPLITS:
            found.setdefault(f"{split}.jsonl", []).extend(_line(path, *row) for row in _READERS[path.suffix](path))
    if empty := [name for name, lines in found.items() if not lines]:
        raise RunError(f"{where}: {empty[0]} would have no lines: get the dataset again")
    if not found:
        raise RunError(f"--data {where}: no train or test file that ends in {' or '.join(_READERS)}")
    return {name: ("\n".join(lines) + "\n").encode() for name, lines in found.items()}


def _line(path: Path, number: int, row: Any) -> str:
    question, answer = (row.get(name) if isinstance(row, dict) else None for name in ("question", "answer"))
    if not isinstance(question, str) or not isinstance(answer, str) or not question.strip():
        raise RunError(f"{path}, line {number}: no `question` and `answer`: correct or drop this line")
    if "####" not in answer or final_number(answer) is None:
        raise RunError(
            f"{path}, line {number}: the answer {answer[-60:]!r} does not end in '#### <number>': correct or drop this line"
        )
    try:
        text = json.dumps({"question": question, "answer": answer}, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise RunError(
            f"{path}, line {number}: half a character ({error.reason}): correct or drop this line"
        ) from error
    return text


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RunError(f"{path}, line {number}: {error}: correct or drop this line") from error


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise RunError(f"{path}: Parquet needs pyarrow: pip install pyarrow, or give JSON lines") from error
    try:
        yield from enumerate(parquet.read_table(path).to_pylist(), 1)
    except (ArrowException, OSError) as error:
        raise RunError(f"{path}: {error}: get this file again") from error


_READERS = {".jsonl": _json_lines, ".parquet": _parquet}
