"""Dependencies of results: code by its source, installed packages by version, data by content.

Code is found by its imports, without running it. A file that neither an import nor a class of the model leads to, such
as a checkpoint that a factory reads, is seen in the weights only.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from torch import nn

from edge_opt.data import Splits
from edge_opt.data.datasets import fingerprint, seeded
from edge_opt.errors import InvalidInput, ModelNotFound
from edge_opt.loading import parse_reference
from edge_opt.run.config import TASK_KEYS, RunConfig
from edge_opt.run.model_and_data import ModelAndData
from edge_opt.search.store import ResultSource, Scope

_OURS = "edge_opt"


def sources_of(
    config: RunConfig,
    splits: Splits | None,
    model: nn.Module,
    reference: str | None = None,
    *,
    trains_baseline: bool = False,
) -> dict[str, ResultSource]:
    """Return all code and data that the results of a run depend on, by name.

    Args:
        config: The configuration; its metric, loss, forward and collate may be code of the user's.
        splits: The data; None leaves it out.
        model: The model that was built.
        reference: The reference that built it; None where a model was given.
        trains_baseline: Whether the baseline is trained on the data, so that every result depends on it.
    """
    sources = code_sources(reference, model)
    for value in (getattr(config, key) for key in TASK_KEYS):
        if isinstance(value, str) and ":" in value:
            sources |= code_sources(value)
        elif callable(value) and hasattr(value, "__module__"):
            sources |= code_sources(f"{value.__module__}:{getattr(value, '__qualname__', type(value).__name__)}")
    if splits is None:
        return sources
    train: Scope = "all" if trains_baseline or config.fair else "trained" if config.train_for_int8 else "pruned"
    return {
        **sources,
        **data_sources(splits, config.seed, train=train, ranking=config.importance == "taylor"),
    }


def same_twice(first: nn.Module, source: ModelAndData) -> dict[str, ResultSource]:
    """Return the weights that a factory starts with, such as those of a checkpoint.

    A factory that draws other weights at each call, in spite of the seed, has no such source.
    """
    before, again = weights_source(first), weights_source(source.build())
    return {"first weights": before} if before == again else {}


def code_sources(reference: str | None, model: nn.Module | None = None) -> dict[str, ResultSource]:
    """Return every file and package that a model, or a function of the user's, is made of.

    Args:
        reference: `file.py:name`, `package.module:name`, `torchvision:name` or a model file; None where there is none.
        model: The model that was built; the files of its classes count, and what they import.

    >>> sorted(code_sources("edge_opt.model:SmallCNN"))
    ['edge_opt/model.py', 'torch']
    """
    files: set[Path] = set()
    # What a layer of torch computes, and how fast, goes with its version.
    packages = {"torch"}
    modules = {kind.__module__ for module in (model.modules() if model else ()) for kind in type(module).__mro__}
    parsed = None if reference is None else parse_reference(reference)
    if parsed is not None and not parsed.source.endswith(".py"):
        modules.add(parsed.source)
    elif reference is not None:
        files.add(Path(reference if parsed is None else parsed.source).resolve())
    for name in modules:
        path = _project_file(name)
        if path is None:
            packages.add(name.partition(".")[0])
        else:
            files.add(path)
    for path in [path for path in files if path.suffix == ".py" and path.is_file()]:
        imported, others = _imports(path)
        files |= imported
        packages |= others
    sources = {name: ResultSource(text) for name in sorted(packages) if (text := _version(name)) is not None}
    for path in sorted(path for path in files if path.is_file()):
        name = _short(path)
        # Python without comments and layout, which do not change what runs.
        content = ast.dump(_parsed(path)).encode() if path.suffix == ".py" else path.read_bytes()
        sources[str(path) if name in sources else name] = ResultSource(hashlib.sha256(content).hexdigest())
    return sources


def weights_source(model: nn.Module) -> ResultSource:
    """Return a model's state as a source."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(fingerprint([tensor]).encode())
    return ResultSource(digest.hexdigest())


