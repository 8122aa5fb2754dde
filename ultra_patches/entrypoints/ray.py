"""Ray workers: a `runtime_env` whose hook arms every worker process, and which carries the driver's settings to it.

    ray.init(runtime_env=ultra_patches.entrypoints.ray.runtime_env({"env_vars": {"NCCL_DEBUG": "WARN"}}))

Ray takes one `worker_process_setup_hook`, and only from `ray.init` or the job submission: in the runtime_env of one
task or actor Ray ignores it silently. A hook that is set already still runs, before ours. Ray writes into the
dict that it is given, so call this again for the next `ray.init`. Ray stores a runtime_env in its control store and
shows it in its dashboard, so that no secret is put into it unasked.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ultra_patches
from ultra_patches.core import overlay, settings
from ultra_patches.errors import UltraPatchesError

HOOK = f"{__name__}.setup"
#: Where `setup` finds the user's hook. A job submission takes nothing but names, so that it cannot be an argument.
USER_HOOK = "ULTRA_PATCHES_RAY_USER_HOOK"
#: vLLM copies only the prefixes that it knows, and those named here, to the Ray workers that it starts.
VLLM_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"

#: Where Ray notes the hook. It stays in the user's `env_vars` after `ray.init`, and makes the next one refuse another hook.
_RAY_NOTE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
_PREFIXES = ("ULTRA_PATCHES", "VLLM_", "HF_", "HUGGING_FACE_", "NCCL_", "FI_")
_FOLDERS = frozenset(
    {
        "CUDA_CACHE_PATH",
        "DG_JIT_CACHE_DIR",
        "FLASHINFER_CUBIN_DIR",
        "FLASHINFER_WORKSPACE_BASE",
        "TILELANG_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR",
        "TORCH_HOME",
        "TRANSFORMERS_CACHE",
        "TRITON_CACHE_DIR",
        "XDG_CACHE_HOME",
    }
)
#: Valid in one process or on one host: elsewhere they give a wrong address or the rank of another process.
_LOCAL = frozenset(
    {
        USER_HOOK,
        "VLLM_DP_RANK",
        "VLLM_DP_RANK_LOCAL",
        "VLLM_EC_SIDE_CHANNEL_HOST",
        "VLLM_HOST_IP",
        "VLLM_HOST_PORT",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_P2P_SIDE_CHANNEL_HOST",
        "VLLM_PORT",
    }
)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def runtime_env(
    given: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ, *, secrets: Iterable[str] = ()
) -> dict[str, Any]:
    """Give a copy of a Ray runtime_env that also arms each worker and forwards the settings of `environ`.

    What `given` has in `env_vars` wins over `environ`. A variable whose name holds TOKEN, KEY, SECRET or PASSWORD is
    forwarded only when `secrets` names it, harmless ones like VLLM_MAX_BAD_WORDS_TOTAL_TOKENS alike; a named one that
    is not set is left out. Raises UltraPatchesError, which shows no value, where Ray could make nothing of `given`.
    """
    merged: dict[str, Any] = dict(given or {})
    own = merged.get("env_vars") or {}
    if not isinstance(own, Mapping):
        raise UltraPatchesError(f"runtime_env['env_vars'] is a {type(own).__name__}: give a dict of names and texts")
    named = {secrets} if isinstance(secrets, str) else set(secrets)
    variables: dict[str, Any] = {name: environ[name] for name in sorted(environ) if _forwarded(name, named)}
    variables.update(own)
    variables.pop(_RAY_NOTE, None)
    words = [word.strip() for word in str(variables.get(VLLM_PREFIXES, "")).split(",") if word.strip()]
    variables[VLLM_PREFIXES] = ",".join(dict.fromkeys([*words, "ULTRA_PATCHES"]))
    merged["worker_process_setup_hook"] = _chain(merged.get("worker_process_setup_hook"), variables)
    merged["env_vars"] = variables
    return merged


def setup() -> None:
    """Ray calls this in each worker before its first task: the user's hook named in the environment, then ours.

    Ray has imported this package to find the function, and that has armed the patches: the user's hook may import an
    upstream. Raises what that hook raises; in strict mode also UltraPatchesError.
    """
    name = os.environ.get(USER_HOOK)
    if name:
        _run(_named(name))


@dataclass(frozen=True)
class Chained:
    """A hook that is a callable and has no name which a worker could import: Ray pickles it together with this."""

    hook: Callable[[], object]

    @property
    def __name__(self) -> str:
        # Ray asks for it, and then shows it as the name of the hook.
        return f"ultra_patches after {getattr(self.hook, '__name__', type(self.hook).__name__)}"

    def __call__(self) -> None:
        """Raises what the user's hook raises; in strict mode also UltraPatchesError."""
        _run(self.hook)


def _forwarded(name: str, secrets: set[str]) -> bool:
    if name in secrets:
        return True
    if name in _LOCAL or any(word in name.upper() for word in _SECRET):
        return False
    return name in _FOLDERS or name.startswith(_PREFIXES) or _is_health_timeout(name)


def _is_health_timeout(name: str) -> bool:
    """Of Ray's own variables the time-outs alone: RAY_ADDRESS or RAY_JOB_ID of the driver would misdirect a worker."""
    return name.startswith("RAY_") and any(word in name.lower() for word in ("health_check", "timeout", "heartbeat"))


def _chain(theirs: object, variables: dict[str, Any]) -> str | Chained:
    """The hook that runs theirs and then ours. A name of theirs goes into `variables`."""
    if theirs == HOOK:
        return HOOK
    if isinstance(theirs, Chained):
        return theirs
    if theirs is not None:
        variables.pop(USER_HOOK, None)
    if theirs is None or isinstance(theirs, str):
        if theirs:
            variables[USER_HOOK] = theirs
        return HOOK
    if callable(theirs):
        return Chained(theirs)
    raise UltraPatchesError(
        f"runtime_env['worker_process_setup_hook'] is a {type(theirs).__name__}: "
        "give 'package.module.function' or a function"
    )


def _named(path: str) -> Callable[[], object]:
    """As Ray resolves it. Raises ImportError, AttributeError or ValueError as Ray would for the user's hook."""
    module, _, function = path.rpartition(".")
    found: Callable[[], object] = getattr(importlib.import_module(module), function)
    return found


def _run(theirs: Callable[[], object]) -> None:
    was = settings.read(()).mode
    theirs()
    # All other settings are read again when an upstream is imported, but where the mode was off no import is watched.
    if was == "off" != settings.read(()).mode:
        overlay.disarm()
        ultra_patches._arm()
