"""What results depend on: a model's code by its source, packages by version and source, data by content.

Code is found by its imports, without running any of it: the files of the same project one by one, each installed
package as a whole. What neither an import nor a class of the model leads to, such as a file that a factory reads, is
seen only in the weights.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from edge_opt.data import Splits
from edge_opt.data.datasets import seeded
from edge_opt.data.sources import fingerprint
from edge_opt.errors import InvalidInput, ModelNotFound
from edge_opt.loading import load_model, parse_reference
from edge_opt.search.store import Scope, Source

# Too large to be hashed for each run, and nobody edits them: their version stands for them.
_BY_VERSION = frozenset({"torch", "numpy"})
_OURS = "edge_opt"


def code_sources(reference: str | None, model: nn.Module | None = None) -> dict[str, Source]:
    """Every file and package that a model, or a function of the user's, is made of, by name.

    Args:
        reference: `file.py:name`, `package.module:name`, `torchvision:name` or `file.pt2`; None where there is none.
        model: The model that was built; the files of its classes count, and what they import.

    >>> sorted(code_sources("edge_opt.model:SmallCNN"))
    ['edge_opt/model.py', 'torch']
    """
    walk = _Walk()
    if reference is not None:
        walk.enter(reference)
    for kind in {kind for module in (model.modules() if model else ()) for kind in type(module).__mro__}:
        walk.add_module(kind.__module__)
    return walk.found()


def weights_source(model: nn.Module) -> Source:
    """A model's state."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(fingerprint([tensor]).encode())
    return Source(digest.hexdigest())


def first_weights(reference: str, seed: int) -> dict[str, Source]:
    """The weights that a factory starts with, such as those of a checkpoint; nothing where each call draws others."""
    drawn = []
    for _ in range(2):
        with seeded(seed):
            drawn.append(weights_source(load_model(reference).model))
    return {"first weights": drawn[0]} if drawn[0] == drawn[1] else {}


def data_sources(splits: Splits, seed: int, *, train: Scope, ranking: bool = False) -> dict[str, Source]:
    """The data by content. The test part is not among them: what is found on it is found anew each time.

    Args:
        splits: The four parts.
        seed: Under which random numbers are drawn, where a loader draws any.
        train: Whose results depend on the training part.
        ranking: Whether channels are ranked by the calibration part.
    """
    if splits.checksums:
        return {f"data: {name}": Source(digest) for name, digest in splits.checksums}
    _check_steady(splits.validation)
    validation = Source(fingerprint(splits.validation))
    calibration = _content(splits.calibration, seed)
    return {
        "validation data": validation,
        "training data": Source(_content(splits.train, seed), train),
        "calibration data": Source(calibration, "int8"),
        **({"calibration data, by which channels are ranked": Source(calibration, "pruned")} if ranking else {}),
    }


def _check_steady(validation: Iterable[Any]) -> None:
    """Refuse validation samples that come in another order, or are others, at each pass: candidates are paired."""
    first, again = (fingerprint(list(islice(iter(validation), 2))) for _ in range(2))
    if first != again:
        raise InvalidInput(
            "the validation part gives other samples, or another order, at each pass; candidates are compared sample "
            "by sample, so read it with shuffle=False and draw nothing at random in it"
        )


def _content(loader: Iterable[Any], seed: int) -> str:
    """SHA-256 of what a loader gives under a seed, or the word for one that gives something else at each pass."""
    tensors = getattr(getattr(loader, "dataset", None), "tensors", None)
    if tensors is not None:
        return fingerprint([tensors])
    trials = []
    for _ in range(2):
        with _as_first_read(loader, seed):
            trials.append(fingerprint(list(islice(iter(loader), 2))))
    if trials[0] != trials[1]:
        return "drawn at random"
    with _as_first_read(loader, seed):
        return fingerprint(loader)


@contextmanager
def _as_first_read(loader: Any, seed: int) -> Iterator[None]:
    """Random numbers as at the first pass, and afterwards as they were: those of the loader's own generators too."""
    inner = getattr(loader, "loader", loader)
    owners = [inner, getattr(inner, "sampler", None), getattr(getattr(inner, "batch_sampler", None), "sampler", None)]
    generators = {id(found): found for each in owners if (found := getattr(each, "generator", None)) is not None}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    try:
        with seeded(seed):
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)


