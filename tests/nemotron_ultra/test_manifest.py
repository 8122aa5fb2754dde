"""Whether a mirror is whole, and the one line where it is not."""

import json
import os
from pathlib import Path

import pytest

from examples.errors import RunError
from examples.nemotron_ultra import gsm8k, manifest
from tests.nemotron_ultra.conftest import SHARDS


def test_hashes_are_computed_once_and_new_files_are_added(mirror: Path) -> None:
    first = manifest.of_folder(mirror, 2)
    kept = mirror / manifest.MANIFEST
    # What is in the manifest and was not written since is not read again: another hash stays there.
    altered = [*first[:-1], manifest.File(first[-1].name, first[-1].size, "0" * 64)]
    kept.write_text(kept.read_text().replace(first[-1].sha256, "0" * 64))
    before = kept.stat().st_mtime_ns
    assert manifest.of_folder(mirror, 2) == altered
    first = altered
    assert kept.stat().st_mtime_ns == before
    (mirror / "generation_config.json").write_text("{}")
    assert {file.name for file in manifest.of_folder(mirror, 2)} - {file.name for file in first} == {
        "generation_config.json"
    }
    assert json.loads(kept.read_text())["files"]


@pytest.mark.parametrize(
    ("remove", "wanted"),
    [
        (SHARDS[3], rf"{SHARDS[3]} is missing, 1 of the shards that model.safetensors.index.json names"),
        ("config.json", "no config.json"),
        ("chat_template.jinja", "no chat_template.jinja, so that prompts would have no roles"),
        ("model.safetensors.index.json", "model.safetensors is missing, 1 and no model.safetensors.index.json"),
    ],
)
def test_a_mirror_without_a_file_names_it(mirror: Path, remove: str, wanted: str) -> None:
    (mirror / remove).unlink()
    with pytest.raises(RunError, match=wanted) as caught:
        manifest.of_folder(mirror, 2)
    assert "\n" not in str(caught.value)
    assert not (mirror / manifest.MANIFEST).exists()


def test_a_template_within_the_tokenizer_will_do(mirror: Path) -> None:
    (mirror / "chat_template.jinja").unlink()
    (mirror / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert manifest.of_folder(mirror, 2)


def test_a_shard_that_is_cut_short_is_named_before_there_is_a_manifest(mirror: Path) -> None:
    size = (mirror / SHARDS[1]).stat().st_size
    os.truncate(mirror / SHARDS[1], size - 1)
    with pytest.raises(RunError, match=rf"{SHARDS[1]} has {size - 1:,} of {size:,} bytes: get this file again"):
        manifest.of_folder(mirror, 2)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_a_shard_without_a_header_is_named(mirror: Path, content: bytes) -> None:
    (mirror / SHARDS[0]).write_bytes(content)
    with pytest.raises(RunError, match=f"{SHARDS[0]}"):
        manifest.of_folder(mirror, 2)


def test_a_file_that_changed_its_length_after_the_manifest(mirror: Path) -> None:
    manifest.of_folder(mirror, 2)
    os.truncate(mirror / "modeling_nemotron_h.py", 3)
    with pytest.raises(RunError, match=r"modeling_nemotron_h.py has 3 bytes, stage-manifest.json says 14"):
        manifest.of_folder(mirror, 2)
    (mirror / "modeling_nemotron_h.py").unlink()
    with pytest.raises(RunError, match=r"modeling_nemotron_h.py is missing, stage-manifest.json has it"):
        manifest.of_folder(mirror, 2)


@pytest.mark.parametrize("text", ["", "{", '{"files": [{"name": "a"}]}', "[]"])
def test_a_manifest_that_is_none(mirror: Path, text: str) -> None:
    (mirror / manifest.MANIFEST).write_text(text)
    with pytest.raises(RunError, match="is not a manifest: remove it"):
        manifest.of_folder(mirror, 2)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "tokenizer_config.json"])
def test_json_that_is_none(mirror: Path, name: str) -> None:
    (mirror / name).write_text("{")
    with pytest.raises(RunError, match=f"{name}: not JSON"):
        manifest.of_folder(mirror, 2)


def test_gsm8k_becomes_what_the_driver_loads(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from examples.grpo import data

    rows = [{"question": "How many?", "answer": "2 * 536 = <<2*536=1072>>1072\n#### 1,072", "more": 1}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "And?", "answer": "#### -3"}) + "\n")
    found = gsm8k.collect(tmp_path)
    assert set(found) == {"train.jsonl", "test.jsonl"}
    (tmp_path / "staged.jsonl").write_bytes(found["train.jsonl"])
    assert data.load(tmp_path / "staged.jsonl") == [data.Problem(rows[0]["question"], rows[0]["answer"])]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"question": "a", "answer": "72"}', "does not end in '#### <number>'"),
        ('{"question": "a", "answer": "#### seventy-two"}', "does not end in '#### <number>'"),
        ('{"question": "a", "answer": "#### 7 or 8"}', "does not end in '#### <number>'"),
        ('{"question": "a", "answer": "####"}', "does not end in '#### <number>'"),
        ('{"question": "a"}', "no `question` and `answer`"),
        ('{"question": " ", "answer": "#### 1"}', "no `question` and `answer`"),
        ('{"question": "a", "answer": 72}', "no `question` and `answer`"),
        ("[]", "no `question` and `answer`"),
        ("not json", "Expecting value"),
        ("", "Expecting value"),
    ],
)
def test_a_line_that_cannot_be_rewarded_is_named_by_its_number(tmp_path: Path, line: str, wanted: str) -> None:
    good = '{"question": "a", "answer": "#### 1"}'
    (tmp_path / "train.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(RunError, match=f"train.jsonl, line 2: .*{wanted}") as caught:
        gsm8k.collect(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_data(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RunError, match=r"no train or test file that ends in \.jsonl or \.parquet"):
            gsm8k.collect(where)
    (tmp_path / "test.jsonl").write_text("")
    with pytest.raises(RunError, match=r"test\.jsonl would have no lines"):
        gsm8k.collect(tmp_path)
