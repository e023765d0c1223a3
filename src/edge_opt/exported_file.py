"""A file of `torch.export.save`, looked into before it is opened: what in it could run code is refused.

torch's reader trusts its file. It unpickles what the file calls a weight, evaluates the text of symbolic sizes and
guards, takes any function that torch's modules lead to for an operator, and loads compiled libraries. Here the members
are read as bytes and JSON; pickles pass only through torch's restricted reader, which builds tensors and nothing else.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_opt.errors import InvalidInput, ModelNotFound, first_line

TRUST = "EDGE_OPT_TRUST"
# Members that torch reads as plain bytes, text or JSON.
_PLAIN = re.compile(
    r"(archive_format|archive_version|byteorder|version|\.data/.*|\.format_version|extra/.*|extra_files/.*"
    r"|models/[^/]+\.json|data/(weights|constants|sample_inputs)/[^/]*|serialized_\w+\.(json|pt))"
)
# Of names with two underscores, those of operators alone; and none that opens a file.
_OPERATOR = re.compile(
    r"torch\.ops\.(?!load_library|import_module|loaded_libraries|image\.|debugprims\.|aten\.(save|from_file)\b)"
    r"[a-zA-Z]\w*\.((?!__)\w+|__i?(and|or|xor|lshift|rshift)__)(\.(?!__)[a-zA-Z_]\w*)?"
)
_FUNCTION = re.compile(
    r"(_operator\.(getitem|add|iadd|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|le|lt|ge|gt|eq|ne|and_|or_|xor|not_"
    r"|lshift|rshift|inv|invert)"
    r"|math\.(ceil|floor|sqrt|trunc|pow|exp|log|log2|fabs|cos|sin|tan)"
    r"|torch\.(sym_\w+|_sym_\w+|_check\w*|_assert\w*|_C\._set_grad_enabled"
    r"|fx\.experimental\.symbolic_shapes\.cast_symbool_to_symint_guardless))"
)
# What sizes are written with.
_CALLS = re.compile(
    r"(Symbol|Integer|Float|Rational|Mod|PythonMod|ModularIndexing|FloorDiv|CleanDiv|CeilDiv|CeilToInt|FloorToInt"
    r"|TruncToInt|TruncToFloat|RoundToInt|RoundDecimal|ToFloat|IntTrueDiv|FloatTrueDiv|FloatPow|PowByNatural|Pow|Mul"
    r"|Add|Abs|Max|Min|Eq|Ne|Equality|Unequality|Ge|Gt|Le|Lt|GreaterThan|StrictGreaterThan|LessThan|StrictLessThan"
    r"|And|Or|Xor|Not|Where|Identity|Piecewise|ExprCondPair|ceiling|floor|sqrt|log|exp|IsNonOverlappingAndDenseIndicator"
    r"|OpaqueUnaryFn_\w+|BitwiseFn_\w+|math_\w+|int|float|bool|len|isinstance)"
)
_POWERS = re.compile(r"Pow|PowByNatural|FloatPow|math_pow|BitwiseFn_\w*shift\w*")
_MOST_EXPONENT = 64
_METHODS = frozenset({"size", "stride", "dim", "storage_offset", "shape", "dtype", "device", "is_integer"})
_NODES = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator,
    ast.unaryop, ast.boolop, ast.cmpop, ast.Subscript, ast.Tuple, ast.List, ast.keyword, ast.IfExp, ast.Call,
    ast.Attribute,
)  # fmt: skip
# What a mapping with a default may be filled with: torch imports the module that the file names.
_FACTORIES = {"builtins": ("list", "dict", "set", "int", "float", "str", "bool", "tuple"),
              "collections": ("OrderedDict", "defaultdict", "deque")}  # fmt: skip
# A file of weights does not shrink; one that claims to hold much more than it weighs is made to exhaust memory.
_LARGEST_RATIO = 200
_MOST_SHRUNK = 1 << 26
# A program has a member for each weight, and some forty values for each operator; torch reads 500 operators a second.
_MOST_MEMBERS = 20_000
_MOST_CONTENTS = 256 * _MOST_MEMBERS
_MOST_VALUES = 1_000_000


def check_exported(path: Path) -> None:
    """Refuse a file that could run code when it is loaded; names what in it could."""
    import torch

    try:
        members = dict(_members(path))
        _check_values(members)
    except _TooMuch as error:
        raise InvalidInput(
            f"{str(path)!r} was not opened: {error}; if you know where the file comes from, add --trust"
        ) from error
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ModelNotFound(
            f"{str(path)!r} cannot be read by torch {torch.__version__}: {first_line(error)}; export it again"
        ) from error
    pickled = {found for name, content in members.items() for found in _pickled_names(name, content)}
    for name, content in members.items():
        reason = _reason(name, content, _looked_up(name) in pickled)
        if reason is not None:
            raise InvalidInput(
                f"{str(path)!r} was not opened: {reason}, which could run any code here; if you know where the file "
                "comes from, add --trust"
            )


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Every member, as each of the two readers that torch has sees it: a crafted file may show them different ones."""
    import torch

    size = path.stat().st_size
    with _Contents(path) as file, zipfile.ZipFile(file) as archive:
        file.limit = size
        if len(archive.infolist()) > _MOST_MEMBERS:
            raise _TooMuch(f"it holds {len(archive.infolist()):,} members, and {_MOST_MEMBERS:,} are read at most")
        claimed = sum(info.file_size for info in archive.infolist())
        if claimed > min(_LARGEST_RATIO * size, size + _MOST_SHRUNK):
            raise ValueError(f"it claims to hold {claimed} bytes in a file of {size}")
        if len(set(map(_looked_up, archive.namelist()))) < len(archive.namelist()):
            raise ValueError("it holds two members of one name")
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
        first = {name: archive.read(name) for name in names}
    try:
        reader = torch._C.PyTorchFileReader(str(path))
    except RuntimeError:
        # The layout of older versions has no folder around it, and is read by the first reader alone.
        if "version" not in first:
            raise
        yield from first.items()
        return
    second = {name: bytes(reader.get_record(name)) for name in reader.get_all_records()}
    if {name.partition("/")[2]: content for name, content in first.items()} != second:
        raise ValueError("its table of contents is ambiguous")
    yield from second.items()


