"""From the names and shapes of a checkpoint and a base model: which rows of which tensors make which PEFT matrices.

Everything is decided and checked here, before a value is read.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, cat

from examples.errors import RunError
from examples.lora import rows
from examples.lora.architecture import CANONICAL, LM_HEAD, OUTPUT_LAYER, Architecture, Layout, Linear, architecture
from examples.lora.base import Base
from examples.lora.checkpoint import Entry
from examples.lora.names import Site, matrix
from examples.lora.settings import Settings

#: In which order the parts of a matrix follow each other, where a checkpoint holds them apart.
_ORDERS: tuple[tuple[str, ...], ...] = (("",), ("_w", "_v"), (".z", ".x", ".B", ".C", ".dt"))


@dataclass(frozen=True)
class Source:
    """One matrix [rows, columns] in a checkpoint: tensors whose rows follow each other, at an index of their leading axes."""

    entries: tuple[Entry, ...]
    index: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns]."""
        return sum(entry.shape[-2] for entry in self.entries), self.entries[0].shape[-1]

    def take(self, loaded: Mapping[str, Tensor]) -> Tensor:
        """The matrix from tensors by key."""
        return cat([loaded[entry.key][self.index] for entry in self.entries])


@dataclass(frozen=True, eq=False)
class Adapter:
    """LoRA of one Hugging Face module: A [rank, in], and the rows of B [out, rank] that are its; None for all."""

    module: str
    a: Source
    b: Source
    rows: Tensor | None

    @property
    def rank(self) -> int:
        """The number of A's rows."""
        return self.a.shape[0]

    def matrices(self, loaded: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(A, B), contiguous copies in the checkpoint's dtype."""
        b = self.b.take(loaded)
        return self.a.take(loaded).clone().contiguous(), (b if self.rows is None else b[self.rows]).clone().contiguous()


def plan(entries: Sequence[Entry], base: Base, settings: Settings) -> list[Adapter]:
    """The adapters in the order of the base's modules.

    Raises:
        RunError: what PEFT cannot express, a matrix without its other one, or an adapter that does not fit the base.
    """
    known = architecture(base.architectures)
    parts: dict[Site, dict[str, dict[str, Entry]]] = defaultdict(lambda: defaultdict(dict))
    for entry in entries:
        found = matrix(entry)
        parts[found.site][found.side][found.part] = entry
    made: dict[str, Adapter] = {}
    for site, sides in parts.items():
        for adapter in _adapters(site, sides, base, known, settings):
            if adapter.module in made:
                raise RunError(f"{site.name}: a second adapter for {adapter.module}; --skip one of the two")
            made[adapter.module] = adapter
    place = {name: number for number, name in enumerate(base.modules)}
    return sorted(made.values(), key=lambda adapter: place[adapter.module])


def _adapters(
    site: Site, sides: Mapping[str, Mapping[str, Entry]], base: Base, known: Architecture, settings: Settings
) -> Iterator[Adapter]:
    linear = _linear(site, known)
    a, b = (_joined(site, side, sides.get(side, {})) for side in ("linear_in", "linear_out"))
    if linear.layout is Layout.MAMBA:
        _check_mamba(site, b, base)
    _layers(site, b, base)
    for layer in _layers(site, a, base):
        prefix = known.layer.format(layer) if site.in_layers else ""
        for expert in _experts(site, a, b, base, prefix + linear.modules[0]):
            left, right = (_source(site, entries, layer, expert) for entries in (a, b))
            _check_rank(site, left, right, settings)
            for module, chosen in _modules(site, linear, right.shape[0], base):
                yield _fits(Adapter(prefix + module.format(expert), left, right, chosen), site, base)


def _linear(site: Site, known: Architecture) -> Linear:
    linear = Linear((LM_HEAD,)) if site.name == OUTPUT_LAYER else known.linear(site.linear) if site.in_layers else None
    if linear is None:
        raise RunError(
            f"{site.name}: an adapter here has no counterpart in PEFT for this architecture; --skip '{site.name}.*' drops it"
        )
    if site.projection is not None and CANONICAL.get(site.projection, 9) >= len(linear.modules):
        raise RunError(
            f"{site.name}: {site.projection} is not known here; --skip '{site.name}.adapter.{site.projection}.*'"
        )
    return linear


def _joined(site: Site, side: str, parts: Mapping[str, Entry]) -> tuple[Entry, ...]:
    if flat := [entry for entry in parts.values() if len(entry.shape) < 2]:
        raise RunError(f"{flat[0].key}: shape {list(flat[0].shape)} is no LoRA matrix; --skip '{flat[0].name}'")
    if len({(entry.shape[:-2], entry.shape[-1]) for entry in parts.values()}) > 1:
        shapes = ", ".join(f"{list(entry.shape)}" for entry in parts.values())
        raise RunError(f"{site.name}: the parts of {side} do not fit each other, {shapes}; the checkpoint is damaged")
    for order in _ORDERS:
        if set(order) == set(parts):
            return tuple(parts[part] for part in order)
    found = ", ".join(sorted(f"weight{part}" for part in parts)) or "nothing"
    raise RunError(
        f"{site.name}: {side} is not whole, the checkpoint has {found}; --skip '{site.name}.adapter.*' drops the adapter"
    )


def _layers(site: Site, entries: tuple[Entry, ...], base: Base) -> Sequence[int]:
    if site.layer is not None or not site.in_layers:
        return [site.layer or 0]
    if len(entries[0].shape) < 3:
        raise RunError(f"{entries[0].key}: no layer's number, and {list(entries[0].shape)} has no axis of layers")
    stacked = entries[0].shape[0]
    if stacked != base.layers:
        raise RunError(
            f"{entries[0].key}: {stacked} layers are stacked, the base has {base.layers}: BASE is not the model it was trained on"
        )
    return range(stacked)


def _leading(site: Site, entry: Entry) -> int:
    """The axes before rows and columns that are not the layers' one: the experts', where there is one more."""
    return len(entry.shape) - 2 - (site.in_layers and site.layer is None)


def _experts(site: Site, a: tuple[Entry, ...], b: tuple[Entry, ...], base: Base, pattern: str) -> Sequence[int]:
    """All of the base's, where they are stacked or share an adapter: that one is each expert's. Zero outside experts."""
    if site.expert is not None or not site.is_expert:
        return [site.expert or 0]
    count = base.experts(pattern)
    for entry in (*a, *b):
        if _leading(site, entry) == 1 and entry.shape[-3] != count:
            raise RunError(
                f"{entry.key}: adapters of {entry.shape[-3]} experts, the base has {count} as {pattern}: BASE is not the model "
                "it was trained on"
            )
    if not count:
        raise RunError(f"{site.name}: the base has no {pattern.format(0)}: BASE is not the model it was trained on")
    return range(count)


def _source(site: Site, entries: tuple[Entry, ...], layer: int, expert: int) -> Source:
    axes = _leading(site, entries[0])
    if axes not in ((0, 1) if site.is_expert and site.expert is None else (0,)):
        raise RunError(
            f"{entries[0].key}: shape {list(entries[0].shape)} is no LoRA matrix; --skip '{entries[0].name}'"
        )
    index = (layer,) if site.in_layers and site.layer is None else ()
    return Source(entries, index + ((expert,) if axes else ()))


def _check_rank(site: Site, a: Source, b: Source, settings: Settings) -> None:
    rank = a.shape[0]
    if rank != b.shape[1]:
        raise RunError(f"{site.name}: linear_in has rank {rank}, linear_out {b.shape[1]}; the checkpoint is damaged")
    smaller = site.is_expert and settings.smaller_experts and 1 <= rank <= settings.rank
    if rank != settings.rank and not smaller:
        raise RunError(
            f"{site.name}: rank {rank} in the checkpoint, peft.dim {settings.rank} in its run config: they are of two runs"
        )


def _check_mamba(site: Site, b: tuple[Entry, ...], base: Base) -> None:
    found = [entry.shape[-2] for entry in b]
    if len(b) == 1 and b[0].row_parts == 1:
        found, wanted = [sum(found)], [sum(base.mamba.values())]
    elif len(b) == 1:
        # Each rank's z, x, B, C and dt lie one after the other: only who wrote it knows which rows are whose.
        raise RunError(
            f"{b[0].key}: written by {b[0].row_parts} tensor-parallel ranks without its parts apart, as early releases of "
            "Megatron-Bridge do; save it with one rank, or with a later release"
        )
    else:
        wanted = list(base.mamba.values())
    if found != wanted:
        raise RunError(f"{site.name}: {found} rows of z, x, B, C and dt, the base's config.json gives {wanted}")


def _modules(site: Site, linear: Linear, count: int, base: Base) -> list[tuple[str, Tensor | None]]:
    """The modules of a linear layer with their rows of B."""
    if site.projection is not None:
        return [(linear.modules[CANONICAL[site.projection]], None)]
    if linear.layout not in (Layout.QKV, Layout.GATED):
        return [(linear.modules[0], None)]
    try:
        chosen = rows.halves(count) if linear.layout is Layout.GATED else _qkv(site, count, base)
    except ValueError as error:
        raise RunError(f"{site.name}: {error} (config.json of {base.tensors.folder})") from error
    return list(zip(linear.modules, chosen, strict=True))


def _qkv(site: Site, count: int, base: Base) -> Sequence[Tensor]:
    heads, groups, dim = base.attention
    wanted = (heads + 2 * groups) * dim
    if wanted != count and heads % groups == 0:
        raise RunError(
            f"{site.name}: linear_out has {count} rows; {heads} heads in {groups} groups of dimension {dim}, as in the base's "
            f"config.json, make {wanted}: BASE is not the model it was trained on"
        )
    return rows.qkv(heads, groups, dim)


def _fits(adapter: Adapter, site: Site, base: Base) -> Adapter:
    shape = base.modules.get(adapter.module)
    if shape is None:
        raise RunError(f"{site.name}: the base has no {adapter.module}.weight: BASE is not the model it was trained on")
    out = len(adapter.rows) if adapter.rows is not None else adapter.b.shape[0]
    if (out, adapter.a.shape[1]) != shape:
        raise RunError(
            f"{site.name}: the adapter is for a weight of {[out, adapter.a.shape[1]]}, {adapter.module}.weight of the base is "
            f"{list(shape)}: BASE is not the model it was trained on"
        )
    return adapter
