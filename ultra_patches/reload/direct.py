"""What a model's `load_weights` writes past the weight loaders, into the tensors that stand in during a session.

A tensor that stands in has no memory, so that what is written into it is lost. Each such operation is kept, in the order of
all that is loaded into its layer, and done again on the layer's new tensors when the layer takes its weights.

Imported only where vLLM's reload modules are, because it needs torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_map

from ultra_patches import received
from ultra_patches.errors import UltraPatchesError
from ultra_patches.reload.regions import Region

_aten = torch.ops.aten
#: These write every element of their first argument, whatever it was before.
WHOLE = frozenset({_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})
#: These write some elements of their first argument, whatever they were before. The names are of what is written.
_PARTS = {
    _aten.index_put_.default: "values",
    _aten.index_copy_.default: "source",
    _aten.index_fill_.int_Scalar: "value",
    _aten.index_fill_.int_Tensor: "value",
    _aten.scatter_.src: "src",
    _aten.scatter_.value: "value",
    _aten.masked_fill_.Scalar: "value",
    _aten.masked_fill_.Tensor: "value",
    _aten.masked_scatter_.default: "source",
}
#: These give a tensor other memory, or its memory another form.
_MOVES = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})


class DirectWriteError(UltraPatchesError):
    """An operation that was written past the weight loaders cannot be done on the layer's new tensors."""


@dataclass(frozen=True)
class Placeholder:
    """A tensor without memory in the place of one of a layer's."""

    layer: ref[torch.nn.Module]
    name: str
    #: Its name in the model.
    path: str
    tensor: torch.Tensor

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class View:
    """What an operation had in the place of an argument: elements of a placeholder, by offset, shape and strides."""

    name: str
    dtype: torch.dtype
    region: Region

    def on(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The same elements of the layer's tensor of that name."""
        base = tensors[self.name]
        offset, shape, strides = self.region
        offset += base.storage_offset() * base.element_size() // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), offset, shape, strides)


@dataclass(frozen=True)
class DirectWrite:
    """An operation on a placeholder, with all that it needs to be done again."""

    #: The tensor of the layer that is written.
    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def region(self) -> Region | None:
        """Elements that are written, whatever they were before; None where not all of what the operation is given are."""
        target = self.args[0]
        return target.region if self.func in WHOLE and isinstance(target, View) else None

    def refused(self, placeholder: Placeholder, why: str) -> DirectWriteError:
        """The error that refuses it."""
        return DirectWriteError(_refusal(placeholder, self.func, why))

    def redo(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do it on the layer's new tensors, by name."""

        def real(value: Any) -> Any:
            return value.on(tensors) if isinstance(value, View) else value

        with torch.no_grad():
            self.func(*tree_map(real, self.args), **tree_map(real, dict(self.kwargs)))

    def mark(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A mask of the elements of a layer's tensor that it writes, where `region` does not tell: bool, of its shape."""
        written = _PARTS.get(self.func)
        target = self.args[0]
        if written is None or not isinstance(target, View) or target.dtype is not tensor.dtype:
            return None
        names = [argument.name for argument in self.func._schema.arguments]
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        value = given[written]
        given[written] = torch.ones_like(value) if isinstance(value, torch.Tensor) else 1
        numel = tensor.untyped_storage().nbytes() // tensor.element_size()
        mask = torch.zeros(numel, dtype=tensor.dtype, device=tensor.device)
        given[names[0]] = target.on({self.name: mask.as_strided(tensor.shape, tensor.stride(), 0)})
        with torch.no_grad():
            self.func(**given)
        return mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()) != 0


class Watch(TorchDispatchMode):  # type: ignore[misc] # torch is not followed
    """Inside, each operation that writes into a placeholder is handed to `take`, which may raise."""

    def __init__(
        self, placeholders: Mapping[int, Placeholder], take: Callable[[Placeholder, DirectWrite], None]
    ) -> None:
        super().__init__()
        #: By the identity of its storage: on the meta device the address of all memory is 0.
        self._placeholders = placeholders
        self._take = take
        self.is_on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, name in _writes(func):
            written = args[place] if place < len(args) else kwargs.get(name)
            for target in written if isinstance(written, (list, tuple)) else (written,):
                if isinstance(target, torch.Tensor) and target.is_meta:
                    placeholder = self._placeholders.get(target.untyped_storage()._cdata)
                    if placeholder is not None:
                        return self._kept(placeholder, target is args[0] if args else False, func, args, kwargs)
        return func(*args, **kwargs)

    def _kept(self, placeholder: Placeholder, is_first: bool, func: Any, args: Any, kwargs: Any) -> Any:
        if not is_first or func.name().partition(".")[0] in _MOVES:
            raise DirectWriteError(
                _refusal(placeholder, func, "which gives it other memory or writes several tensors at once")
            )
        # Shapes are checked here: what does not fit raises as it would on a tensor with memory.
        result = func(*tree_map(_without_memory, args), **tree_map(_without_memory, kwargs))

        def keep(value: Any) -> Any:
            return self._keep(placeholder, func, value) if isinstance(value, torch.Tensor) else value

        self._take(placeholder, DirectWrite(placeholder.name, func, tree_map(keep, args), tree_map(keep, kwargs)))
        return result

    def _keep(self, placeholder: Placeholder, func: Any, value: torch.Tensor) -> Any:
        if not value.is_meta:
            return value if received.are_own_copies() else value.clone()
        of = self._placeholders.get(value.untyped_storage()._cdata)
        if of is None or of.layer is not placeholder.layer:
            raise DirectWriteError(_refusal(placeholder, func, "which takes a value that is computed from a parameter"))
        offset = value.storage_offset() - of.tensor.storage_offset() * of.tensor.element_size() // value.element_size()
        return View(of.name, value.dtype, (offset, tuple(value.shape), value.stride()))

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Watch what is done inside, in this thread; where it is on already, nothing more."""
        if self.is_on:
            yield
            return
        self.is_on = True
        try:
            with self:
                yield
        finally:
            self.is_on = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is watched: a weight loader is counted and repeated by upstream."""
        if not self.is_on or _get_current_dispatch_mode() is not self:
            yield
            return
        self.__exit__(None, None, None)
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True
            self.__enter__()


def replaced(placeholder: Placeholder, now: torch.Tensor | None) -> DirectWrite | None:
    """The values of a tensor that was put in the place of a placeholder; None where none was.

    `now` is what stands there. `.data =` is refused by torch, as a tensor without memory has another type.
    """
    if now is None or now.is_meta:
        return None
    tensor = placeholder.tensor
    if now.shape != tensor.shape:
        raise DirectWriteError(
            f"weight update refused: {placeholder} had the shape {tuple(tensor.shape)} and the model's load_weights puts a "
            f"tensor of {tuple(now.shape)} in its place, which the layer cannot take in a session. Load this model anew"
        )
    view = View(placeholder.name, tensor.dtype, (0, tuple(tensor.shape), tensor.stride()))
    return DirectWrite(placeholder.name, _aten.copy_.default, (view, now.detach().clone()), {})


def _without_memory(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) and not value.is_meta else value


@functools.cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _refusal(placeholder: Placeholder, func: Any, why: str) -> str:
    return (
        f"weight update refused: {placeholder} is written by {func.name()} in the model's load_weights, {why}, so that it cannot "
        "be done on the layer's new tensors. Load this model anew"
    )
