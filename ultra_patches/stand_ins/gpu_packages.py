"""Stand-ins for GPU packages that Megatron-Bridge imports and this machine cannot install."""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

#: Where Bridge imports transformer-engine without a guard, in 0.2.0rc6 to 0.6.2.
_UNGUARDED = ("megatron.bridge.peft", "megatron.bridge.models.gpt_full_te_layer_autocast_spec")
#: Where Bridge 0.5 registers a model type that transformers has by itself from 5.9 on, which ends the import.
_REGISTERS = "megatron.bridge.models.qwen3_asr.hf_qwen3_asr"


def stand_in_for_gpu_packages() -> None:
    """Let Megatron-Bridge be imported where transformer-engine cannot be installed; for processes of a probe only.

    Bridge imports it unguarded in `peft` and one layer spec; core, and Bridge elsewhere, guard it and must go on finding
    nothing. So each stand-in is seen only by the modules under `megatron.bridge` that do not do without. Bridge 0.5 is
    imported beside newer releases of transformers than it asks for.
    """
    import builtins
    import types

    absent = [
        name
        for name in ("transformer_engine", "modelopt", "nvidia_resiliency_ext")
        if name not in sys.modules and importlib.util.find_spec(name) is None
    ]
    if not absent:
        return
    real = builtins.__import__

    class StandIn(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            import torch

            made: Any = type(name, (torch.nn.Module,), {}) if name[:1].isupper() else StandIn(f"{self.__name__}.{name}")
            setattr(self, name, made)
            return made

    roots = {name: StandIn(name) for name in absent}

    def scoped(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002 # the signature of __import__
        root = name.partition(".")[0]
        importer = (globals or {}).get("__name__", "")
        if importer == _REGISTERS and name == "transformers" and fromlist:
            return _register_again(real(name, globals, locals, fromlist, level), fromlist)
        if level or root not in roots or not importer.startswith("megatron.bridge"):
            return real(name, globals, locals, fromlist, level)
        if root == "transformer_engine" and not importer.startswith(_UNGUARDED):
            return real(name, globals, locals, fromlist, level)
        found: Any = roots[root]
        for part in name.split(".")[1:] if fromlist else ():
            found = getattr(found, part)
        return found

    builtins.__import__ = scoped


def _register_again(transformers: Any, names: Any) -> Any:
    """Some names of transformers, where the classes that register models take those that are registered already."""
    found = {name: getattr(transformers, name) for name in names}
    return SimpleNamespace(
        **{
            name: SimpleNamespace(register=functools.partial(one.register, exist_ok=True))
            if name.startswith("Auto")
            else one
            for name, one in found.items()
        }
    )
