"""Checkpoints, base models and adapters that somebody else made: refused in one line, and nothing of them is run."""

import contextlib
import json
import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("yaml")

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from examples import convert_lora
from examples.errors import RunError
from examples.lora import base, checkpoint, names, peft, verify
from tests.lora import conftest
from tests.lora.files import CONFIG, FC2, QKV, Change, Command, Files, assert_refused, config, trained

files, command = conftest.files, conftest.command

DEEP = "[" * 100_000
IN, OUT = FC2.format(0, "linear_in"), FC2.format(0, "linear_out")


def test_two_tensors_of_one_name_are_an_error_and_neither_wins(files: Files, command: Command) -> None:
    for prefix in ("module.", "model0.", "model.module."):
        files.tensors[f"{prefix}{IN}"] = files.tensors[IN] + 1
        files.write()
        assert_refused(command(files), f"{IN} and {prefix}{IN} are both {IN}|{prefix}{IN} and {IN} are both", files)
        assert_refused(command(files, "--skip", "nothing"), "--skip 'nothing' matches no adapter", files)
        del files.tensors[f"{prefix}{IN}"]
    files.tensors[f"module.{IN}"] = files.tensors[IN] + 1
    files.write()
    status, _, _ = command(files, "--skip", "decoder.layers.0.mlp.linear_fc2.adapter.*")
    assert status == 0
    assert not [name for name in load_file(files.out / peft.WEIGHTS) if "layers.0.mlp" in name]


def test_what_two_base_weights_are_called_is_nothing_to_adapters(files: Files, command: Command) -> None:
    for name in ("decoder.layers.0.mlp.linear_fc2.weight", "module.decoder.layers.0.mlp.linear_fc2.weight"):
        files.tensors[name] = torch.zeros(8, 12)
    files.write()
    assert command(files)[0] == 0


PREFIX = st.sampled_from(["", "module.", "model.", "model0.", "model1.module.", "module.module."])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(PREFIX, st.sampled_from([IN, OUT, QKV.format(0, "linear_in"), "output_layer.weight"])),
        min_size=1,
        unique=True,
    )
)
def test_every_adapter_is_converted_once_or_it_is_an_error(found: list[tuple[str, str]]) -> None:
    keys = [prefix + name for prefix, name in found]
    entries = tuple(checkpoint.Entry(key, checkpoint._WRAPPERS.sub("", key), (2, 2), torch.float32, 1) for key in keys)
    adapters = [entry for entry in entries if ".adapter." in entry.key]
    whole = checkpoint.Checkpoint(Path("x"), entries, (), {})
    if adapters and len({entry.name for entry in adapters}) == len(adapters):
        assert names.adapters(whole, [])[0] == adapters
    else:
        with pytest.raises(RunError, match=r"are both|no adapter to convert"):
            names.adapters(whole, [])


