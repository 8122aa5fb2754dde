"""Call back when a module has been executed: on first import, on reload, and on import after removal.

wrapt's post-import hooks do not serve here. They fire on a half-initialised module when they are registered during its
import, they do not fire again on reload or re-import, and one that raises makes the retry succeed unpatched.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

from ultra_patches.core import guard

_Callback = Callable[[ModuleType, bool], None]

_watched: dict[str, _Callback] = {}
#: Modules that were being executed when their hook was set. Nothing signals their end, so that each import checks.
_unfinished: set[str] = set()
_lock = threading.RLock()
#: The module that this thread is looking for: a finder that calls this one again, as wrapt's does, is left to the others.
_looking = threading.local()


def watch(name: str, callback: _Callback) -> ModuleType | None:
    """Call `callback(module, late)` each time `name` has been executed from now on; gives the module if it already was.

    `late` is True where the module was being executed when its hook was set: others may have taken names out of it.
    """
    with _lock:
        _watched[name] = callback
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    module = sys.modules.get(name)
    if module is not None and _initializing(module):
        _unfinished.add(name)
        return None
    return module


def unwatch_all() -> None:
    """Forget every hook and leave `sys.meta_path` as it was."""
    with _lock:
        _watched.clear()
        _unfinished.clear()
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


def settle() -> None:
    """Call back for modules whose hook was set in the middle of their import and that are finished now."""
    for name in tuple(_unfinished):
        module = sys.modules.get(name)
        if module is not None and _initializing(module):
            continue
        _unfinished.discard(name)
        callback = _watched.get(name)
        if module is not None and callback is not None:
            with guard.door(f"what waits for {name}"):
                callback(module, True)


def ready(name: str, executed: str) -> bool:
    """Whether a module has been executed, `executed` being the one whose callback is running."""
    module = sys.modules.get(name)
    return module is not None and (name == executed or not _initializing(module))


def in_subinterpreter() -> bool:
    """Whether this is not the main interpreter of its process."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # since 3.13, and before
        with contextlib.suppress(ImportError, AttributeError):
            interpreters = importlib.import_module(name)
            return bool(interpreters.get_current() != interpreters.get_main())
    return False


def _initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder(importlib.abc.MetaPathFinder):
    """First on the path: asks the other finders, and wraps the loader of a watched module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if _unfinished:
            settle()
        callback = _watched.get(fullname)
        if callback is None or getattr(_looking, "name", None) == fullname:
            return None
        _looking.name = fullname
        try:
            return self._find(fullname, path, target, callback)
        finally:
            _looking.name = None

    def _find(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None, callback: _Callback
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in tuple(sys.meta_path):
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, callback)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Executes the module with its own loader, and then calls back."""

    def __init__(self, loader: importlib.abc.Loader, callback: _Callback) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader, for whoever inspects it.
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        with guard.door(f"what waits for {module.__name__}"):
            self._callback(module, False)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
