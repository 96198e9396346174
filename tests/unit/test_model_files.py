"""A model's files: found, counted, and told apart by their content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from emberkv.engines.model_files import (
    READ_WHOLE_BYTES,
    Snapshot,
    digest_descriptions,
    digest_weights,
    find_snapshot,
    read_config,
    weight_files,
    weights_bytes,
)
from emberkv.errors import StorageError
from emberkv.testing.model_files import write_safetensors

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def overwrite(path: Path, place: int, content: bytes) -> None:
    """Change bytes in place; size and time stay as they were."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": ("F32", 40_000), "b": ("BF16", 20_000), "c": ("I64", 800)})
    return path


def test_a_small_model_is_read_whole(weights: Path) -> None:
    before = digest_weights([weights])
    assert digest_weights([weights]) == before
    overwrite(weights, weights.stat().st_size - 3, b"\1")
    assert digest_weights([weights]) != before


def test_the_name_the_size_and_the_time_of_a_file_count(weights: Path) -> None:
    digests = {digest_weights([weights])}
    os.utime(weights, ns=(1, 1))
    digests.add(digest_weights([weights]))
    moved = weights.rename(weights.with_name("other.safetensors"))
    digests.add(digest_weights([moved]))
    with moved.open("ab") as file:
        file.write(b"\0")
    os.utime(moved, ns=(1, 1))
    digests.add(digest_weights([moved]))
    assert len(digests) == 4


@pytest.fixture
def large_weights(tmp_path: Path) -> Path:
    """Larger than what is read whole: 40 tensors of 2 MiB."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {f"layer.{n}": ("F32", 2 << 20) for n in range(40)})
    assert path.stat().st_size > READ_WHOLE_BYTES
    return path


@pytest.mark.parametrize("layer", [0, 17, 39])
def test_new_values_of_one_tensor_are_seen_in_a_large_model(
    large_weights: Path, layer: int
) -> None:
    before = digest_weights([large_weights])
    data_start = large_weights.stat().st_size - 40 * (2 << 20)
    overwrite(large_weights, data_start + layer * (2 << 20), bytes(2 << 20))
    assert digest_weights([large_weights]) != before


def test_a_large_model_is_only_sampled(
    large_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_bytes = 0
    pread = os.pread

    def counted(fd: int, size: int, place: int) -> bytes:
        nonlocal read_bytes
        content = pread(fd, size, place)
        read_bytes += len(content)
        return content

    monkeypatch.setattr(os, "pread", counted)
    digest_weights([large_weights])
    assert 0 < read_bytes < 16 << 20


def test_weights_are_counted_as_they_will_be_loaded(weights: Path) -> None:
    assert weights_bytes([weights]) == 60_800
    assert weights_bytes([weights], float_bytes=4) == 40_000 + 40_000 + 800
    assert weights_bytes([weights], float_bytes=2) == 20_000 + 20_000 + 800


def test_files_without_a_header_count_by_their_size(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(1234))
    assert weights_bytes(weight_files(tmp_path), float_bytes=4) == 1234


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 20, b"\x02" + bytes(7) + b"[]", b"\x09" + bytes(7) + b'{"a": {}}']
)
def test_a_damaged_header_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(StorageError, match=r"model\.safetensors .*download the model again"):
        weights_bytes(weight_files(tmp_path))


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"gone\.bin can't be read"):
        digest_weights([tmp_path / "gone.bin"])


def test_only_files_of_the_preferred_kind_are_taken(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == ()
    for name in ("b.safetensors", "a.safetensors", "model.bin", "notes.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    assert [path.name for path in weight_files(tmp_path, (".bin",))] == ["model.bin"]


def test_descriptions_count_except_the_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    before = digest_descriptions(tmp_path, with_code=False)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "modeling.py").write_text("code")
    assert digest_descriptions(tmp_path, with_code=False) == before
    assert digest_descriptions(tmp_path, with_code=True) != before
    (tmp_path / "config.json").write_text('{"rope_theta": 2}')
    assert digest_descriptions(tmp_path, with_code=False) != before


def test_the_configuration_is_read_or_none(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None
    (tmp_path / "config.json").write_text("[]")
    assert read_config(tmp_path) is None
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    assert read_config(tmp_path) == {"hidden_size": 64}


def test_a_local_directory_is_its_own_snapshot(tmp_path: Path) -> None:
    assert find_snapshot(str(tmp_path)) == Snapshot(str(tmp_path), tmp_path)


def test_a_snapshot_in_the_hubs_cache_is_found_under_both_names(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="the hub's client comes with an engine")
    repository = tmp_path / "models--org--name"
    directory = repository / "snapshots" / COMMIT
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    expected = Snapshot("org/name", directory, COMMIT)
    assert find_snapshot("org/name", cache_dir=str(tmp_path)) == expected
    assert find_snapshot("org/name", COMMIT, cache_dir=str(tmp_path)) == expected
    assert find_snapshot(str(directory)) == expected
    assert find_snapshot("org/name", "other", cache_dir=str(tmp_path)) is None


@pytest.mark.parametrize("model", ["org/unknown", "s3://bucket/model", "no such directory/a/b"])
def test_what_is_not_on_this_machine_is_not_found(tmp_path: Path, model: str) -> None:
    assert find_snapshot(model, cache_dir=str(tmp_path)) is None