def data_sources(splits: Splits, seed: int, *, train: Scope, ranking: bool = False) -> dict[str, ResultSource]:
    """Return the data by content. The test part is not included: it is scored anew each time.

    Args:
        splits: The four parts.
        seed: Under which random numbers are drawn, where a loader draws any.
        train: Which results depend on the training part.
        ranking: Whether channels are ranked by the calibration part.
    """
    if splits.checksums:
        return {f"data: {name}": ResultSource(digest) for name, digest in splits.checksums}
    _check_steady(splits.validation)
    validation = ResultSource(fingerprint(splits.validation))
    calibration = _content(splits.calibration, seed)
    return {
        "validation data": validation,
        "training data": ResultSource(_content(splits.train, seed), train),
        "calibration data": ResultSource(calibration, "int8"),
        **({"calibration data, by which channels are ranked": ResultSource(calibration, "pruned")} if ranking else {}),
    }


def _check_steady(validation: Iterable[Any]) -> None:
    """Refuse validation samples that differ at each pass, or in order: candidates are compared sample by sample."""
    first, again = (fingerprint(list(islice(iter(validation), 2))) for _ in range(2))
    if first != again:
        problem = "the validation part gives other samples, or another order, at each pass"
        raise InvalidInput(f"{problem}; read it with shuffle=False and draw nothing at random in it")


def _content(loader: Iterable[Any], seed: int) -> str:
    """Return the SHA-256 of a loader's samples under a seed, or a fixed text if they differ at each pass."""
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
    """Seed all random numbers inside, and restore them afterwards, also those of the loader's own generators."""
    inner = getattr(loader, "loader", loader)
    owners = [inner, getattr(inner, "sampler", None), getattr(getattr(inner, "batch_sampler", None), "sampler", None)]
    generators = {id(own): own for each in owners if (own := getattr(each, "generator", None)) is not None}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    try:
        with seeded(seed):
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _project_file(name: str) -> Path | None:
    """Return the file of a module that belongs to the user's project; None for an installed one."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        loaded = None if spec is None or not spec.has_location else spec.origin
    if loaded is None or (_is_installed(Path(loaded)) and not name.startswith(f"{_OURS}.")):
        return None
    return Path(loaded).resolve()


def _imports(path: Path) -> tuple[set[Path], set[str]]:
    """Return the project files that a file imports, directly or not, and the names of other packages.

    ModuleFinder reads bytecode and runs nothing. Its path holds the folders of the project only, so whatever is
    installed stays unresolved and counts by version. Our own modules are not followed: they have a version.
    """
    _parsed(path)
    if Path(__file__).resolve().parents[1] in path.parents:
        return set(), set()
    folders = [str(path.parent), *(entry for entry in sys.path if not _is_installed(Path(entry or ".")))]
    finder = ModuleFinder(folders, excludes=[_OURS, *sys.stdlib_module_names])
    finder.run_script(str(path))
    files = {Path(file).resolve() for module in finder.modules.values() if (file := getattr(module, "__file__", None))}
    missing = {name.partition(".")[0] for name in finder.any_missing()}
    return files - {path}, {name for name in missing if name not in sys.stdlib_module_names and name != _OURS}


def _is_installed(path: Path) -> bool:
    homes = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")]
    resolved = path.resolve()
    return bool({"site-packages", "dist-packages"} & set(resolved.parts)) or any(
        home == resolved or home in resolved.parents for home in homes
    )


def _version(name: str) -> str | None:
    """Return the version of an installed package; None for what is not installed, or belongs to Python."""
    if name in sys.stdlib_module_names or name == _OURS:
        return None
    try:
        return version(name)
    except PackageNotFoundError:  # the distribution has another name than the package, or there is none
        is_here = name in sys.modules or importlib.util.find_spec(name) is not None
        return str(getattr(sys.modules.get(name), "__version__", "no version")) if is_here else None


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ModelNotFound(f"{str(path)!r} is not Python: {error}") from error


def _short(path: Path) -> str:
    """Return a file's path from where it is imported, the same wherever the project lies."""
    roots = [Path(entry or ".").resolve() for entry in sys.path]
    below = [path.relative_to(root) for root in roots if root in path.parents]
    return min((each.as_posix() for each in below), key=len, default=path.name)


def digests(sources: Mapping[str, ResultSource]) -> dict[str, str]:
    """Return sources as they enter the digest of settings."""
    return {name: source.digest for name, source in sorted(sources.items())}
