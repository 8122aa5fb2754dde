"""A layerwise weight update of vLLM: its phases, what is kept of each layer, the order of the rules, and its one end.

Each function of vLLM's reload that patches replace is a phase of a session:

    begin     initialize_layerwise_reload(model)       the layers give their tensors away for ones without memory
    restore   restore_layer_on_meta(layer, info)       the same for one layer
    loader    make_online_process_loader(layer, name)  what a weight of the session is handed to
    count     get_numel_loaded(weight_loader, args)    how much of its layer a weight is
    process   _layerwise_process(layer, info)          a layer is complete and takes its weights
    place     _place_kernel_tensors(layer, info)       a layer gets the tensors back that it computes with
    finish    finalize_layerwise_reload(model, …)      layers that are not complete, and attention

A patch adds its rule to the phases that it needs, by `seam`; a phase applies the rules of all patches that are set, in the
order that is written in it, around the upstream's function. Another way of loading in a later release is another phase here.

Nothing is kept on vLLM's objects. What is kept of a layer lies in one map with weak keys and goes with its session, which ends
when it is finished, when it fails, when another begins on the same layers, and when the rule is taken away.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from ultra_patches import flags, received
from ultra_patches.errors import UltraPatchesWarning
from ultra_patches.reload.upstream import LAYERWISE, LayerInfo, is_attention, is_open, is_waiting, never_counted

if TYPE_CHECKING:
    import torch

    from ultra_patches.reload.direct import DirectWrite, Placeholder, Watch
    from ultra_patches.reload.regions import Coverage, Region

    Layer: TypeAlias = torch.nn.Module
    Build: TypeAlias = Callable[[Callable[..., Any], ModuleType], Callable[..., Any]]

#: Set to 1, no layer takes its new weights before the session ends, at the price of holding all of them until then.
ATOMIC = flags.ATOMIC_RELOAD


class Rule(str, Enum):
    """What a patch adds to a session. The value is the patch's id; each is set over the one before it."""

    #: A loader that copies twice counts once.
    CAP = "vllm-reload-numel-guard"
    #: A buffer that is a view of a parameter stays one.
    VIEWS = "vllm-mamba-conv-weights"
    #: An element that is loaded twice counts once.
    ONCE = "vllm-reload-duplicate-weights"
    #: A weight that has to be kept is copied.
    COPY = "vllm-reload-receive-buffer"
    #: A parameter that was registered late is part of its layer.
    LATE = "vllm-reload-late-parameters"
    #: What a model writes past the loaders is written into its new tensors.
    DIRECT = "vllm-reload-direct-writes"
    #: What is not sent keeps its value.
    KEEP = "vllm-reload-keep-unsent"
    #: Tensors that are never moved to the meta device change at the end.
    STAGE = "vllm-reload-live-write"
    #: A session that fails gives the old tensors back.
    ABANDON = "vllm-reload-abandoned-session"

    @property
    def over(self) -> tuple[str, ...]:
        """What the patch declares as `over`."""
        before = list(Rule)[: list(Rule).index(self)]
        return tuple(rule.value for rule in before[-1:])

    def withdraw(self) -> None:
        """What becomes of open sessions when the patch is taken back: they go on as if it had never been set."""
        _withdraw(self)


@dataclass(frozen=True)
class Seam:
    """One upstream function as patches have set it: what they replaced, its module, and the rules that they add."""

    upstream: Callable[..., Any]
    module: ModuleType
    rules: frozenset[Rule]


@dataclass(frozen=True)
class Staged:
    """A live parameter, the copy that stands for it until the session ends, and its value at the start."""

    live: torch.Tensor
    copy: torch.Tensor
    before: torch.Tensor


@dataclass(eq=False)
class Session:
    """One update of one model."""

    #: The rules of the patches that keep something of it, as long as they are set.
    rules: set[Rule] = field(default_factory=set)
    #: Layers that have taken their new weights.
    taken: int = 0
    is_ending: bool = False
    #: By the id of the live parameter, which two layers may share as they share the copy. `Staged` keeps both alive.
    staged: dict[int, Staged] = field(default_factory=dict)
    #: Sees what is written past the loaders.
    watch: Watch | None = None
    #: The layer that was written so last, while a `load_weights` runs.
    turn: Layer | None = None