class _TooMuch(Exception):
    """More than a program of that size needs, and it would take long to read."""


class _Contents(io.BufferedReader):
    """A file whose table of contents is not read where it is too long: each entry becomes an object."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self.limit = _MOST_CONTENTS

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > self.limit:
            raise _TooMuch(f"its table of contents has {size:,} bytes, and {self.limit:,} are read at most")
        return super().read(size)


def _looked_up(name: str) -> str:
    """A name as torch's reader compares it: up to a zero byte, and capitals are small letters."""
    return name.partition("\0")[0].lower()


def _pickled_names(name: str, content: bytes) -> Iterator[str]:
    """The members that a table of weights or constants calls pickled: those torch unpickles."""
    if not name.endswith("_config.json"):
        return
    try:
        entries = _entries(json.loads(content))
    except (ValueError, RecursionError):
        return
    for _, value in entries:
        if isinstance(value, dict) and value.get("use_pickle"):
            yield _looked_up(f"{name.rpartition('/')[0]}/{value.get('path_name')}")


def _reason(name: str, content: bytes, is_pickled: bool) -> str | None:
    """Why a member may not be loaded; None where it may."""
    if not _PLAIN.fullmatch(name):
        return f"it holds {name!r}, a compiled library or something unknown"
    known = _looked_up(name)
    if re.search(r"(custom_obj|opaque_obj)", known):
        return f"it carries an object of a class of its own ({name!r})"
    # Example inputs are always unpickled, whatever their member is called.
    if content and (is_pickled or known.endswith(".pt") or known.startswith("data/sample_inputs/")):
        return _pickle_reason(name, content)
    return _json_reason(name, content) if known.endswith(".json") else None


