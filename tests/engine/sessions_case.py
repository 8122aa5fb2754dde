"""What a session of weight updates may look like, on a real engine of NemotronH; prints log-probabilities as JSON.

Run by test_engine_sessions.py. The second engine is started on the other checkpoint and takes whole sessions or nothing.
"""

import ultra_patches  # noqa: F401 - armed before anything imports vLLM

# isort: split
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples import tiny_nemotron_h
from examples import weight_update_session as example
from ultra_patches.reload.session import ATOMIC


def send(llm: Any, folder: str, tensors: Mapping[str, Any], *calls: Sequence[str]) -> None:
    """One session in these calls, each of these names."""
    from examples.cpu_transfer import pack

    llm.start_weight_update()
    for number, names in enumerate(calls):
        info = pack(Path(folder, f"{number}"), {name: tensors[name] for name in names})
        llm.update_weights({"update_info": info})
    llm.finish_weight_update()


def fail(llm: Any, folder: str, tensors: Mapping[str, Any], calls: Sequence[Sequence[str]]) -> str:
    """A session whose last call finds nothing to receive. Gives the error."""
    from examples.cpu_transfer import pack

    llm.start_weight_update()
    for number, names in enumerate(calls):
        info = pack(Path(folder, f"{number}"), {name: tensors[name] for name in names})
        llm.update_weights({"update_info": info})
    info = pack(Path(folder, "lost"), {"lost": next(iter(tensors.values()))})
    Path(info["path"]).unlink()
    try:
        llm.update_weights({"update_info": info})
    except Exception as error:  # noqa: BLE001 # whatever the engine makes of it
        return f"{type(error).__name__}: {error}"
    return "no error"


def main() -> None:
    for name, value in example.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    pattern, kernel = tiny_nemotron_h.DEFAULT_PATTERN, tiny_nemotron_h.DEFAULT_CONV_KERNEL
    seen: dict[str, Any] = {}
    errors: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", folder)
        saved = [tiny_nemotron_h.save(Path(folder, f"seed-{seed}"), seed, pattern, kernel) for seed in (0, 1)]
        old, new = (tiny_nemotron_h.weights(seed, pattern, kernel) for seed in (0, 1))
        names = list(new)
        size = example.TENSORS_PER_CHUNK
        chunks = [names[start : start + size] for start in range(0, len(names), size)]
        some = [name for name in names if ".0." in name]
        with example.engine(saved[0]) as llm:
            seen["old, fresh"] = example.score(llm)
            send(llm, folder, new, names[::-1])
            seen["new, reversed"] = example.score(llm)
            send(llm, folder, old, *[[name] for name in names])
            seen["old, a call each"] = example.score(llm)
            send(llm, folder, new, *[chunk * 2 for chunk in chunks], names)
            seen["new, everything twice"] = example.score(llm)
            send(llm, folder, new, *chunks)
            seen["new, twice in a row"] = example.score(llm)
            send(llm, folder, old, names)
            errors["first call"] = fail(llm, folder, new, [])
            seen["old, failed at the first call"] = example.score(llm)
            errors["half-way"] = fail(llm, folder, new, chunks[: len(chunks) // 2])
            send(llm, folder, new, *chunks)
            seen["new, failed and retried"] = example.score(llm)
            send(llm, folder, old, names)
            send(llm, folder, new, some)
            seen["mixed, partial"] = example.score(llm)
            send(llm, folder, {**old, **{name: new[name] for name in some}}, names)
            seen["mixed, whole"] = example.score(llm)
        os.environ[ATOMIC] = "1"
        with example.engine(saved[1]) as llm:
            seen["new, fresh"] = example.score(llm)
            errors["atomic"] = fail(llm, folder, old, chunks[:-1])
            seen["new, atomic session failed half-way"] = example.score(llm)
            send(llm, folder, old, *chunks)
            seen["old, atomic"] = example.score(llm)
            send(llm, folder, new, *chunks)
            seen["new, back and forth"] = example.score(llm)
    where = sys.modules["vllm"].__file__
    print("\n" + json.dumps({"seen": seen, "errors": errors, "vllm": where}), flush=True)


if __name__ == "__main__":
    main()