@dataclass(eq=False)
class LayerState:
    """What a session keeps of one layer. Nothing in here refers to the layer, whose entry would then never go."""

    session: Session
    #: Buffers that are views of a parameter, and the names of all that are not persistent, before the session.
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    non_persistent: frozenset[str] | None = None
    #: What was written of each parameter.
    written: dict[str, Coverage] = field(default_factory=dict)
    #: The parameters of a layer that is processed, while those that were waiting stand in to drop what still comes.
    done: dict[str, torch.Tensor | None] | None = None
    staged: dict[str, Staged] = field(default_factory=dict)
    #: What has no memory in the session, by name, and what was written into it past the loaders: each with the number of
    #: weights that the loaders were handed before.
    placeholders: dict[str, Placeholder] = field(default_factory=dict)
    direct: list[tuple[int, DirectWrite]] = field(default_factory=list)


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
_layers: WeakKeyDictionary[Layer, LayerState] = WeakKeyDictionary()
_seams: WeakKeyDictionary[Callable[..., Any], Seam] = WeakKeyDictionary()
#: What stands in for `load_weights` in a session.
_watchers: WeakSet[Callable[..., Any]] = WeakSet()
#: The layer and the name of the parameter that is being loaded in this thread.
_loading: ContextVar[tuple[LayerState, str] | None] = ContextVar("ultra_patches_loading", default=None)


