"""Datasets, bundled, from a folder, a package, a download or of one's own, in four parts that share no sample."""

from __future__ import annotations

import gzip
import hashlib
import inspect
import itertools
import math
import os
import random
import struct
import urllib.request
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from edge_opt._support.extras import import_optional
from edge_opt._support.files import write_whole
from edge_opt.errors import DataNotFound, EdgeOptError, InvalidInput, first_line
from edge_opt.loading import find_object, parse_reference
from edge_opt.records.fields import Record, field, record

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def fingerprint(loader: Iterable[Any]) -> str:
    """Return the SHA-256 of every tensor of a loader, in order."""
    digest = hashlib.sha256()
    for batch in loader:
        _feed(digest, batch)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value).encode())


Indices = npt.NDArray[np.int64]


@record
class Splits(Record):
    """Four loaders of (inputs, labels) batches."""

    name: str = field("Name of the dataset.")
    train: Iterable[Any] = field("What models learn from.")
    calibration: Iterable[Any] = field("What decides the ranges of int8.")
    validation: Iterable[Any] = field("What candidates are chosen on.")
    test: Iterable[Any] | None = field("Data on which the winner is reported; None if there is none.")
    checksums: tuple[tuple[str, str], ...] = field("SHA-256 by file of the source; empty where not known.", default=())
    indices: Mapping[str, Indices] = field("Samples by part; empty where we did not make the parts.", factory=dict)

    def sizes(self) -> dict[str, int]:
        """Return the number of samples by part, where we made the parts."""
        return {part: len(chosen) for part, chosen in self.indices.items()}

    def fingerprints(self) -> tuple[tuple[str, str], ...]:
        """Return the SHA-256 of the source's files, or else of the batches of validation and test: a pass over each."""
        if self.checksums:
            return self.checksums
        parts = {"validation": self.validation, "test": self.test}
        return tuple((f"batches of {name}", fingerprint(part)) for name, part in parts.items() if part is not None)


def stratified_order(labels: npt.NDArray[Any], seed: int) -> Indices:
    """Return every index once, shuffled by `seed`; each stretch of the order has the classes in their shares.

    >>> order = stratified_order(np.array([0] * 6 + [1] * 3), seed=0)
    >>> sorted(order.tolist()), np.bincount(np.array([0] * 6 + [1] * 3)[order[:3]]).tolist()
    ([0, 1, 2, 3, 4, 5, 6, 7, 8], [2, 1])
    """
    generator = np.random.default_rng(seed)
    shuffled = generator.permutation(len(labels))
    positions = np.empty(len(labels))
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        # A class is spread evenly from 0 to 1; the offset keeps classes of one size from taking turns.
        positions[members] = (np.arange(len(members)) + generator.random()) / len(members)
    return np.argsort(positions, kind="stable").astype(np.int64)


def part_indices(
    labels: npt.NDArray[Any], *, seed: int, validation: int, calibration: int, train: int | None
) -> dict[str, Indices]:
    """Return disjoint, stratified parts of what is not for testing; `train` None takes all remaining samples.

    Validation is taken first: it is the same whatever the size of the others.
    """
    available = len(labels)
    least_train = 1 if train is None else train
    if validation + calibration + least_train > available:
        asked = f"val_subset {validation}, calibration {calibration} and train_subset {train}"
        raise InvalidInput(f"{asked} are more than the {available} samples there are; make one of them smaller")
    order = stratified_order(labels, seed)
    after = validation + calibration
    end = available if train is None else after + train
    return {"train": order[after:end], "calibration": order[validation:after], "validation": order[:validation]}


