"""The import law of docs/architecture.md, read from the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
ORDER = [
    "errors", "files", "text", "units", "records", "compare", "budget", "trace", "cost", "measure", "devices",
    "profiling", "fitting", "loading", "data", "compress", "search", "report", "comparing", "checking", "pytest_plugin",
    "config", "pipeline", "cli",
]  # fmt: skip
OLDER_APIS = ["model", "hardware", "metrics", "stream", "pruning"]
PUBLIC = {"errors", "files", "text", "records", *OLDER_APIS}
# Lazy view methods: people expect p.save() and p.to_dataframe() on the record itself.
# `edge_opt.compare` is a package and a function: calling the one is calling the other.
EXCEPTIONS = {("records", "report"), ("compare", "comparing")}
# A page shows rooflines; this one module asks the catalogue for them.
EXCEPTIONS_BY_MODULE = {("report/roofs.py", "devices")}


def modules(package: str) -> list[Path]:
    return sorted((SOURCE / package).rglob("*.py"))


def room_of(path: Path) -> str:
    relative = path.relative_to(SOURCE / "edge_opt")
    return relative.parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of edge_opt that a module imports at any depth; "" is the front door."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "edge_opt":
                names = [
                    f"edge_opt.{alias.name}" if alias.name in ORDER else "edge_opt"
                    for alias in node.names
                    if alias.name != "__version__"
                ]
            assert node.level == 0, f"{path}: relative import"
        for name in names:
            if name == "edge_opt" or name.startswith("edge_opt."):
                rooms.add(name.partition(".")[2].partition(".")[0])
    return rooms


@pytest.mark.parametrize("path", modules("edge_opt"), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    imported = imported_rooms(path) - {room}
    if room in OLDER_APIS:
        assert imported <= PUBLIC | {""}
        return
    pure = {"errors", "files", "text", "units", "records", "compare", "budget"}
    allowed = pure if room == "report" else set(ORDER[: ORDER.index(room)])
    allowed |= {right for left, right in EXCEPTIONS if left == room}
    allowed |= {right for module, right in EXCEPTIONS_BY_MODULE if path == SOURCE / "edge_opt" / module}
    assert imported <= (allowed | {"", *OLDER_APIS} if room in ("cli", "pipeline") else allowed)


@pytest.mark.parametrize("path", modules("rasp"), ids=lambda path: str(path.relative_to(SOURCE)))
def test_rasp_imports_public_names_only(path: Path) -> None:
    assert imported_rooms(path) <= {"", "errors", "files", "text", "records"}


@pytest.mark.parametrize(
    "path", [*modules("edge_opt"), *modules("rasp")], ids=lambda path: str(path.relative_to(SOURCE))
)
def test_modules_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 330


@pytest.mark.parametrize(
    "module",
    [
        "edge_opt", "edge_opt.records", "edge_opt.report.tables", "edge_opt.report.writers", "edge_opt.report.terminal",
        "edge_opt.report.page", "edge_opt.report.plots", "edge_opt.report.sweeps",
        "edge_opt.devices.spec", "edge_opt.devices.catalog", "edge_opt.devices.roofline", "edge_opt.stream",
        "edge_opt.cli", "edge_opt.budget", "edge_opt.compare", "edge_opt.comparing",
    ],
)  # fmt: skip
def test_these_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Folders that the map describes as a whole: one file per record, command, tool or meter.
AS_A_WHOLE = {"records", "cli", "conventions", "energy", "metrics", "page"}


@pytest.mark.parametrize("path", modules("edge_opt"), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_map_names_every_module(path: Path) -> None:
    page = (SOURCE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    folder = path.parent.name
    if path.name in ("__init__.py", "__main__.py") or folder in AS_A_WHOLE:
        assert folder == "edge_opt" or f"{folder}/ " in page
    else:
        assert re.search(rf"(?<![\w.]){re.escape(path.name)}", page)


def test_the_map_names_nothing_else() -> None:
    page = (SOURCE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = page[page.index("    src/edge_opt/") : page.index("**Import law.**")]
    named = set(re.findall(r"(?<![\w.:`])(\w+\.py)\b", tree)) - {"file.py"}
    assert named <= {path.name for package in ("edge_opt", "rasp") for path in modules(package)}