WORD = st.sampled_from(
    ["decoder", "layers", "mlp", "experts", "linear_fc1", "linear_fc2", "self_attention", "linear_qkv", "adapter", "adapter_q",
     "linear_in", "linear_out", "weight", "weight_w", "z", "0", "1", "٣", "9" * 5000, "", "mixer", "in_proj", "\n"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(WORD, max_size=5), st.lists(WORD, max_size=3), st.lists(st.integers(0, 3), max_size=4))
def test_any_name_is_planned_or_is_one_error(before: list[str], after: list[str], shape: list[int]) -> None:
    from examples.lora.plan import plan
    from examples.lora.settings import Settings

    name = ".".join(["decoder", "layers", *before, "adapter", *after])
    entry = checkpoint.Entry(name, name, tuple(shape), torch.float32, 1)
    model = base.Base(CONFIG, base.Tensors(Path("base"), {}, {}))
    with pytest.raises(RunError):
        plan([entry], model, Settings(2, 4, 0.0, smaller_experts=True, dropout_position="pre"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_with_a_value_that_is_no_number(
    files: Files, command: Command, value: float, dtype: torch.dtype
) -> None:
    files.tensors[OUT] = files.tensors[OUT].to(dtype)
    files.tensors[OUT][1, 1] = value
    files.write()
    assert_refused(command(files), f"{OUT} has 1 of 16 values that are NaN or infinite", files)


HUGE = 10**400
CHANGES: dict[str, tuple[Change, str]] = {
    **{
        f"{name}: {value!s:.9}": (trained(**{name: value}), rf"run_config\.yaml: peft\.{name} is .*, a finite number")
        for name in ("alpha", "dim", "dropout")
        for value in (float("nan"), float("inf"), -float("inf"), HUGE)
    },
    "alpha: 0": (trained(alpha=0), "alpha 0"),
    "target: huge": (trained(_target_="x" * 10_000), r"peft\._target_ is 'xxx.{1,90}; only"),
    "architectures: a number": (config(architectures=5), r"architectures \[\] are not known"),
    "architectures: lists": (config(architectures=[["a"]]), r"architectures \[\] are not known"),
    "heads: huge": (config(num_attention_heads=HUGE), "num_attention_heads is 1000.*positive number"),
    "dimension: huge": (config(head_dim=1 << 30), "linear_out has 32 rows.* make 8589934592"),
    "dimension: text": (config(head_dim="4"), "head_dim is '4', a positive number"),
    "a vector": (lambda files: files.tensors.update({IN: torch.zeros(12)}), r"shape \[12\] is no LoRA matrix"),
    "a number": (lambda files: files.tensors.update({OUT: torch.zeros(())}), r"shape \[\] is no LoRA matrix"),
    "nothing in it": (lambda files: files.tensors.update({IN: torch.zeros(0, 12), OUT: torch.zeros(8, 0)}), "rank 0"),
    "parts that do not fit": (
        lambda files: (
            files.tensors.pop(OUT),
            files.tensors.update({f"{OUT}_w": torch.zeros(4, 2), f"{OUT}_v": torch.zeros(4, 3)}),
        ),
        "the parts of linear_out do not fit each other",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "wanted"), CHANGES.values(), ids=CHANGES)
def test_a_value_that_makes_no_sense(files: Files, command: Command, change: Change, wanted: str) -> None:
    change(files)
    files.write()
    assert_refused(command(files), wanted, files)


@pytest.mark.parametrize("tolerance", ["nan", "inf", "-1", "-inf"])
def test_a_tolerance_that_lets_everything_pass(files: Files, command: Command, tolerance: str, tmp_path: Path) -> None:
    files.write()
    found = command(files, "--verify", str(files.base), f"--tolerance={tolerance}")
    assert_refused(found, "--tolerance .*: give the largest absolute difference, a finite number from 0 on", files)


class Call:
    """A pickle of it calls a function when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.made = function, arguments

    def __reduce__(self) -> Any:
        return self.made


def put(files: Files, content: object) -> None:
    (files.checkpoint / ".metadata").write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))


def inside(files: Files, evil: object) -> Metadata:
    """The checkpoint's own metadata, with something beside what is read of it."""
    found = FileSystemReader(files.checkpoint).read_metadata()
    found.planner_data = evil
    return found


def test_metadata_is_read_without_running_what_is_in_it(files: Files, command: Command, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    calls = [
        Call(os.mkdir, str(mark)),
        Call(eval, f"__import__('os').mkdir({str(mark)!r})"),
        Call(getattr(torch.hub, "load_state_dict_from_url"), "http://127.0.0.1:1/x", str(mark)),  # noqa: B009 # no type is known
        Call(torch.load, str(tmp_path / "other")),
        Call(getattr, torch.Size, "__new__"),
        Call(Path.mkdir, mark),
    ]
    files.write()
    whole = (files.checkpoint / ".metadata").read_bytes()
    for call in calls:
        for make in (lambda call: call, lambda call: inside(files, {"a": [call]})):
            (files.checkpoint / ".metadata").write_bytes(whole)
            put(files, make(call))
            assert_refused(command(files), r"\.metadata: refused, it names .*nothing of it was run", files)
            assert not mark.exists()
    (files.checkpoint / ".metadata").write_bytes(whole)
    assert command(files)[0] == 0


@pytest.mark.parametrize(
    "module", ["os system", "posix system", "builtins exec", "torch os", "torch.distributed.checkpoint.filesystem os"]
)
def test_no_name_leads_elsewhere(files: Files, command: Command, module: str) -> None:
    files.write()
    put(files, f"c{module.replace(' ', chr(10))}\n.".encode())
    assert_refused(command(files), r"\.metadata: refused, it names ", files)


def test_an_attribute_of_what_is_allowed_is_not(files: Files, command: Command) -> None:
    files.write()
    put(files, b"\x80\x04\x8c\x05torch\x8c\x0cSize.__new__\x93.")
    assert_refused(command(files), r"\.metadata: refused, it names torch\.Size\.__new__", files)


def change(**fields: Any) -> Callable[[Metadata], object]:
    """Set something in every place of the metadata."""

    def apply(found: Metadata) -> None:
        for stored in found.storage_data.values():
            for name, value in fields.items():
                setattr(stored, name, value)

    return apply


def tensors(**fields: Any) -> Callable[[Metadata], object]:
    def apply(found: Metadata) -> None:
        for stored in found.state_dict_metadata.values():
            for name, value in fields.items():
                setattr(stored, name, value)

    return apply


METADATA: dict[str, Callable[[Metadata], object]] = {
    "a path above": change(relative_path="../secret"),
    "a path that is absolute": change(relative_path="/dev/zero"),
    "a path that is a number": change(relative_path=7),
    "an offset before the file": change(offset=-8),
    "a length as text": change(length="long"),
    "no storage": lambda found: setattr(found, "storage_data", None),
    "storage that is a list": lambda found: setattr(found, "storage_data", [1]),
    "storage by name": lambda found: setattr(found, "storage_data", {"a": next(iter(found.storage_data.values()))}),
    "no tensors": lambda found: setattr(found, "state_dict_metadata", None),
    "tensors that are numbers": lambda found: found.state_dict_metadata.update({IN: 7}),
    "names that are numbers": lambda found: found.state_dict_metadata.update({7: found.state_dict_metadata[IN]}),
    "no chunks": tensors(chunks=None),
    "no properties": tensors(properties=None),
    "a size as text": tensors(size="ab"),
    "a size below nothing": tensors(size=(-2, -12)),
    "a size of exabytes": lambda found: [
        (setattr(one, "size", (1 << 40, 1 << 20)), setattr(one.chunks[0], "sizes", (1 << 40, 1 << 20)))
        for one in found.state_dict_metadata.values()
    ],
}


@pytest.mark.parametrize("damage", METADATA.values(), ids=METADATA)
def test_metadata_that_is_none(files: Files, command: Command, damage: Callable[[Metadata], object]) -> None:
    files.write()
    found = FileSystemReader(files.checkpoint).read_metadata()
    damage(found)
    put(files, found)
    assert_refused(command(files), ".", files)


def test_metadata_whose_bytes_are_altered_anywhere(files: Files) -> None:
    """Each of 400 is read as it is, or is one error; no other exception, and no other values."""
    files.write()
    path = files.checkpoint / ".metadata"
    whole = path.read_bytes()
    outcomes = {"error": 0, "read": 0}
    for number in range(400):
        at = number * len(whole) // 400
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << number % 8)]) + whole[at + 1 :])
        try:
            checkpoint.read(files.checkpoint)
            outcomes["read"] += 1
        except RunError:
            outcomes["error"] += 1
    assert outcomes["error"] > 100, outcomes


