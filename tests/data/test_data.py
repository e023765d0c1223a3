"""Data: four parts that share no sample, from scikit-learn, idx files, the network, or the user's own function."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import random
import shutil
import struct
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_opt.data import Splits, datasets, load_splits
from edge_opt.data.datasets import fingerprint, part_indices, read_idx, splits_of, stratified_order
from edge_opt.errors import DataNotFound, InvalidInput, ModelNotFound

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, train: int = 60, test: int = 20, suffix: str = "") -> None:
    """A small dataset of MNIST's form: image i is filled with the value i, its label is i modulo 10."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("t10k", test)):
        images = np.repeat(np.arange(count, dtype=np.uint8), 28 * 28).reshape(count, 28, 28)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx_bytes(array)
            (folder / f"{name}-{kind}-ubyte{suffix}").write_bytes(gzip.compress(content) if suffix else content)


def samples(loader: object) -> set[bytes]:
    return {image.numpy().tobytes() for images, _ in loader for image in images}  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def digits() -> Splits:
    return load_splits("digits", seed=1)


def test_no_index_is_in_two_parts(digits: Splits) -> None:
    every = np.concatenate(list(digits.indices.values()))
    assert len(every) == len(set(every.tolist())) == 1797


def test_no_image_is_in_two_parts(digits: Splits) -> None:
    parts = [samples(part) for part in (digits.train, digits.calibration, digits.validation, digits.test)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 1797


def test_digits_are_images_of_mnist_s_form(digits: Splits) -> None:
    images, labels = next(iter(digits.train))
    assert images.shape == (32, 1, 28, 28) and images.dtype == torch.float32 and labels.dtype == torch.int64
    assert 0 <= float(images.min()) < float(images.max()) <= 1


def test_a_seed_decides_the_parts_and_the_order() -> None:
    first, again, other = (load_splits("digits", seed=seed) for seed in (1, 1, 2))
    for part in ("train", "validation"):
        assert fingerprint(getattr(first, part)) == fingerprint(getattr(again, part))
        assert fingerprint(getattr(first, part)) != fingerprint(getattr(other, part))


def test_every_seed_is_reported_on_the_same_test_part() -> None:
    assert fingerprint(load_splits("digits", seed=1).test or []) == fingerprint(
        load_splits("digits", seed=2).test or []
    )


def test_the_loaders_own_seed_decides_the_order_alone() -> None:
    first, other = (load_splits("digits", seed=1, dataloader_seed=seed) for seed in (1, 2))
    assert (first.indices["train"] == other.indices["train"]).all()
    assert fingerprint(first.train) != fingerprint(other.train)


def test_validation_does_not_move_when_the_training_part_changes() -> None:
    small, large = (load_splits("digits", train_subset=count) for count in (100, 900))
    assert (small.indices["validation"] == large.indices["validation"]).all()


@given(
    st.lists(st.integers(0, 4), min_size=30, max_size=200), st.integers(0, 100), st.integers(1, 10), st.integers(1, 10)
)
def test_parts_are_disjoint_and_stratified(labels: list[int], seed: int, validation: int, calibration: int) -> None:
    array = np.array(labels)
    parts = part_indices(array, seed=seed, validation=validation, calibration=calibration, train=None)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(labels)))
    assert len(parts["validation"]) == validation and len(parts["calibration"]) == calibration
    for chosen in parts.values():
        for label in set(labels):
            # Of a class with share p, a stretch of n samples holds p * n, give or take what rounding of each
            # of the classes (five at most) can move.
            expected = len(chosen) * labels.count(label) / len(labels)
            assert abs(int((array[chosen] == label).sum()) - expected) <= 5


def test_every_index_is_in_the_order_once() -> None:
    assert sorted(stratified_order(np.array([3, 3, 1, 0]), 5).tolist()) == [0, 1, 2, 3]


def test_more_samples_than_there_are_is_refused() -> None:
    with pytest.raises(InvalidInput, match="train_subset 5000.*1438"):
        load_splits("digits", train_subset=5000)


def test_random_numbers_are_as_found(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    torch.manual_seed(4), random.seed(4), np.random.seed(4)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(4), random.seed(4), np.random.seed(4)
    load_splits(f"{tmp_path}/own.py:loaders")
    assert (torch.rand(1), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_of_a_folder_are_read(tmp_path: Path, suffix: str) -> None:
    write_mnist(tmp_path, suffix=suffix)
    splits = load_splits(
        "mnist", data_dir=tmp_path, batch_size=4, val_subset=10, calibration_batches=2, train_subset=30
    )
    assert splits.sizes() == {"train": 30, "calibration": 8, "validation": 10, "test": 20}
    images, labels = next(iter(splits.test or []))
    assert images[3].unique().tolist() == pytest.approx([3 / 255]) and labels[3] == 3


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataNotFound, match=r"train-images-idx3-ubyte.*47040.*60 x 28 x 28"):
        load_splits("mnist", data_dir=tmp_path)


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path, suffix=".gz")
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataNotFound, match=r"train-images-idx3-ubyte\.gz"):
        load_splits("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(("content", "found"), [(b"<html>not found</html>", "3c68746d"), (b"", "nothing")])
def test_a_foreign_file_is_named(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(DataNotFound, match=f"{found}.*00000801"):
        read_idx(path, 1)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(59, np.uint8)))
    with pytest.raises(DataNotFound, match="59 labels for 60 images"):
        load_splits("mnist", data_dir=tmp_path)


def test_an_absent_dataset_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match="mnist.*data_dir"):
        load_splits("mnist", data_dir=tmp_path)


