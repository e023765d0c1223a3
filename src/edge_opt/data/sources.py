"""Where the images of the named datasets come from: scikit-learn, a folder, Debian's package, or the network."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_opt.data.idx import content_of, parse_idx
from edge_opt.data.splits import stratified_order
from edge_opt.errors import DataNotFound, MissingExtra
from edge_opt.files import write_whole

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
# Debian's dataset packages put their files here.
SYSTEM_FOLDER = Path("/usr/share/datasets")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a dataset can be fetched. Checksums are of the files as sent, or of what is in them, by file."""

    url: str
    algorithm: str
    digests: tuple[str, str, str, str]
    of_content: bool


SOURCES: Mapping[str, Source] = {
    # MD5 of the four .gz files, as published with the dataset.
    "mnist": Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "md5",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        of_content=False,
    ),
    # SHA-256 of the unpacked files, taken from Debian's package: packers differ, the images do not.
    "fashion-mnist": Source(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "sha256",
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        of_content=True,
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
    """scikit-learn's 1797 handwritten digits, enlarged from 8x8 to 28x28; a fifth of them, always the same, is test.

    >>> raw = digits()
    >>> raw.images.shape, raw.test_images.shape
    ((1438, 1, 28, 28), (359, 1, 28, 28))
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtra("the dataset 'digits' needs scikit-learn; run `pip install 'edge-opt[run]'`") from error
    import torch

    bunch = load_digits()
    small = torch.from_numpy(bunch.images.astype(np.float32) / 16)[:, None]
    images = torch.nn.functional.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False).numpy()
    labels = bunch.target.astype(np.int64)
    order = stratified_order(labels, seed=0)
    test, rest = order[: len(order) // 5], order[len(order) // 5 :]
    digest = hashlib.sha256(bunch.images.tobytes() + labels.tobytes()).hexdigest()
    return Raw(images[rest], labels[rest], images[test], labels[test], (("sklearn.datasets.load_digits", digest),))


def idx_dataset(name: str, folder: Path | None, download: bool) -> Raw:
    """MNIST or Fashion-MNIST from four idx files, plain or .gz."""
    paths = find_files(name, folder) or (fetch(name, cache_folder() / name) if download else None)
    if paths is None:
        looked = ", ".join(str(place) for place in _places(name, folder))
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
    source = SOURCES[name]
    if source.of_content and digests != source.digests:
        wrong = next(path for path, ours, theirs in zip(paths, digests, source.digests, strict=True) if ours != theirs)
        raise DataNotFound(
            f"{wrong} is an idx file, but not that of {name}: its SHA-256 is another; get the file again"
        )
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
    """Where downloads are kept: EDGE_OPT_DATA, or the user's cache."""
    own = os.environ.get("EDGE_OPT_DATA")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(own) if own else cache / "edge_opt"


def _places(name: str, folder: Path | None) -> list[Path]:
    if folder is not None:
        return [folder, folder / name]
    return [cache_folder() / name, SYSTEM_FOLDER / name]


def find_files(name: str, folder: Path | None) -> list[Path] | None:
    """The four files, in order, from the first place that has them all."""
    for place in _places(name, folder):
        found = [_present(place, stem) for stem in FILES]
        if all(found):
            return [path for path in found if path is not None]
    return None


def _present(place: Path, stem: str) -> Path | None:
    # Some copies are named train-images.idx3-ubyte.
    dotted = stem.replace("-idx", ".idx")
    return next(
        (path for name in (stem, dotted) for end in ("", ".gz") if (path := place / f"{name}{end}").is_file()), None
    )


def fetch(name: str, folder: Path, url: str | None = None) -> list[Path]:
    """Download the four files of a dataset into a folder; each is kept only if its checksum is the published one."""
    source = SOURCES[name]
    paths = []
    for stem, digest in zip(FILES, source.digests, strict=True):
        address = f"{url or source.url}{stem}.gz"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                sent: bytes = answer.read()
        except (urllib.error.URLError, OSError) as error:
            raise DataNotFound(
                f"{address} cannot be reached ({error}); put the four idx files of {name} into a folder "
                "and name it as data_dir"
            ) from error
        draft = folder / f".{stem}.part.gz"
        write_whole(draft, sent)
        try:
            checked = content_of(draft) if source.of_content else sent
            if hashlib.new(source.algorithm, checked).hexdigest() != digest:
                raise DataNotFound(f"{address} is not the published file: its {source.algorithm} is another")
            paths.append(draft.rename(folder / f"{stem}.gz"))
        finally:
            draft.unlink(missing_ok=True)
    return paths