Bytes = npt.NDArray[np.uint8]
_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> tuple[Bytes, str]:
    """Return the array of unsigned bytes in an idx file, plain or .gz, and the SHA-256 of the unpacked file."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except OSError as error:  # includes gzip.BadGzipFile
        raise DataNotFound(f"{path} cannot be read: {error}; get the file again") from error
    except (EOFError, zlib.error) as error:
        raise DataNotFound(f"{path} is damaged or cut short ({error}); get the file again") from error
    header = 4 * (1 + dimensions)
    if len(content) < header or content[:3] != bytes([0, 0, _UNSIGNED_BYTE]) or content[3] != dimensions:
        start = content[:4].hex() or "nothing"
        raise DataNotFound(f"{path} is not an idx file: it starts with {start}, and 0000080{dimensions} was expected")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != math.prod(shape):
        values = f"{math.prod(shape)} values ({' x '.join(map(str, shape))})"
        raise DataNotFound(f"{path} should hold {values} and holds {len(content) - header}; get the file again")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape), hashlib.sha256(content).hexdigest()


Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
# Debian's dataset packages put their files here.
SYSTEM_FOLDER = Path("/usr/share/datasets")


# Where a dataset can be fetched, and the SHA-256 of its four packed files.
SOURCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "fashion-mnist": (
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Raw:
    """A dataset as it came: images (samples, 1, 28, 28) from 0 to 1; what is for testing apart; SHA-256 by file."""

    images: Images
    labels: Labels
    test_images: Images
    test_labels: Labels
    checksums: tuple[tuple[str, str], ...]


def digits() -> Raw:
    """Return scikit-learn's 1797 handwritten digits, enlarged from 8x8 to 28x28; always the same fifth is for testing.

    >>> raw = digits()
    >>> raw.images.shape, raw.test_images.shape
    ((1438, 1, 28, 28), (359, 1, 28, 28))
    """
    shades, labels = _bundled_digits()
    small = torch.from_numpy(shades.astype(np.float32) / 16)[:, None]
    images = torch.nn.functional.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False).numpy()
    order = stratified_order(labels, seed=0)
    test, rest = order[: len(order) // 5], order[len(order) // 5 :]
    digest = hashlib.sha256(shades.tobytes() + labels.tobytes()).hexdigest()
    return Raw(images[rest], labels[rest], images[test], labels[test], (("sklearn.datasets.load_digits", digest),))


def _bundled_digits() -> tuple[Any, Labels]:
    """Return images from 0 to 16 and their labels from scikit-learn's own file, because importing it takes seconds."""
    package = find_spec("sklearn")
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            rows = np.loadtxt(path, delimiter=",")
            return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)
    bunch = import_optional("sklearn.datasets", "the dataset 'digits' needs", "run", "scikit-learn").load_digits()
    return bunch.images, bunch.target.astype(np.int64)


def idx_dataset(name: str, folder: Path | None, download: bool) -> Raw:
    """Return MNIST or Fashion-MNIST from four idx files, plain or .gz."""
    paths = find_files(name, folder) or (fetch(name, cache_folder() / name) if download else None)
    if paths is None:
        looked = ", ".join(map(str, _search_folders(name, folder)))
        package = " or install the package dataset-fashion-mnist (Debian)" if name == "fashion-mnist" else ""
        cure = f"put its four idx files into a folder and name it as data_dir{package}, or set download: true"
        raise DataNotFound(f"{name} is not in {looked}; {cure}")
    arrays, digests = zip(*(read_idx(path, 1 if "labels" in path.name else 3) for path in paths), strict=True)
    for images, labels, path in zip(arrays[::2], arrays[1::2], paths[1::2], strict=True):
        if len(images) != len(labels):
            raise DataNotFound(f"{path} has {len(labels)} labels for {len(images)} images; get both files again")
    pictures = [(images.astype(np.float32) / np.float32(255))[:, None] for images in arrays[::2]]
    answers = [labels.astype(np.int64) for labels in arrays[1::2]]
    return Raw(pictures[0], answers[0], pictures[1], answers[1], tuple(zip(FILES, digests, strict=True)))


def cache_folder() -> Path:
    """Return the folder where downloads are kept: EDGE_OPT_DATA, or the user's cache."""
    own = os.environ.get("EDGE_OPT_DATA")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(own) if own else cache / "edge_opt"


def _search_folders(name: str, folder: Path | None) -> list[Path]:
    if folder is not None:
        return [folder, folder / name]
    return [cache_folder() / name, SYSTEM_FOLDER / name]


def find_files(name: str, folder: Path | None) -> list[Path] | None:
    """Return the four files, in order, from the first folder that has them all."""
    for candidate in _search_folders(name, folder):
        paths = [path for stem in FILES if (path := _existing_file(candidate, stem)) is not None]
        if len(paths) == len(FILES):
            return paths
    return None


