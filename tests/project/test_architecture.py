"""The rules of docs/architecture.md, checked in the source."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import edge_opt

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MODULES = sorted(SOURCE.rglob("*.py"))
ORDER = (
    "errors text units records _support trace cost model_files loading measuring calibration boards profiling "
    "training_steps serving model_comparison budgets data quantization tasks pruning runtimes explanation compress "
    "search report run trainer_callbacks pytest_plugin cli __main__"
).split()
OLDER_APIS = {"model", "hardware", "metrics", "stream", "evaluation", "utils"}
BASE = {"errors", "text", "units", "records", "_support"}
# Against the order, on purpose and inside functions: people expect p.save() and p.device_memory() on the record itself,
# `profile` reads saved profiles, `calibrate` also calibrates runtimes, a model of the Hub is built as language models
# are, and a page asks the catalogue for
# rooflines and budgets for the names of metrics.
EXCEPTIONS = {
    ("records", "report"), ("records", "_support"), ("records", "boards"), ("profiling", "report"),
    ("loading", "serving"), ("calibration", "runtimes"),
}  # fmt: skip
# The older API writes pictures of its tables.
FILE_EXCEPTIONS = {"edge_opt/hardware.py": {"report"}}
REPORT_ASKS = {"boards", "budgets"}
# The same thing in two packages: both APIs have a table, a configuration, energies and metrics.
NATURAL_PARALLELS = {
    "__init__.py",
    "__main__.py",
    "hardware.py",
    "config.py",
    "energy.py",
    "metrics.py",
    "table.py",
}

# Class names that are used more than once. To be emptied: one concept has one name, and a name has one meaning.
DUPLICATE_CLASSES: set[str] = set()


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def package_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if parts[0] == "rasp" else parts[1].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Modules of ours that a module imports at any depth, by their dotted names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: relative import"
            is_public_api = node.module == "edge_opt"
            names = [f"edge_opt.{alias.name}" for alias in node.names] if is_public_api else [node.module or ""]
        yield from (name for name in names if name.partition(".")[0] == "edge_opt")


def test_imports_go_one_way() -> None:
    faults = []
    for path in MODULES:
        package = package_of(path)
        for name in imports(path):
            other = name.split(".")[1] if "." in name else ""
            is_public_api = other not in {*ORDER, *OLDER_APIS} and package in {"rasp", "cli", "run", *OLDER_APIS}
            if is_public_api or name == "edge_opt.__version__" or package in ("__init__", other):
                continue
            if package == "rasp" or package in OLDER_APIS:
                allowed = BASE | {"cost"} if package == "rasp" else {*ORDER[: ORDER.index("search")], *OLDER_APIS}
            elif package == "report":
                allowed = BASE | REPORT_ASKS
            else:
                allowed = set(ORDER[: ORDER.index(package)]) | {right for left, right in EXCEPTIONS if left == package}
                allowed |= OLDER_APIS if package in ("run", "cli") else set()
            allowed |= FILE_EXCEPTIONS.get(relative(path), set())
            if other not in allowed:
                faults.append(f"{relative(path)} imports {name}")
    assert not faults


def test_file_names_tell_their_content_without_their_folder() -> None:
    counts = Counter(path.name for path in MODULES)
    assert {name for name, count in counts.items() if count > 1} <= NATURAL_PARALLELS
    below = {path.stem for path in (SOURCE / "edge_opt").iterdir() if path.suffix == ".py" or path.is_dir()}
    # `eo.run(config)` calls the package `run`; see there.
    assert not below & {name for name in edge_opt.__all__ if callable(getattr(edge_opt, name))} - {"run"}


def test_class_names_are_unique() -> None:
    counts = Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    duplicates = {name for name, count in counts.items() if count > 1}
    assert not duplicates - DUPLICATE_CLASSES, "give the class a name that no other class has"
    assert not DUPLICATE_CLASSES - duplicates, "remove the name from DUPLICATE_CLASSES: it is unique now"


def test_files_and_functions_stay_small() -> None:
    long = {relative(path): n for path in MODULES if (n := len(path.read_text("utf-8").splitlines())) > 620}
    assert not long, "a file is a topic of up to 600 lines"
    functions = {
        f"{relative(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno
    }
    assert not {name for name, lines in functions.items() if lines > 80}


def test_nobody_imports_a_test_module() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    faults = [
        path.name for path in tests if re.search(r"^\s*(from|import) test_", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert not faults


def test_the_public_api_names_the_same_for_people_and_for_type_checkers() -> None:
    tree = ast.parse(Path(edge_opt.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    imported = [alias for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(alias.asname or "" for alias in imported) == edge_opt.__all__
    assert all(hasattr(edge_opt, name) for name in edge_opt.__all__)


def test_a_name_of_the_public_api_is_the_function_whatever_was_imported() -> None:
    script = """
import inspect
import edge_opt.measuring.latency, edge_opt.model_comparison, edge_opt.boards.catalog, edge_opt.run.pipeline
import edge_opt as eo
for name in ("measure", "compare", "devices", "platforms", "sweep", "check", "profile"):
    assert inspect.isfunction(getattr(eo, name)), name
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert "inputs" in inspect.signature(edge_opt.compare).parameters


def test_these_do_not_import_torch() -> None:
    modules = (
        "edge_opt records report.table report.save report.sheets report.page report.png report.sweep_files "
        "boards.catalog boards.roofline boards.capacity stream cli budgets model_comparison"
    ).split()
    names = ", ".join("edge_opt" if name == "edge_opt" else f"edge_opt.{name}" for name in modules)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_named_in_the_architecture_page_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:edge_opt|rasp)/[\w/]+\.py)`", page))
    assert named and named <= {relative(path) for path in MODULES}