def seam(phase: Callable[[Seam], Callable[..., Any]], rule: Rule) -> Build:
    """A patch's `build` for one phase: the function to set, under this rule and those of the patches below."""

    def build(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
        below = _seams.get(original, Seam(original, module, frozenset()))
        made = Seam(below.upstream, module, below.rules | {rule})
        function = phase(made)
        _seams[function] = made
        return function

    return build


def begin(seam: Seam) -> Callable[..., Any]:
    """`initialize_layerwise_reload(model)`."""
    layerwise, upstream = seam.module, seam.upstream

    def initialize_layerwise_reload(model: Layer) -> None:
        _end_left_over(seam, model)
        session = Session(set(seam.rules))
        for layer in model.modules():
            # Without the rule that gives tensors back, a layer of a session that was left open goes on as it is.
            _layers.setdefault(layer, LayerState(session)).session = session
        with _giving_back(seam, layerwise, model, "the start of a weight update"):
            upstream(model)
            if Rule.DIRECT in seam.rules:
                _watch(layerwise, session, model)

    return initialize_layerwise_reload


def restore(seam: Seam) -> Callable[..., Any]:
    """`restore_layer_on_meta(layer, info)`."""
    meta, upstream, rules = seam.module, seam.upstream, seam.rules

    def restore_layer_on_meta(layer: Layer, info: LayerInfo) -> None:
        if Rule.LATE in rules and not _is_processed(layer):
            # Where the layer is processed, what it has more than at its making may be a product of that; there it was
            # recorded before the processing.
            _record_late(meta, layer, info)
        if Rule.VIEWS in rules:
            _restore_beside_views(meta, layer, info, _state_of(layer))
        else:
            upstream(layer, info)
        if Rule.STAGE in rules:
            _stage(meta, layer, _state_of(layer))

    return restore_layer_on_meta


def loader(seam: Seam) -> Callable[..., Any]:
    """`make_online_process_loader(layer, param_name)`."""
    upstream, rules = seam.upstream, seam.rules

    def make_online_process_loader(layer: Layer, param_name: str) -> Callable[..., Any]:
        load_later = upstream(layer, param_name)
        info: LayerInfo = seam.module.get_layerwise_info(layer)

        @functools.wraps(load_later)
        def online_process_loader(*args: Any, **kwargs: Any) -> Any:
            state = _layers.get(layer)
            session = None if state is None else state.session
            if session is not None and session.turn is not None and session.turn is not layer:
                _end_turn(seam.module, session)
            before = len(info.loaded_weights)
            token = _loading.set(None if state is None else (state, param_name))
            try:
                with session.watch.paused() if session is not None and session.watch is not None else _NOTHING:
                    result = load_later(*args, **kwargs)
            finally:
                _loading.reset(token)
            # What the layer has used already is not kept, so the last weight of a layer needs no copy.
            if Rule.COPY in rules and len(info.loaded_weights) > before and not received.are_own_copies():
                _copy_tensors(info.loaded_weights[-1][1].arguments)
            return result

        return online_process_loader

    return make_online_process_loader


def count(seam: Seam) -> Callable[..., Any]:
    """`get_numel_loaded(weight_loader, args)`: elements of the layer that a call loads, and what the loader returns."""
    import torch

    from ultra_patches.reload.regions import Writes

    meta, upstream, rules = seam.module, seam.upstream, seam.rules
    # MetaCopyCounter until 0.18.
    counter = getattr(meta, "CopyCounter", None) or meta.MetaCopyCounter
    numel_of = _numel_of(meta)
    writes = Writes()

    def get_numel_loaded(weight_loader: Callable[..., Any], args: Any) -> tuple[int, object]:
        param = args.arguments.get("param")
        loading = _loading.get() if Rule.ONCE in rules else None
        if loading is not None and isinstance(param, torch.Tensor):
            state, name = loading
            with writes.of(param):
                value = weight_loader(*args.args, **args.kwargs)
            return _add_written(state, name, param, writes.regions, numel_of), value
        if Rule.CAP not in rules:
            counted: tuple[int, object] = upstream(weight_loader, args)
            return counted
        with counter() as copies:
            value = weight_loader(*args.args, **args.kwargs)
        loaded: int = copies.copied_numel
        return min(loaded, numel_of(param)) if isinstance(param, torch.Tensor) else loaded, value

    return get_numel_loaded


def process(seam: Seam) -> Callable[..., Any]:
    """`_layerwise_process(layer, info)`."""
    from ultra_patches.reload import partial

    layerwise, upstream, rules = seam.module, seam.upstream, seam.rules

    def _layerwise_process(layer: Layer, info: LayerInfo) -> None:
        if not is_waiting(info):
            upstream(layer, info)  # a model that is loaded for the first time
            return
        state = _layers.get(layer) or LayerState(Session())
        session = state.session
        if Rule.ABANDON in rules and flags.is_on(ATOMIC) and not session.is_ending:
            return
        if Rule.DIRECT in rules:
            _take_replaced(layer, info, state)
        waiting = dict(layer._parameters)
        with _live_in_place(layerwise, layer, state):
            if state.direct or (Rule.KEEP in rules and not partial.is_complete(layerwise, layer, info)):
                direct, state.direct = state.direct, []
                partial.finish(layerwise, layer, info, direct)
            else:
                upstream(layer, info)
        session.taken += 1
        is_processed = isinstance(getattr(layer, "quant_method", None), layerwise.QuantizeMethodBase)
        if Rule.ONCE in rules and is_processed and not session.is_ending and layer in _layers:
            # What still comes for this layer would be written over what its kernel computes with, or find no parameter.
            # The parameters that were waiting drop it.
            state.done = dict(layer._parameters)
            _put(layer, waiting)

    return _layerwise_process


def place(seam: Seam) -> Callable[..., Any]:
    """`_place_kernel_tensors(layer, info)`."""
    layerwise, upstream, rules = seam.module, seam.upstream, seam.rules

    def _place_kernel_tensors(layer: Layer, info: LayerInfo) -> None:
        if Rule.VIEWS not in rules or info.kernel_tensors is None:
            upstream(layer, info)
            return
        state = _layers.get(layer) or LayerState(Session())
        # As they are now where the layer was not restored; taking a buffer off takes its name out of that set.
        kept = frozenset(layer._non_persistent_buffers_set) if state.non_persistent is None else state.non_persistent
        parameters, buffers = info.kernel_tensors
        for name in layerwise.get_layer_tensors(layer):
            delattr(layer, name)
        for name, kernel in parameters.items():
            layer.register_parameter(name, kernel)
        for name, buffer in {**buffers, **state.views}.items():
            layer.register_buffer(name, buffer, persistent=name not in kept)
        state.views = {}

    return _place_kernel_tensors


def finish(seam: Seam) -> Callable[..., Any]:
    """`finalize_layerwise_reload(model, model_config)`."""
    layerwise, upstream, rules = seam.module, seam.upstream, seam.rules

    def finalize_layerwise_reload(model: Layer, *args: Any, **kwargs: Any) -> None:
        with _giving_back(seam, layerwise, model, "the end of a weight update"):
            layers = list(model.modules())
            states = [(layer, state) for layer in layers if (state := _layers.get(layer)) is not None]
            for layer, state in states:
                # First, because attention is processed in here, some of it with the weights of other layers.
                _put_done(layer, state)
                state.session.is_ending = True
            try:
                if Rule.ABANDON in rules:
                    _process_complete(layerwise, layers)
                if Rule.DIRECT in rules:
                    _process_written(layerwise, states)
                upstream(model, *args, **kwargs)
            finally:
                for _, state in states:
                    state.session.is_ending = False  # others of its layers may go on
            for _, state in states:
                _write_back(layerwise, state)
            end(layers)

    return finalize_layerwise_reload


def record(seam: Seam) -> Callable[..., Any]:
    """`process_weights_after_loading(model, …)` of the first load: what is registered late is recorded before it."""
    upstream = seam.upstream

    def process_weights_after_loading(model: Layer, *args: Any, **kwargs: Any) -> None:
        layerwise = importlib.import_module(LAYERWISE)
        meta = importlib.import_module(layerwise.capture_layer_to_meta.__module__)
        for layer in model.modules():
            # Online quantisation has processed its layers by now.
            if not getattr(layer, "_already_called_process_weights_after_loading", False):
                _record_late(meta, layer, layerwise.get_layerwise_info(layer))
        upstream(model, *args, **kwargs)

    return process_weights_after_loading


def worker_call(seam: Seam) -> Callable[..., Any]:
    """A method of vLLM's Worker in which a session is fed or finished: where it raises, the session has failed."""
    upstream = seam.upstream

    @functools.wraps(upstream)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        layerwise = importlib.import_module(LAYERWISE)
        with _giving_back(seam, layerwise, _model_of(self), upstream.__name__):
            return upstream(self, *args, **kwargs)

    return update


def end(layers: Iterable[Layer]) -> None:
    """Forget the session of these layers; what stands in for their tensors gives way to those it stands for."""
    for layer in layers:
        state = _layers.pop(layer, None)
        if state is not None:
            _unwatch(layer)
            _put_done(layer, state)
            _put_staged(layer, state)


def abandon(layerwise: ModuleType, layers: Iterable[Layer]) -> int:
    """End the session of these layers and put the old tensors back in each that waits.

    Gives the number of layers that were not complete. `layerwise` is vLLM's reload.layerwise.
    """
    count = 0
    for layer in list(layers):
        info: LayerInfo = layerwise.get_layerwise_info(layer)
        if is_waiting(info):
            _put_staged(layer, _layers.get(layer))
            count += (info.load_numel_total or 0) > 0
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
        end([layer])
        # Since 0.21; only decides about a warning.
        getattr(layerwise, "LOADING_LAYERS", set()).discard(layer)
    return count


def _withdraw(rule: Rule) -> None:
    undo = _UNDO.get(rule)
    for layer, state in list(_layers.items()):
        if undo is not None:
            undo(importlib.import_module(LAYERWISE), layer, state)
        state.session.rules.discard(rule)
        if not state.session.rules:
            end([layer])


def _undo_stage(_: ModuleType, layer: Layer, state: LayerState) -> None:
    for staged in state.staged.values():
        if not staged.before.equal(staged.copy):
            staged.live.data.copy_(staged.copy)
    _put_staged(layer, state)


def _undo_once(_: ModuleType, layer: Layer, state: LayerState) -> None:
    _put_done(layer, state)
    state.written.clear()


def _undo_direct(_: ModuleType, layer: Layer, state: LayerState) -> None:
    _unwatch(layer)
    state.session.watch = None
    state.direct.clear()


def _undo_views(layerwise: ModuleType, layer: Layer, state: LayerState) -> None:
    info: LayerInfo = layerwise.get_layerwise_info(layer)
    if info.kernel_tensors is not None:
        # Upstream places no buffer that is not there, and looks for those that it has noted.
        for name, view in state.views.items():
            layer.register_buffer(name, view, persistent=False)
            info.kernel_tensors[1][name] = view
        state.views, state.non_persistent = {}, None


def _undo_abandon(layerwise: ModuleType, layer: Layer, _: LayerState) -> None:
    _process_complete(layerwise, [layer])


_UNDO: dict[Rule, Callable[[ModuleType, Any, LayerState], None]] = {
    Rule.STAGE: _undo_stage,
    Rule.ONCE: _undo_once,
    Rule.DIRECT: _undo_direct,
    Rule.VIEWS: _undo_views,
    Rule.ABANDON: _undo_abandon,
}


def open_layers() -> int:
    """How many layers a session keeps something of; 0 where none is open."""
    return len(_layers)


@contextlib.contextmanager
def _giving_back(seam: Seam, layerwise: ModuleType, model: Layer | None, what: str) -> Iterator[None]:
    """Inside, an exception ends the session of a model before it goes on, and a warning says what the model computes with."""
    try:
        yield
    except BaseException as error:
        layers = list(_layers if model is None else model.modules())
        if Rule.ABANDON not in seam.rules:
            end([layer for layer in layers if not is_open(layerwise.get_layerwise_info(layer))])
            raise
        sessions = {id(s.session): s.session for layer in layers if (s := _layers.get(layer)) is not None}
        new = sum(session.taken for session in sessions.values())
        old = abandon(layerwise, layers)
        if old:
            mixed = f"; {new} others have taken their new weights before, so that the model is mixed" if new else ""
            warnings.warn(
                f"{what} failed ({type(error).__name__}): {old} layers have their old weights back{mixed}. Send all weights "
                f"in a new session before generating again, or set {ATOMIC}=1 so that a failed session changes nothing",
                UltraPatchesWarning,
                stacklevel=3,
            )
        raise


def _end_left_over(seam: Seam, model: Layer) -> None:
    """End a session on the same layers that nobody finished."""
    layerwise = seam.module
    layers = list(model.modules())
    if Rule.ABANDON not in seam.rules:
        end([layer for layer in layers if not is_open(layerwise.get_layerwise_info(layer))])
    elif abandon(layerwise, layers) and hasattr(model, "_original_do_torchao_reload"):
        # Upstream would take the value that it had set itself for the user's.
        model._do_torchao_reload = model._original_do_torchao_reload


def _model_of(worker: Any) -> Layer | None:
    """The model that a worker's session updates; None where this release keeps it elsewhere."""
    # The engine's is the draft while that one is updated. Up to 0.21 the engine has none.
    model = getattr(getattr(worker, "weight_transfer_engine", None), "model", None)
    return getattr(getattr(worker, "model_runner", None), "model", None) if model is None else model


def _state_of(layer: Layer) -> LayerState:
    # Some transports restore layers by themselves, without the beginning of a session.
    return _layers.setdefault(layer, LayerState(Session()))


def _watch(layerwise: ModuleType, session: Session, model: Layer) -> None:
    """See what each `load_weights` of the model writes past the loaders, until the session ends."""
    from ultra_patches.reload import direct

    placeholders: dict[int, Placeholder] = {}
    for path, layer in model.named_modules():
        state = _layers.get(layer)
        if state is not None and is_waiting(layerwise.get_layerwise_info(layer)):
            state.placeholders = {
                name: direct.Placeholder(weakref.ref(layer), name, f"{path}.{name}" if path else name, tensor)
                for name, tensor in layerwise.get_layer_tensors(layer).items()
                if tensor.is_meta
            }
            placeholders |= {s.tensor.untyped_storage()._cdata: s for s in state.placeholders.values()}
    session.watch = direct.Watch(placeholders, functools.partial(_take, layerwise, session))
    for layer in model.modules():
        if layer in _layers and callable(getattr(layer, "load_weights", None)):
            _unwatch(layer)
            vars(layer)["load_weights"] = _watched(layerwise, layer.load_weights, session)


def _take(layerwise: ModuleType, session: Session, placeholder: Placeholder, write: DirectWrite) -> None:
    """Keep what was written past the loaders until the layer takes its weights."""
    layer = placeholder.layer()
    state = None if layer is None else _layers.get(layer)
    if layer is None or state is None:
        return
    info: LayerInfo = layerwise.get_layerwise_info(layer)
    if not is_waiting(info):
        # The layer has everything, so this is sent again: as with a loader, the last one wins where it can be written.
        if state.done is None:
            write.redo(layerwise.get_layer_tensors(layer))
        return
    if is_attention(layerwise, layer):
        raise write.refused(placeholder, "and vLLM processes attention by what its loaders were handed alone")
    if session.turn is not layer:
        _end_turn(layerwise, session)
        session.turn = layer
    state.direct.append((len(info.loaded_weights), write))
    if write.region is not None and placeholder.name not in never_counted(layerwise):
        meta = importlib.import_module(layerwise.restore_layer_on_meta.__module__)
        info.load_numel += _add_written(state, placeholder.name, placeholder.tensor, [write.region], _numel_of(meta))


def _watched(layerwise: ModuleType, load_weights: Callable[..., Any], session: Session) -> Callable[..., Any]:
    watch = session.watch

    @functools.wraps(load_weights)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if watch is None or watch.is_on or session.watch is None:
            return load_weights(*args, **kwargs)
        try:
            with watch.on():
                result = load_weights(*args, **kwargs)
            _end_turn(layerwise, session)
        finally:
            session.turn = None
        return result

    _watchers.add(watched)
    return watched


def _unwatch(layer: Layer) -> None:
    now = vars(layer).get("load_weights")
    if now is None or now not in _watchers:
        return
    below = now.__wrapped__
    if getattr(below, "__func__", None) is getattr(type(layer), "load_weights", None):
        del layer.load_weights
    else:
        vars(layer)["load_weights"] = below


def _end_turn(layerwise: ModuleType, session: Session) -> None:
    """Let the layer that was written past its loaders take its weights where it is complete.

    Not before the next layer's turn: a parameter that is cleared first is as complete as one that has its values.
    """
    layer, session.turn = session.turn, None
    if layer is not None:
        info: LayerInfo = layerwise.get_layerwise_info(layer)
        if is_waiting(info) and 0 < (info.load_numel_total or 0) <= info.load_numel:
            layerwise._layerwise_process(layer, info)


def _take_replaced(layer: Layer, info: LayerInfo, state: LayerState) -> None:
    """Take what stands in the place of placeholders as the last that was written, and put the placeholders back."""
    from ultra_patches.reload import direct

    for name, placeholder in state.placeholders.items():
        tensors = layer._parameters if name in layer._parameters else layer._buffers
        write = direct.replaced(placeholder, tensors.get(name))
        if write is not None:
            state.direct.append((len(info.loaded_weights), write))
            tensors[name] = placeholder.tensor
    state.placeholders = {}


def _process_written(layerwise: ModuleType, states: Iterable[tuple[Layer, LayerState]]) -> None:
    """Let the layers take their weights of which something was written past the loaders, and perhaps nothing else."""
    for layer, state in states:
        info: LayerInfo = layerwise.get_layerwise_info(layer)
        if is_waiting(info) and not is_attention(layerwise, layer):
            _take_replaced(layer, info, state)
            if state.direct:
                layerwise._layerwise_process(layer, info)


def _numel_of(meta: ModuleType) -> Callable[[Any], int]:
    # Since 0.31 a parameter may say that some of its elements are padding which no checkpoint has.
    numel_of: Callable[[Any], int] = getattr(meta, "get_tensor_load_numel", lambda tensor: tensor.numel())
    return numel_of


def _add_written(
    state: LayerState, name: str, param: torch.Tensor, regions: Iterable[Region], numel_of: Callable[[Any], int]
) -> int:
    """Note what was written of a parameter. Gives how many elements it has more than before."""
    from ultra_patches.reload.regions import Coverage

    covered = state.written.get(name)
    if covered is None:
        covered = state.written[name] = Coverage(param)
    before = covered.numel
    covered.add(regions)
    limit = numel_of(param)
    return min(covered.numel, limit) - min(before, limit)


def _process_complete(layerwise: ModuleType, layers: Iterable[Layer]) -> None:
    """Let the layers take their weights that are complete and were kept waiting. Attention waits for upstream's own end."""
    for layer in layers:
        info: LayerInfo = layerwise.get_layerwise_info(layer)
        if not is_waiting(info) or is_attention(layerwise, layer):
            continue
        if 0 < (info.load_numel_total or 0) <= info.load_numel:
            layerwise._layerwise_process(layer, info)


def _copy_tensors(arguments: dict[str, Any]) -> None:
    import torch

    for name, value in arguments.items():
        if name != "param" and isinstance(value, torch.Tensor):
            arguments[name] = value.clone()


def _restore_beside_views(meta: ModuleType, layer: Layer, info: LayerInfo, state: LayerState) -> None:
    """What upstream does, past the buffers that are views: the copy loop would write through them into the parameter."""
    if type(layer).__name__ in meta.SKIP_MODULES:
        return
    skipped = meta.SKIP_TENSORS
    views = _views(layer)
    parameters, buffers = info.restore_metadata
    loadable = [n for n in (*parameters, *buffers) if n not in skipped and n not in views]
    state.non_persistent = frozenset(layer._non_persistent_buffers_set)
    # A layer that has nothing but views keeps them: upstream puts tensors back only where some were to be loaded.
    state.views = views if loadable else {}
    for name in state.views:
        if info.kernel_tensors is not None:
            info.kernel_tensors[1].pop(name, None)
    for name in meta.get_layer_tensors(layer):
        if name not in skipped and (loadable or name not in views):
            delattr(layer, name)
    for name, tensor in parameters.items():
        if name not in skipped:
            layer.register_parameter(name, meta.restore_layer_refs(tensor, layer))
    for name, buffer in buffers.items():
        if name not in skipped and name not in views:
            persistent = name not in state.non_persistent
            layer.register_buffer(name, meta.restore_layer_refs(buffer, layer), persistent=persistent)


def _views(layer: Layer) -> dict[str, torch.Tensor]:
    """Non-persistent buffers whose memory is a parameter's, of the layer itself or of one inside it."""
    own = {n: layer._buffers[n] for n in layer._non_persistent_buffers_set if layer._buffers.get(n) is not None}
    if not own:
        return {}
    storages = {p.untyped_storage().data_ptr() for p in layer.parameters() if not p.is_meta}
    return {n: b for n, b in own.items() if not b.is_meta and b.untyped_storage().data_ptr() in storages}


def _is_processed(layer: Layer) -> bool:
    return getattr(layer, "quant_method", None) is not None or hasattr(layer, "process_weights_after_loading")


def _record_late(meta: ModuleType, layer: Layer, info: LayerInfo) -> None:
    """Add what the layer has more than when it was recorded, as upstream records it."""
    if type(layer).__name__ in meta.SKIP_MODULES:
        return
    now = ((layer._parameters, ()), (layer._buffers, _views(layer)))
    for (tensors, views), recorded in zip(now, info.restore_metadata, strict=True):
        for name, tensor in tensors.items():
            if tensor is not None and name not in meta.SKIP_TENSORS and name not in views and name not in recorded:
                recorded[name] = meta.sanitize_layer_refs(meta.to_meta_tensor(tensor), layer)


def _stage(meta: ModuleType, layer: Layer, state: LayerState) -> None:
    """Put a copy in the place of each parameter that stays off the meta device, so that the live one waits for the end."""
    for name, live in layer._parameters.items():
        if live is None or name not in meta.SKIP_TENSORS:
            continue
        staged = state.session.staged.get(id(live))
        if staged is None:
            staged = state.session.staged[id(live)] = Staged(live, _copy(live), live.data.clone())
        state.staged[name] = staged
        layer._parameters[name] = staged.copy


def _copy(live: Any) -> Any:
    copy = live.data.clone()
    copy.__class__ = live.__class__
    copy.__dict__ = vars(live).copy()
    return copy


@contextlib.contextmanager
def _live_in_place(layerwise: ModuleType, layer: Layer, state: LayerState) -> Iterator[None]:
    """Inside, the live parameters stand where upstream would copy what was staged, whose weights may not have come yet."""
    skipped = never_counted(layerwise)
    late = {name: staged for name, staged in state.staged.items() if name in skipped}
    for name, staged in late.items():
        layer._parameters[name] = staged.live
    try:
        yield
    finally:
        for name, staged in late.items():
            if layer._parameters.get(name) is staged.live:
                layer._parameters[name] = staged.copy


def _write_back(layerwise: ModuleType, state: LayerState) -> None:
    """Write what was staged into the live parameters. Those that are counted were copied when their layer was processed."""
    for name, staged in state.staged.items():
        # One that did not change may have been loaded past this session.
        if name in never_counted(layerwise) and not staged.before.equal(staged.copy):
            staged.live.data.copy_(staged.copy)


def _put_done(layer: Layer, state: LayerState) -> None:
    if state.done is not None:
        _put(layer, state.done)
        state.done = None


def _put_staged(layer: Layer, state: LayerState | None) -> None:
    for name, staged in state.staged.items() if state else ():
        if layer._parameters.get(name) is staged.copy:
            layer._parameters[name] = staged.live
    if state is not None:
        state.staged = {}


def _put(layer: Layer, parameters: dict[str, Any]) -> None:
    layer._parameters.clear()
    layer._parameters.update(parameters)
