"""A Hugging Face model folder: its configuration, and the names, shapes and values of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from examples.errors import RunError, json_file


@dataclass(frozen=True)
class Tensors:
    """The safetensors files of a folder: each tensor's file and shape, read from the headers alone."""

    folder: Path
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU, as it is stored."""
        with safe_open(self.files[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


@dataclass(frozen=True)
class Base:
    """A base model. Sizes are those of its own config.json."""

    config: Mapping[str, Any]
    tensors: Tensors

    @property
    def architectures(self) -> list[str]:
        """The model classes that config.json names."""
        found = self.config.get("architectures")
        return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

    @property
    def layers(self) -> int:
        """How many decoder layers there are."""
        return self._size("num_hidden_layers")

    @property
    def attention(self) -> tuple[int, int, int]:
        """(heads, query groups, head dimension). The product of heads and dimension need not be the hidden size."""
        heads = self._size("num_attention_heads")
        groups = self._size("num_key_value_heads") if "num_key_value_heads" in self.config else heads
        for name in ("head_dim", "attention_head_dim"):
            if self.config.get(name):
                return heads, groups, self._size(name)
        return heads, groups, self._size("hidden_size") // heads

    @property
    def mamba(self) -> dict[str, int]:
        """The rows of a Mamba2 input projection, part by part, in their order."""
        inner = self._size("mamba_num_heads") * self._size("mamba_head_dim")
        state = self._size("n_groups") * self._size("ssm_state_size")
        return {"z": inner, "x": inner, "B": state, "C": state, "dt": self._size("mamba_num_heads")}

    @cached_property
    def modules(self) -> dict[str, tuple[int, ...]]:
        """The [out, in] of every module with a matrix."""
        ends = {
            name.removesuffix(".weight"): shape
            for name, shape in self.tensors.shapes.items()
            if name.endswith(".weight")
        }
        return {name: shape for name, shape in ends.items() if len(shape) == 2}

    def experts(self, pattern: str) -> int:
        """How many experts a layer has: modules that are `pattern` with a number for its `{}`."""
        count = 0
        while pattern.format(count) in self.modules:
            count += 1
        return count

    def _size(self, name: str) -> int:
        value = self.config.get(name)
        if not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise RunError(
                f"{self.tensors.folder / 'config.json'}: {name} is {repr(value)[:80]}, a positive number is needed"
            )
        return value


def read(folder: Path) -> Base:
    """Read a model folder.

    Raises:
        RunError: no config.json or one that is not JSON, no safetensors, or a file that is damaged.
    """
    found = json_file(folder / "config.json", "BASE is the Hugging Face folder of the base model")
    return Base(found, tensors(folder))


def tensors(folder: Path) -> Tensors:
    """Read the headers of a folder's safetensors files.

    Raises:
        RunError: there are none, the index names one that is missing, one is damaged, or two have a tensor of one name.
    """
    paths, index = _files(folder)
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 # it is no mapping
                    if index.get(name, path.name) != path.name:
                        continue
                    if name in files:
                        raise RunError(
                            f"{folder}: {name} is in {files[name].name} and in {path.name}: keep the files of one model"
                        )
                    files[name], shapes[name] = path, tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise RunError(f"{path}: cannot be read ({error}); copy it again") from error
    return Tensors(folder, files, shapes)


def _files(folder: Path) -> tuple[list[Path], Mapping[str, str]]:
    """Those of the index, and it; else model.safetensors, beside which other formats may lie; else all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        again = "copy the model again"
        named = json_file(index, again).get("weight_map")
        if not isinstance(named, dict) or not all(_is_name(name) for name in named.values()):
            raise RunError(f"{index}: no index of tensors, a file of its folder for each; {again}")
        if missing := [name for name in sorted(set(named.values())) if not (folder / name).is_file()]:
            raise RunError(f"{index} names {missing[0]}, which is missing; {again}")
        return [folder / name for name in sorted(set(named.values()))], named
    paths = (
        [folder / "model.safetensors"]
        if (folder / "model.safetensors").is_file()
        else sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    )
    if not paths:
        raise RunError(f"{folder}: no *.safetensors in it; give a folder with a model's weights")
    return paths, {}


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name != ".." and Path(name).name == name