def _pickle_reason(name: str, content: bytes) -> str | None:
    import torch

    try:
        # As torch opens it first: where that fails, torch goes on without a restriction.
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        return f"{name!r} is a pickle that builds more than tensors ({first_line(error)[:80]})"
    return None


def _check_values(members: dict[str, bytes]) -> None:
    """Refuse tables of too many values before they are parsed: behind each there is a comma or a bracket."""
    count = sum(content.count(sign) for name, content in members.items() if _looked_up(name).endswith(".json")
                for sign in (b",", b"[", b"{"))  # fmt: skip
    if count > _MOST_VALUES:
        raise _TooMuch(f"its tables hold {count:,} values, and {_MOST_VALUES:,} are read at most")


def _json_reason(name: str, content: bytes) -> str | None:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        return f"{name!r} is not JSON ({first_line(error)[:60]})"
    for key, value in _entries(data):
        if key == "target" and isinstance(value, str):
            if not _OPERATOR.fullmatch(value) and not _FUNCTION.fullmatch(value):
                return f"it calls {value[:60]!r}, which is no operator"
        elif key == "expr_str" and not is_plain_expression(value):
            return f"the size {str(value)[:60]!r} is no formula"
        elif key == "guards_code" and not all(map(is_plain_expression, value or ())):
            return "its guards are no formulas"
        elif key == "range_constraints" and not all(map(is_plain_expression, value or ())):
            return "its ranges are of no symbols"
        elif key in ("in_spec", "out_spec") and (module := _imported(value)) is not None:
            return f"the structure of its inputs or outputs imports {module[:60]!r}"
    return None


def _imported(structure: Any) -> str | None:
    """A module that the text of a structure makes torch import; None where it names types of torch's own table."""
    for text in (structure, *_texts_inside(structure)):
        for key, value in _entries(_parsed(text)):
            if key == "__enum__":
                return "the class of an enumeration"
            if isinstance(value, dict) and "default_factory_module" in value:
                module, name = str(value["default_factory_module"]), value.get("default_factory_name")
                if name not in _FACTORIES.get(module, ()):
                    return module
    return None


def _texts_inside(structure: Any) -> Iterator[str]:
    """Texts inside a text of JSON: contexts of types are JSON again."""
    for _, value in _entries(_parsed(structure)):
        if isinstance(value, str):
            yield value


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def _entries(data: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth."""
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
        if isinstance(value, (dict, list)):
            waiting.extend(value.values() if isinstance(value, dict) else value)


def is_plain_expression(text: Any) -> bool:
    """Whether a text is arithmetic on sizes and nothing else, and no number in it grows beyond bounds.

    >>> is_plain_expression("Max(2, s0) // 4"), is_plain_expression("__import__('os').system('ls')")
    (True, False)
    """
    if not isinstance(text, str) or len(text) > 100_000 or "__" in text:
        return False
    try:
        return all(_is_plain(node) for node in ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _operands_of_power(node: ast.AST) -> list[ast.expr]:
    """Base and exponent where a few digits may become a number that fills the memory; nothing elsewhere."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _POWERS.fullmatch(node.func.id):
        return [*node.args, *(keyword.value for keyword in node.keywords)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)):
        return [node.left, node.right]
    return []


def _is_bounded_power(operands: list[ast.expr]) -> bool:
    """Whether the exponent is a small number and no power stands inside: sizes are squared, and little more."""
    exponent = operands[-1].operand if isinstance(operands[-1], ast.UnaryOp) else operands[-1]
    value = exponent.value if isinstance(exponent, ast.Constant) else None
    if not isinstance(value, (int, float)) or value > _MOST_EXPONENT:
        return False
    return not any(_operands_of_power(node) for node in ast.walk(operands[0]))


def _is_plain(node: ast.AST) -> bool:
    operands = _operands_of_power(node)
    if operands and not _is_bounded_power(operands):
        return False
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS
    if isinstance(node, ast.Call):
        called = node.func
        return isinstance(called, ast.Attribute) or (
            isinstance(called, ast.Name) and _CALLS.fullmatch(called.id) is not None
        )
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, (bytes, complex))
    return isinstance(node, _NODES)