def _existing_file(folder: Path, stem: str) -> Path | None:
    # Some copies are named train-images.idx3-ubyte.
    stems = (stem, stem.replace("-idx", ".idx"))
    paths = (folder / f"{name}{suffix}" for name in stems for suffix in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def fetch(name: str, folder: Path, url: str | None = None) -> list[Path]:
    """Download the four files of a dataset into a folder; each is checked before it is kept or unpacked.

    The checksums make the transport irrelevant: a file that was changed on the way, or is another one, is refused.
    """
    published_url, digests = SOURCES[name]
    paths = []
    for stem, digest in zip(FILES, digests, strict=True):
        address = f"{url or published_url}{stem}.gz"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                sent = answer.read()
        except (OSError, ValueError) as error:  # urllib's own errors are an OSError
            cure = f"put the four idx files of {name} into a folder and name it as data_dir"
            raise DataNotFound(f"{address} cannot be reached ({error}); {cure}") from error
        if hashlib.sha256(sent).hexdigest() != digest:
            raise DataNotFound(f"{address} is not the published file: its sha256 is another")
        paths.append(write_whole(folder / f"{stem}.gz", sent))
    return paths


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch, and restore the three afterwards, also after an error.

    >>> with seeded(3):
    ...     first = random.random()
    >>> with seeded(3):
    ...     first == random.random()
    True
    """
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


_FORM = "(train, validation), (train, validation, test), or a mapping with these names and maybe `calibration`"


class FirstBatches:
    """The first batches of a loader, at each pass."""

    def __init__(self, loader: Iterable[Any], batches: int) -> None:
        self.loader, self.batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.loader), self.batches)


def _own_parts(reference: str, offered: Mapping[str, Any]) -> Any:
    """Return what a user's reference names; a function is called with those of `offered` that it has parameters for."""
    parsed = parse_reference(reference)
    if parsed is None:
        raise DataNotFound(f"dataset is {reference!r}; it must be a known name or file.py:loaders")
    function = find_object(parsed)
    if not callable(function):
        return function
    parameters = inspect.signature(function).parameters
    arguments = {key: value for key, value in offered.items() if key in parameters} | parsed.arguments
    try:
        return function(**arguments)
    except EdgeOptError:
        raise
    except Exception as error:
        raise DataNotFound(f"{reference!r} raised {first_line(error)}") from error


def splits_of(
    returned: Any,
    name: str,
    calibration_batches: int,
    *,
    parts_are_datasets: bool = False,
    batch_size: int = 32,
    seed: int = 0,
    num_workers: int = 0,
) -> Splits:
    """Return the four parts of what a user's function returned; without `calibration`, the first batches of `train`.

    A part that is a dataset becomes a loader. With `parts_are_datasets`, every part that is not a loader holds samples,
    and its batches are lists of them, for the user's `collate`.
    """
    if isinstance(returned, Splits):
        return returned
    if isinstance(returned, (tuple, list)) and len(returned) in (2, 3):
        returned = dict(zip(("train", "validation", "test"), returned, strict=False))
    read: Any = returned.get if isinstance(returned, Mapping) else lambda part: getattr(returned, part, None)
    parts: dict[str, Any] = {part: read(part) for part in ("train", "calibration", "validation", "test")}
    for part in ("train", "validation"):
        if parts[part] is None:
            raise InvalidInput(f"{name!r} has no {part!r} part; it must return {_FORM}")
    for part, samples in parts.items():
        if samples is not None and _is_dataset(samples, parts_are_datasets):
            collate = list if parts_are_datasets else None
            parts[part] = _loader(samples, batch_size, seed, num_workers, part == "train", collate)
    for part, loader in parts.items():
        if loader is not None and (not isinstance(loader, Iterable) or iter(loader) is loader):
            kind = type(loader).__name__
            raise InvalidInput(f"{part} of {name!r} is a {kind}; it must be a DataLoader or a list of batches")
    calibration = parts["calibration"] if parts["calibration"] is not None else parts["train"]
    return Splits(
        name, parts["train"], FirstBatches(calibration, calibration_batches), parts["validation"], parts["test"]
    )


def _is_dataset(part: Any, parts_are_datasets: bool) -> bool:
    """Return whether a part holds samples: a Dataset of torch, or anything indexed where samples are expected."""
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    if isinstance(part, (DataLoader, FirstBatches, IterableDataset)):
        return False
    return isinstance(part, Dataset) or (
        parts_are_datasets and hasattr(part, "__getitem__") and hasattr(part, "__len__")
    )


def _loader(
    samples: Any, batch_size: int, seed: int, num_workers: int, shuffle: bool, collate: Any = None
) -> DataLoader[Any]:
    from torch.utils.data import DataLoader

    # A generator of its own: other random numbers do not change the order of samples.
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        samples, batch_size, shuffle=shuffle, generator=generator, num_workers=num_workers, collate_fn=collate
    )


