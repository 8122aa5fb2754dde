"""Merge an adapter folder into its base and compare with a merged export of Megatron's, tensor by tensor.

    python -m examples.lora.verify ADAPTER BASE MERGED

MERGED is what `AutoBridge.save_hf_pretrained` or `export_hf_weights` gave from the same checkpoint with the adapters merged,
as safetensors. An export in 16 bit has one rounding, so a difference of one step of that dtype is allowed there.

Without `ultra_patches` Megatron-Bridge up to 0.6.2 merges wrongly where ranks export together: Mamba's `in_proj` under tensor
parallelism, and experts under expert parallelism (`ultra-patches explain bridge-lora-merge`).
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.errors import RunError, reported
from examples.lora import base, cli, peft

#: Of fp32: sums of a few products in two orders.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Comparison:
    """What was seen: tensors compared, the largest difference and where, and adapted tensors too little changed to judge."""

    compared: int
    adapted: int
    worst: float
    where: str
    unmoved: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.compared} tensors are the same as in the merged export, largest difference {self.worst:.2e} ({self.where})"
        if self.unmoved:
            text += (
                f"; {len(self.unmoved)} of {self.adapted} adapters change their weight by less than the tolerance, so nothing "
                f"is known of them, {self.unmoved[0]} for one"
            )
        return text


def compare(
    adapter: Path,
    model: base.Base,
    merged: Path,
    tolerance: float | None = None,
    track: Callable[[Sequence[str]], Iterable[str]] = iter,
) -> Comparison:
    """Compare every tensor of base and export; differences are absolute, in fp32.

    Raises:
        RunError: names or shapes differ, or a tensor differs by more than the tolerance: the worst is named. A tolerance that is
            no number from 0 on.
    """
    check_tolerance(tolerance)
    folder, export = peft.read(adapter), base.tensors(merged)
    if other := sorted(model.tensors.shapes.keys() ^ export.shapes.keys()):
        side = "BASE" if other[0] in model.tensors.shapes else "MERGED"
        raise RunError(f"{other[0]}: in {side} only, as {len(other) - 1} others may be; MERGED is no export of BASE")
    adapted = {f"{module}.weight" for module in folder.modules}
    if stray := sorted(adapted - model.tensors.shapes.keys()):
        raise RunError(f"{stray[0]}: adapted, and not in BASE: the adapter is of another model")
    if not export.shapes:
        raise RunError(f"{merged}: no tensor in it; give a merged export of Megatron's")
    seen = [_compare(name, folder, model.tensors, export, tolerance) for name in track(sorted(export.shapes))]
    worst = max(seen, key=lambda one: one.excess)
    if worst.excess > 0:
        wrong = sum(one.excess > 0 for one in seen)
        raise RunError(
            f"{worst.name}: merged it differs from the export by {worst.difference:.3g}, allowed is {worst.allowed:.3g}; so do "
            f"{wrong} of {len(seen)} tensors: the adapter is not what Megatron merged"
        )
    largest = max(seen, key=lambda one: one.difference)
    unmoved = tuple(one.name for one in seen if one.name in adapted and one.moved <= one.allowed)
    return Comparison(len(seen), len(adapted), largest.difference, largest.name, unmoved)


def check_tolerance(tolerance: float | None) -> None:
    """RunError unless it is a number from 0 on: nothing differs by more than an infinite one, or than NaN."""
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise RunError(f"--tolerance {tolerance}: give the largest absolute difference, a finite number from 0 on")


@dataclass(frozen=True)
class _Seen:
    """One tensor: where it differs most beyond what is allowed, and how far the adapter moves it."""

    name: str
    difference: float
    allowed: float
    moved: float

    @property
    def excess(self) -> float:
        return self.difference - self.allowed


def _compare(
    name: str, folder: peft.Folder, model: base.Tensors, export: base.Tensors, tolerance: float | None
) -> _Seen:
    if model.shapes[name] != export.shapes[name]:
        raise RunError(f"{name}: {list(model.shapes[name])} in BASE, {list(export.shapes[name])} in MERGED")
    found, expected = export.get(name), model.get(name).float()
    module, moved = name.removesuffix(".weight"), 0.0
    if module in folder.modules and name.endswith(".weight"):
        delta = folder.delta(module)
        if delta.shape != expected.shape:
            raise RunError(f"{name}: {list(expected.shape)} in BASE, the adapter makes {list(delta.shape)}")
        moved = float(delta.abs().max())
        expected = expected + delta
    difference = (found.float() - expected).abs().nan_to_num(nan=torch.inf)
    allowed = torch.full_like(difference, TOLERANCE if tolerance is None else tolerance)
    if tolerance is None and found.dtype.itemsize < 4 and found.dtype.is_floating_point:
        allowed += torch.finfo(found.dtype).eps * expected.abs()
    if not difference.numel():
        return _Seen(name, 0.0, 0.0, 0.0)
    at = int((difference - allowed).argmax())
    return _Seen(name, float(difference.flatten()[at]), float(allowed.flatten()[at]), moved)


def main() -> int:
    """The command of the module's head."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.lora.verify", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("adapter", type=Path, metavar="ADAPTER", help="the PEFT folder")
    parser.add_argument("base", type=Path, metavar="BASE", help="the Hugging Face folder of the base model")
    parser.add_argument("merged", type=Path, metavar="MERGED", help="the folder of the merged export")
    parser.add_argument(
        "--tolerance", type=float, help=f"largest absolute difference (default {TOLERANCE:g}, and a step of 16 bit)"
    )
    given = parser.parse_args()

    def work() -> None:
        with cli.progress("comparing") as track:
            found = compare(given.adapter, base.read(given.base), given.merged, given.tolerance, track)
        print(found)

    return reported(work)


if __name__ == "__main__":
    raise SystemExit(main())