class _Walk:
    """Files of the project and installed packages that imports lead to."""

    def __init__(self) -> None:
        self._files: dict[Path, str] = {}
        # What a layer of torch computes, and how fast, goes with its version.
        self._packages = {"torch"}

    def enter(self, reference: str) -> None:
        """Begin with what a reference names."""
        parsed = parse_reference(reference)
        if parsed is None:
            path = Path(reference)
            if path.is_file():
                self._files[path.resolve()] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif parsed.source.endswith(".py"):
            self._add_file(Path(parsed.source).resolve())
        else:
            self.add_module(parsed.source)

    def add_module(self, name: str) -> None:
        """A module by its dotted name; the packages it lies in count too."""
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top in self._packages:
            return
        spec = _spec(top)
        if spec is None:
            self._add_loaded(name)
            return
        if top in _BY_VERSION or (top != _OURS and _is_installed(spec)):
            self._packages.add(top)
            return
        for part in name.split(".")[1:]:
            self._add_spec(spec)
            below = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations or [])
            if below is None:
                return
            spec = below
        self._add_spec(spec)

    def _add_loaded(self, name: str) -> None:
        """A module that only `sys.modules` knows, such as a file that was loaded by its path."""
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            self._add_file(Path(file).resolve())

    def _add_spec(self, spec: ModuleSpec) -> None:
        is_package = spec.submodule_search_locations is not None
        is_ours = spec.name.partition(".")[0] == _OURS
        # Of our own, a bundled network's file is what it is; the rest of us is no part of it.
        if spec.has_location and spec.origin is not None and not (is_ours and is_package):
            self._add_file(Path(spec.origin).resolve(), follow=not is_ours)

    def _add_file(self, path: Path, follow: bool = True) -> None:
        if path in self._files or not path.is_file():
            return
        content = path.read_bytes()
        self._files[path] = hashlib.sha256(content).hexdigest()
        if path.suffix != ".py":
            return
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError) as error:
            raise ModelNotFound(f"{str(path)!r} is not Python: {error}") from error
        # Without comments and layout: they change nothing that runs.
        self._files[path] = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
        for node in _imports(tree) if follow else ():
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.add_module(alias.name)
            elif node.level:
                self._add_relative(path, node)
            elif node.module is not None:
                for alias in node.names:
                    self.add_module(f"{node.module}.{alias.name}")

    def _add_relative(self, path: Path, node: ast.ImportFrom) -> None:
        """What `from ..a.b import c` may mean, by its place in the folders."""
        folder = path.parents[node.level - 1]
        self._add_file(folder / "__init__.py")
        for part in node.module.split(".") if node.module else ():
            self._add_file(folder / f"{part}.py")
            folder = folder / part
            self._add_file(folder / "__init__.py")
        for alias in node.names:
            self._add_file(folder / f"{alias.name}.py")
            self._add_file(folder / alias.name / "__init__.py")

    def found(self) -> dict[str, Source]:
        """Everything by a name that is the same wherever the project lies."""
        names: dict[str, Source] = {package: Source(_package(package)) for package in self._packages}
        for path, digest in sorted(self._files.items()):
            name = _short(path)
            names[str(path) if name in names else name] = Source(digest)
        return names


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports anywhere in a file, functions included; those for type checkers never run."""
    if isinstance(tree, (ast.Import, ast.ImportFrom)):
        yield tree
    skipped: list[ast.AST] = []
    if isinstance(tree, ast.If) and ast.unparse(tree.test).rpartition(".")[2] == "TYPE_CHECKING":
        skipped = [*tree.body]
    for child in ast.iter_child_nodes(tree):
        if not any(child is each for each in skipped):
            yield from _imports(child)


def _spec(top: str) -> ModuleSpec | None:
    """Where a package or a module of the first level lies; it is not imported for that."""
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None


def _is_installed(spec: ModuleSpec) -> bool:
    places = [Path(place).resolve() for place in (spec.origin, *(spec.submodule_search_locations or ())) if place]
    homes = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")]
    return any(
        home in place.parents or {"site-packages", "dist-packages"} & set(place.parts)
        for place in places
        for home in homes
    )


def _package(name: str) -> str:
    """An installed package: its version, and SHA-256 of its Python files."""
    try:
        found = version(name)
    except PackageNotFoundError:  # the distribution has another name; the source says all that matters
        found = str(getattr(sys.modules.get(name), "__version__", "no version"))
    spec = _spec(name)
    if name in _BY_VERSION or spec is None:
        return found
    digest = hashlib.sha256()
    roots = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [path for root in roots for path in sorted(root.rglob("*.py"))]
    for path in files or ([Path(spec.origin)] if spec.has_location and spec.origin else []):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return f"{found} {digest.hexdigest()}"


def _short(path: Path) -> str:
    """A file's path from where it is imported from."""
    roots = [Path(entry or ".").resolve() for entry in sys.path]
    below = [path.relative_to(root) for root in roots if root in path.parents]
    return min((each.as_posix() for each in below), key=len, default=path.name)


def plain(sources: Mapping[str, Source]) -> dict[str, str]:
    """Sources as a digest of settings takes them."""
    return {name: source.digest for name, source in sorted(sources.items())}
