"""Update each architecture in sessions of every kind, and print what is not as a plain load leaves it, a line of JSON each.

    PYTHONPATH=<sources of a release> VLLM_TARGET_DEVICE=cpu python -m compat.zoo.case ARCH...

A fork an architecture, after the slow imports; the overlay is armed where ULTRA_PATCHES does not say `off`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="CRITICAL", TQDM_DISABLE="1",
    TRANSFORMERS_VERBOSITY="error", VLLM_TARGET_DEVICE="cpu", VLLM_NO_USAGE_STATS="1",
)  # fmt: skip

if os.environ.get("ULTRA_PATCHES") != "off":
    import ultra_patches  # noqa: F401 # arms the overlay
import torch

from compat.zoo import compare, configs
from ultra_patches.errors import one_line

SECONDS = 240
Weights = Mapping[str, torch.Tensor]
#: What is sent, each a load call, from a model with the weights A; and the checkpoint that the model then has.
KINDS: dict[str, tuple[Callable[[Weights], list[Weights]], str]] = {
    "whole": (lambda b: [b], "b"),
    "reversed": (lambda b: [dict(reversed(list(b.items())))], "b"),
    "chunks": (lambda b: [dict(list(b.items())[start::3]) for start in range(3)], "b"),
    "twice": (lambda b: [b, b], "b"),
    "partial": (lambda b: [tenth(b)], "mixed"),
}


def tenth(weights: Weights) -> Weights:
    """Every tenth name."""
    return {name: value for number, (name, value) in enumerate(weights.items()) if number % 10 == 3}


def checkpoints(architecture: str, kind: str, folder: Path) -> dict[str, Weights]:
    """Folders `a`, `b` and `mixed` as Hugging Face writes them, with other values in each; gives what is in them."""
    from safetensors.torch import load_file, save_file

    made, config = configs.small(architecture, kind)
    try:
        torch.manual_seed(0)
        model = made._from_config(config) if hasattr(made, "_from_config") else made(config)
        model = model.to(torch.bfloat16)
        model.save_pretrained(folder / "a", max_shard_size="1TB")
    except Exception as error:
        raise configs.NotMadeError(f"transformers makes no model of it: {one_line(error)}") from error
    del model
    first = load_file(folder / "a" / "model.safetensors")
    found: dict[str, Weights] = {}
    for seed, name in enumerate("ab"):
        generator = torch.Generator().manual_seed(seed)
        found[name] = {n: _drawn(value, generator) for n, value in first.items()}
    found["mixed"] = {**found["a"], **tenth(found["b"])}
    for name, weights in found.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text((folder / "a" / "config.json").read_text())
        save_file(dict(weights), folder / name / "model.safetensors", metadata={"format": "pt"})
    return found


def _drawn(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not like.is_floating_point():
        return like
    return torch.randn(like.shape, generator=generator).mul_(0.2).to(like.dtype)


def loaded(folder: Path) -> tuple[Any, Any]:
    """A model as vLLM loads it from a folder, and its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16"
    ).create_engine_config()
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def session(model: Any, config: Any, calls: Sequence[Weights]) -> None:
    """One update; what was handed over is overwritten as soon as the next is asked for, as a transport with one buffer does."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    def sent(call: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in call.items():
            handed = value.clone()
            yield name, handed
            if handed.is_floating_point():
                handed.fill_(torch.nan)

    with set_current_vllm_config(config), torch.no_grad():
        reload.initialize_layerwise_reload(model)
        for call in calls:
            model.load_weights(sent(call))
        reload.finalize_layerwise_reload(model, config.model_config)


def tried(architecture: str, kind: str) -> dict[str, Any]:
    """What each kind of update left. Raises NotMadeError where there is no model."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        weights = checkpoints(architecture, kind, folder)
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, (folder / "store").as_uri(), 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
        try:
            right = {name: compare.copies(compare.tensors(loaded(folder / name)[0])) for name in weights}
            model, config = loaded(folder / "a")
        except Exception as error:
            raise configs.NotMadeError(f"vLLM does not load it here: {one_line(error)}") from error
        found: dict[str, str] = {}
        for title, (calls, target) in KINDS.items():
            found[title] = _outcome(model, config, calls(weights["b"]), right[target])
            back = _outcome(model, config, [weights["a"]], right["a"])
            if back != "right":
                found.setdefault("back", back)
                model = None
                gc.collect()
                model, config = loaded(folder / "a")
        found.setdefault("back", "right")
        return {"tensors": len(right["a"]), "names": len(weights["a"]), "updates": found}


def _outcome(model: Any, config: Any, calls: Sequence[Weights], right: Mapping[str, torch.Tensor]) -> str:
    before = compare.addresses(model)
    try:
        session(model, config, calls)
    except Exception as error:  # noqa: BLE001 # what went wrong is the result
        kind = "refused" if "weight update refused" in str(error) else "raised"
        return f"{kind}: {one_line(error)}"
    wrong = compare.differ(right, compare.tensors(model))
    if wrong:
        return f"wrong: {len(wrong)} of {len(right)}: {', '.join(wrong[:4])}"
    after = compare.addresses(model)
    moved = [name for name, place in before.items() if after.get(name) != place]
    return f"moved: {', '.join(moved[:4])}" if moved else "right"


def _line_of(architecture: str, kind: str) -> dict[str, Any]:
    began = time.monotonic()
    try:
        found = tried(architecture, kind)
    except configs.NotMadeError as error:
        found = {"not made": str(error)}
    except BaseException as error:  # noqa: BLE001 # a fork answers whatever happens
        found = {"not made": f"the zoo failed: {one_line(error)}", "traceback": traceback.format_exc()[-1500:]}
    return {"architecture": architecture, "kind": kind, "seconds": round(time.monotonic() - began, 1), **found}


def main(wanted: Sequence[str]) -> None:
    """Print a line of JSON for each architecture, or for all of the registry."""
    warnings.simplefilter("ignore")
    import transformers  # noqa: F401 # before the forks
    from vllm.model_executor.model_loader import get_model, reload  # noqa: F401 # the same

    known = configs.architectures()
    for architecture in wanted or known:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            signal.alarm(SECONDS)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            line = _line_of(architecture, known.get(architecture, "text"))
            with os.fdopen(writer, "w") as out:
                out.write(json.dumps(line))
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            text = answer.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not text:
            reason = f"the process ended with {status} ({SECONDS} s are given)"
            text = json.dumps(
                {"architecture": architecture, "kind": known.get(architecture, "text"), "not made": reason}
            )
        print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