DATASETS = ("digits", *SOURCES)


def load_splits(
    dataset: str,
    *,
    batch_size: int = 32,
    seed: int = 0,
    dataloader_seed: int | None = None,
    train_subset: int | None = None,
    val_subset: int | None = None,
    calibration_batches: int = 4,
    num_workers: int = 0,
    data_dir: str | Path | None = None,
    download: bool = False,
    parts_are_datasets: bool = False,
) -> Splits:
    """Return train, calibration, validation and test parts that share no sample, the same for the same seed.

    Args:
        dataset: `digits`, `mnist`, `fashion-mnist`, or a function of your own as `file.py:loaders`.
        batch_size: Samples per batch.
        seed: Decides which samples are in which part.
        dataloader_seed: Decides the order of training samples; default: `seed`.
        train_subset: Training samples; None takes all remaining ones.
        val_subset: Validation samples; None is as many as the test part has.
        calibration_batches: Batches for the ranges of int8.
        num_workers: Processes that load data; 0 loads in this one.
        data_dir: Folder of idx files; None looks where packages put them.
        download: Whether to fetch mnist or fashion-mnist where it is not here.
        parts_are_datasets: Whether parts of your own that are not loaders hold samples. Their batches are lists of
            samples, from which a `collate` makes the batch.

    >>> splits = load_splits("digits", train_subset=500)
    >>> splits.sizes()
    {'train': 500, 'calibration': 128, 'validation': 359, 'test': 359}
    """
    shuffle_seed = seed if dataloader_seed is None else dataloader_seed
    folder = None if data_dir is None else Path(data_dir)
    if dataset not in DATASETS:
        offered = {
            "batch_size": batch_size,
            "seed": seed,
            "dataloader_seed": shuffle_seed,
            "train_subset": train_subset,
            "val_subset": val_subset,
            "num_workers": num_workers,
            "data_dir": folder,
        }
        loading = {"batch_size": batch_size, "seed": shuffle_seed, "num_workers": num_workers}
        with seeded(shuffle_seed):
            parts = _own_parts(dataset, offered)
            return splits_of(parts, dataset, calibration_batches, parts_are_datasets=parts_are_datasets, **loading)
    raw = digits() if dataset == "digits" else idx_dataset(dataset, folder, download)
    chosen = part_indices(
        raw.labels,
        seed=seed,
        validation=len(raw.test_labels) if val_subset is None else val_subset,
        calibration=calibration_batches * batch_size,
        train=train_subset,
    )
    from torch.utils.data import TensorDataset

    def loader(images: torch.Tensor, labels: torch.Tensor, shuffle: bool = False) -> DataLoader[Any]:
        return _loader(TensorDataset(images, labels), batch_size, shuffle_seed, num_workers, shuffle)

    images, labels = torch.from_numpy(raw.images), torch.from_numpy(raw.labels)
    loaders = {part: loader(images[rows], labels[rows], part == "train") for part, rows in chosen.items()}
    test = loader(torch.from_numpy(raw.test_images), torch.from_numpy(raw.test_labels))
    # Test samples are numbered after the others, because they come from a source of their own.
    indices = {**chosen, "test": len(raw.labels) + np.arange(len(raw.test_labels), dtype=np.int64)}
    return Splits(dataset, **loaders, test=test, checksums=raw.checksums, indices=indices)
