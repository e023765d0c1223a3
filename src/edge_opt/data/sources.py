"""Where data come from, and how they are parted: bundled, a folder, a package, a download."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import urllib.request
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edge_opt._support.extras import import_optional
from edge_opt._support.files import write_whole
from edge_opt.errors import DataNotFound, InvalidInput
from edge_opt.records.display import Record


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


@dataclass(frozen=True, slots=True)
class Splits(Record):
    """Four loaders of (inputs, labels) batches.

    Attributes:
        name: Name of the dataset.
        train: What models learn from.
        calibration: What decides the ranges of int8.
        validation: What candidates are chosen on.
        test: What the chosen one is reported on; None where there is none.
        checksums: Files of the source with their SHA-256; empty where none are known.
        indices: Which samples of the source are in which part; empty where we did not make the parts.
    """

    name: str
    train: Iterable[Any]
    calibration: Iterable[Any]
    validation: Iterable[Any]
    test: Iterable[Any] | None
    checksums: tuple[tuple[str, str], ...] = ()
    indices: Mapping[str, Indices] = field(default_factory=dict)

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


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Return the array of unsigned bytes in an idx file; the error for a damaged file says what is wrong."""
    return parse_idx(content_of(path), dimensions, path)


def content_of(path: Path) -> bytes:
    """Return the bytes of a file, unpacked if its name ends in .gz."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except OSError as error:  # gzip.BadGzipFile is one, too
        raise DataNotFound(f"{path} cannot be read: {error}; get the file again") from error
    except (EOFError, zlib.error) as error:
        raise DataNotFound(f"{path} is damaged or cut short ({error}); get the file again") from error


def parse_idx(content: bytes, dimensions: int, path: Path) -> Bytes:
    """Return the array that the bytes of an idx file describe; `path` is for the error.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), 1, Path("labels")).tolist()
    [7, 9]
    """
    header = 4 * (1 + dimensions)
    if len(content) < header or content[:3] != bytes([0, 0, _UNSIGNED_BYTE]) or content[3] != dimensions:
        raise DataNotFound(
            f"{path} is not an idx file of bytes in {dimensions} dimensions: "
            f"it starts with {content[:4].hex() or 'nothing'}, "
            f"and 0000080{dimensions} was expected"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    wanted: Any = int(np.prod(shape, dtype=np.int64))
    if len(content) - header != wanted:
        raise DataNotFound(
            f"{path} should hold {wanted} values ({' x '.join(map(str, shape))}) and holds {len(content) - header}; "
            "get the file again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
# Debian's dataset packages put their files here.
SYSTEM_FOLDER = Path("/usr/share/datasets")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a dataset can be fetched, and the SHA-256 of its four packed files."""

    url: str
    sha256: tuple[str, str, str, str]


SOURCES: dict[str, Source] = {
    "mnist": Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "fashion-mnist": Source(
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
    import torch

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
        raise DataNotFound(
            f"{name} is not in {looked}; put its four idx files into a folder and name it as data_dir{package}, "
            "or set download: true"
        )
    contents = [content_of(path) for path in paths]
    train_images, train_labels, test_images, test_labels = (
        parse_idx(content, 1 if "labels" in path.name else 3, path)
        for content, path in zip(contents, paths, strict=True)
    )
    for images, labels, path in ((train_images, train_labels, paths[1]), (test_images, test_labels, paths[3])):
        if len(images) != len(labels):
            raise DataNotFound(
                f"{path} has {len(labels)} labels for {len(images)} images; the files do not belong together"
            )
    digests = tuple(hashlib.sha256(content).hexdigest() for content in contents)
    return Raw(
        _scaled(train_images),
        train_labels.astype(np.int64),
        _scaled(test_images),
        test_labels.astype(np.int64),
        tuple(zip(FILES, digests, strict=True)),
    )


def _scaled(images: npt.NDArray[np.uint8]) -> Images:
    return (images.astype(np.float32) / np.float32(255))[:, None]


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
    source = SOURCES[name]
    paths = []
    for stem, digest in zip(FILES, source.sha256, strict=True):
        address = f"{url or source.url}{stem}.gz"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                sent = answer.read()
        except (OSError, ValueError) as error:  # urllib's own errors are an OSError
            raise DataNotFound(
                f"{address} cannot be reached ({error}); put the four idx files of {name} into a folder "
                "and name it as data_dir"
            ) from error
        if hashlib.sha256(sent).hexdigest() != digest:
            raise DataNotFound(f"{address} is not the published file: its sha256 is another")
        paths.append(write_whole(folder / f"{stem}.gz", sent))
    return paths