def write(name: str, content: "str | bytes") -> Change:
    return lambda files: (files.root / name).write_bytes(content.encode() if isinstance(content, str) else content)


def safetensors(header: str, rest: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header.encode() + rest


MODEL, RUN = "base/model.safetensors", "checkpoint/run_config.yaml"
INDEX = "base/model.safetensors.index.json"
DAMAGES: dict[str, Change] = {
    "config: a list": write("base/config.json", "[]"),
    "config: deep": write("base/config.json", DEEP),
    "config: no UTF-8": write("base/config.json", b"\xff"),
    "index: deep": write(INDEX, DEEP),
    "index: above": write(INDEX, '{"weight_map": {"a": "../x.safetensors"}}'),
    "index: absolute": write(INDEX, '{"weight_map": {"a": "/dev/zero"}}'),
    "index: numbers": write(INDEX, '{"weight_map": {"a": 7}}'),
    "index: a zero": write(INDEX, '{"weight_map": {"a": "a\\u0000"}}'),
    "model: deep": write(MODEL, safetensors(DEEP)),
    "model: no header": write(MODEL, b"\xff" * 64),
    "model: a pipe": lambda files: ((files.root / MODEL).unlink(), os.mkfifo(files.root / MODEL)),
    "run config: deep": write(RUN, DEEP),
    "run config: no date": write(RUN, "peft: 2001-99-99"),
    "run config: no UTF-8": write(RUN, b"\xff\xfe\xff"),
    "run config: an object": write(RUN, "peft: !!python/object/apply:os.system [exit]"),
    "run config: itself": write(RUN, "&a {peft: *a}"),
    "run config: a list as a key": write(RUN, "? [a]\n: b"),
    "metadata.json: deep": write("checkpoint/metadata.json", DEEP),
    "metadata.json: no UTF-8": write("checkpoint/metadata.json", b"\xff"),
    ".metadata: empty": write("checkpoint/.metadata", b""),
    ".metadata: a number": write("checkpoint/.metadata", pickle.dumps(7)),
    ".metadata: deep": write("checkpoint/.metadata", b"(" * 100_000 + b"t" * 100_000 + b"."),
    **{
        f"latest: {text!r:.12}": lambda files, text=text: (
            (files.checkpoint / ".metadata").unlink(),
            (files.checkpoint / checkpoint.LATEST).write_bytes(text),
        )
        for text in ("²".encode(), b"9" * 5000, b"../..", b"/", b"\xff", b"")
    },
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_is_none(files: Files, command: Command, damage: Change) -> None:
    files.write()
    damage(files)
    assert_refused(command(files), ".", files)


def test_a_tensor_in_two_files_is_an_error_unless_the_index_says_which(files: Files, command: Command) -> None:
    files.write()
    name, other = "model.layers.0.mlp.down_proj.weight", files.base / "more.safetensors"
    (files.root / MODEL).rename(files.base / "all.safetensors")
    save_file({name: torch.zeros(8, 12)}, other)
    assert_refused(command(files), f"{name} is in all.safetensors and in more.safetensors", files)
    (files.root / INDEX).write_text(json.dumps({"weight_map": {name: "all.safetensors", "x": "more.safetensors"}}))
    assert command(files)[0] == 0
    assert base.tensors(files.base).files[name].name == "all.safetensors"


def adapter(**fields: Any) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        found = json.loads((folder / peft.CONFIG).read_text())
        (folder / peft.CONFIG).write_text(json.dumps(found | fields))

    return apply


def shaped(side: str, *shape: int) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        found = load_file(folder / peft.WEIGHTS)
        found[f"{peft.PREFIX}model.layers.0.mlp.down_proj.lora_{side}.weight"] = torch.zeros(shape)
        save_file(found, folder / peft.WEIGHTS)

    return apply


ADAPTERS: dict[str, Callable[[Path], object]] = {
    "a list": lambda folder: (folder / peft.CONFIG).write_text("[]"),
    "deep": lambda folder: (folder / peft.CONFIG).write_text(DEEP),
    "no rank": adapter(r=None),
    "rank 0": adapter(r=0),
    "rank as text": adapter(r="2"),
    "alpha NaN": adapter(lora_alpha=float("nan")),
    "alpha infinite": adapter(lora_alpha=float("inf")),
    "a pattern that is none": adapter(rank_pattern={"(": 2}),
    "patterns that are a list": adapter(alpha_pattern=[1]),
    "a rank that is a list": adapter(rank_pattern={"a": [2]}),
    "sides that do not fit": shaped("A", 3, 12),
    "a side that is a vector": shaped("A", 12),
    "a side that is NaN": lambda folder: save_file(
        {name: values * torch.nan for name, values in load_file(folder / peft.WEIGHTS).items()}, folder / peft.WEIGHTS
    ),
    "no tensors": lambda folder: save_file({}, folder / peft.WEIGHTS),
}


def test_an_adapter_folder_that_is_none_is_one_line(
    files: Files, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write()
    assert command(files)[0] == 0
    whole = {name: (files.out / name).read_bytes() for name in (peft.CONFIG, peft.WEIGHTS)}
    monkeypatch.setattr(sys, "argv", ["verify", str(files.out), str(files.base), str(files.base)])
    for name, damage in ADAPTERS.items():
        damage(files.out)
        assert verify.main() == 1, name
        said = capsys.readouterr().err
        assert [line[:7] for line in said.strip().splitlines()] == ["error: "], (name, said)
        for file, content in whole.items():
            (files.out / file).write_bytes(content)


def test_integers_in_a_model_are_compared_as_they_are(files: Files, tmp_path: Path) -> None:
    files.write()
    convert_lora.convert(files.checkpoint, files.base, files.out)
    tensors = load_file(files.root / MODEL) | {"mask": torch.ones(2, dtype=torch.int8)}
    save_file(tensors, files.root / MODEL)
    with pytest.raises(RunError, match="the adapter is not what Megatron merged"):
        verify.compare(files.out, base.read(files.base), files.base)


def test_an_output_whose_name_is_too_long_and_a_full_disk(files: Files, command: Command) -> None:
    from tests.hostile.test_grpo import limited

    files.write()
    with limited(512):
        assert_refused(command(files), "adapter: cannot be written", files)
    with contextlib.suppress(KeyError):
        files.root = files.root / ("x" * 300)
    status, _, said = command(files)
    assert status == 1
    assert said.startswith("error: ")
    assert "\n" not in said