def debian_files() -> Path:
    assert DEBIAN.is_dir(), "install the images: apt-get install dataset-fashion-mnist"
    return DEBIAN


@pytest.mark.slow
def test_debian_s_fashion_mnist_is_found_without_being_told() -> None:
    debian_files()
    splits = load_splits("fashion-mnist", train_subset=12000, val_subset=2000)
    assert splits.sizes() == {"train": 12000, "calibration": 128, "validation": 2000, "test": 10000}
    counts = np.bincount(np.concatenate([labels.numpy() for _, labels in splits.train]))
    assert abs(counts - 1200).max() <= 5
    parts = [samples(part) for part in (splits.train, splits.calibration, splits.validation, splits.test)]
    assert len(set().union(*parts)) == sum(map(len, parts)) == 12000 + 128 + 2000 + 10000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "served"
    shutil.copytree(debian_files(), folder)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{service.server_port}/", folder
        service.shutdown()


def test_a_download_is_kept_if_its_checksum_fits(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Debian packed the same images anew.
    packed = [hashlib.sha256((server[1] / f"{stem}.gz").read_bytes()).hexdigest() for stem in datasets.FILES]
    monkeypatch.setitem(datasets.SOURCES, "fashion-mnist", (datasets.SOURCES["fashion-mnist"][0], tuple(packed)))
    paths = datasets.fetch("fashion-mnist", tmp_path / "cache", server[0])
    assert [path.name for path in paths] == [f"{stem}.gz" for stem in datasets.FILES]
    assert datasets.find_files("fashion-mnist", tmp_path / "cache") == paths


def test_a_download_with_another_checksum_is_not_kept(server: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = server
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(DataNotFound, match="sha256"):
        datasets.fetch("fashion-mnist", tmp_path / "cache", url)
    assert not (tmp_path / "cache").exists()


def test_a_bomb_is_refused_before_it_is_unpacked(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder = server
    monkeypatch.setattr(datasets, "read_idx", None)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(100_000)))
    with pytest.raises(DataNotFound, match="sha256"):
        datasets.fetch("fashion-mnist", tmp_path / "cache", url)


def test_without_a_network_the_folder_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match="data_dir"):
        datasets.fetch("mnist", tmp_path, "http://127.0.0.1:9/")


OWN = """
import torch

def batches(count, batch_size=2):
    return [(torch.rand(batch_size, 3), torch.zeros(batch_size, dtype=torch.long)) for _ in range(count)]

def loaders(batch_size, seed):
    assert seed == 0
    return {"train": batches(5, batch_size), "validation": batches(2)}

def wide(batch_size, train_subset, count=1):
    return {part: batches(count) for part in ("train", "calibration", "validation", "test")}

def generator():
    return {"train": (batch for batch in batches(3)), "validation": batches(1)}

def lacking():
    return {"train": batches(3)}

def broken():
    raise KeyError("no such column")
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def test_a_function_of_the_user_s_gets_what_it_asks_for(own: str) -> None:
    splits = load_splits(f"{own}:loaders", batch_size=7, calibration_batches=2)
    assert next(iter(splits.train))[0].shape == (7, 3)
    assert splits.test is None
    assert [len(labels) for _, labels in splits.calibration] == [7, 7]  # the first two batches of train


def test_a_function_of_the_user_s_takes_literal_arguments(own: str) -> None:
    splits = load_splits(f"{own}:wide(count=3)")
    assert len(list(splits.test or [])) == 3
    assert [name for name, _ in splits.fingerprints()] == ["batches of validation", "batches of test"]


def test_loaders_of_the_user_s_are_the_same_for_the_same_seed(own: str) -> None:
    assert load_splits(f"{own}:loaders").fingerprints() == load_splits(f"{own}:loaders").fingerprints()


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("generator", InvalidInput, "train.*generator"),
        ("lacking", InvalidInput, "'validation'"),
        ("broken", DataNotFound, "KeyError: 'no such column'"),
        ("loader", ModelNotFound, "closest: loaders"),
    ],
)
def test_what_is_wrong_with_the_user_s_loaders_is_said(own: str, name: str, error: type, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        load_splits(f"{own}:{name}")


def test_an_unknown_dataset_is_refused() -> None:
    with pytest.raises(DataNotFound, match="'cifar'"):
        load_splits("cifar")


def test_a_fingerprint_follows_values_shapes_and_order() -> None:
    one, two = torch.zeros(2), torch.ones(2)
    prints = {fingerprint(batches) for batches in ([one, two], [two, one], [one, two.view(1, 2)], [one.int(), two])}
    assert len(prints) == 4
    assert fingerprint([{"a": one, "b": two}]) == fingerprint([{"b": two, "a": one}])
    assert fingerprint([one]) == hashlib.sha256(f"(2,){torch.float32}".encode() + bytes(8)).hexdigest()


def test_the_bundled_digits_are_scikit_learn_s() -> None:
    """Read from its file, without importing it; what its own function gives is the same, byte for byte."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    digest = hashlib.sha256(bunch.images.tobytes() + bunch.target.astype(np.int64).tobytes()).hexdigest()
    assert datasets.digits().checksums == (("sklearn.datasets.load_digits", digest),)


def test_loaders_in_the_usual_order_need_no_names() -> None:
    train, validation, test = ([(torch.zeros(2, 1), torch.zeros(2))] for _ in range(3))
    splits = splits_of((train, validation, test), "loaders", 1)
    assert (splits.train, splits.validation, splits.test) == (train, validation, test)
    assert splits_of((train, validation), "loaders", 1).test is None
