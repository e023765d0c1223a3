"""Write what the commands and examples of README and docs print under them; the tests hold that it is up to date."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# As wide as the text column of the site, so that nobody has to scroll.
WIDTH = 80
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LENIENT = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
_COMMAND = re.compile(r"^\$ (?P<command>(?:.*\\\n)*.*)\n(?P<shown>(?:(?!\$ ).*\n)*)", re.MULTILINE)
_MORE = "…"
_FOR_A_SHELL = re.compile(r"[|;&<>$]")


def commands(session: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block with what is shown under it; a `\\` at the end of a line goes on in the next.

    >>> list(commands("$ edge-opt a \\\\\\n    -b\\nout\\n$ edge-opt c\\n"))
    [('edge-opt a -b', 'out\\n'), ('edge-opt c', '')]
    """
    for found in _COMMAND.finditer(session):
        yield re.sub(r"\s*\\\n\s*", " ", found["command"]), found["shown"]


def printed(command: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of a command in the project's folder, `out/` being another.

    A plain `edge-opt` runs in this process, which has torch already: a fifth of a second instead of three or more.
    """
    there = command.replace(" out/", f" {folder}/")
    if there.startswith("edge-opt ") and not _FOR_A_SHELL.search(there):
        code, text = _here(shlex.split(there)[1:])
    else:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "COLUMNS": str(WIDTH)}
        done = subprocess.run(there, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        code, text = done.returncode, done.stdout
    lines = (line.rstrip() for line in text.replace(f"{folder}/", "out/").splitlines())
    return code, "".join(f"{line}\n" for line in lines)


def shown_part(text: str, shown: str) -> str:
    """What a page shows of an output: all of it, or where `…` ends the sample, as many lines as stand above that.

    >>> shown_part("a\\nb\\nc\\n", "x\\ny\\n…\\n")
    'a\\nb\\n…\\n'
    """
    if not shown.endswith(f"{_MORE}\n"):
        return text
    lines = text.splitlines(keepends=True)
    return "".join([*lines[: shown.count("\n") - 1], f"{_MORE}\n"])


def _here(arguments: list[str]) -> tuple[int, str]:
    from typer.testing import CliRunner

    from edge_opt.cli import app

    before = Path.cwd()
    os.chdir(ROOT)
    try:
        done = CliRunner(env={"COLUMNS": str(WIDTH)}).invoke(app, arguments, prog_name="edge-opt")
    finally:
        os.chdir(before)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def example(body: str, names: dict[str, object], place: str) -> doctest.DocTest:
    """A block of `>>>` as a doctest. Outputs hold empty lines as they are printed; doctest would end there."""
    marked = re.sub(r"\n\n(?!\s*(?:>>>|\Z))", "\n<BLANKLINE>\n", body)
    return doctest.DocTestParser().get_doctest(marked, names, place, place, 0)


class _Rewriter(doctest.DocTestRunner):
    """Keeps what examples printed instead of what they show."""

    def __init__(self) -> None:
        super().__init__(optionflags=LENIENT)
        self.got: dict[int, str] = {}

    def report_failure(self, out: object, test: doctest.DocTest, example: doctest.Example, got: str) -> None:
        self.got[example.lineno] = got


def rewritten(text: str, folder: Path) -> str:
    """The page with the output of every command, and of every example whose own output is another."""
    names: dict[str, object] = {"__name__": "page"}

    def block(found: re.Match[str]) -> str:
        language, body = found["language"], found["body"]
        if language == "console":
            return f"```console\n{_COMMAND.sub(lambda item: _answered(item, folder), body)}```"
        if language != "python":
            return found[0]
        if ">>>" not in body:
            exec(compile(body, "page", "exec"), names)
            return found[0]
        return f"```python\n{_reexampled(body, names)}```"

    return BLOCK.sub(block, text)


def _answered(found: re.Match[str], folder: Path) -> str:
    [(command, shown)] = commands(found[0])
    code, text = printed(command, folder)
    if code:
        raise SystemExit(f"{command}: exit code {code}")
    return f"$ {found['command']}\n" + (shown_part(text, shown) if shown.strip() else "")


def _reexampled(body: str, names: dict[str, object]) -> str:
    test, runner = example(body, names, "page"), _Rewriter()
    runner.run(test, clear_globs=False)
    names.update(test.globs)
    lines = body.splitlines(keepends=True)
    for item in reversed(test.examples):
        if item.lineno in runner.got:
            start = item.lineno + item.source.count("\n")
            lines[start : start + item.want.count("\n")] = [runner.got[item.lineno]]
    return "".join(lines)


def _repair_torchvision() -> None:
    """Name torchvision's operators where its compiled ones do not fit this torch: transformers imports it, too."""
    try:
        import torchvision
    except ImportError:
        return
    except RuntimeError:
        from fit_platforms import declare_operators

        declare_operators()
    else:
        _ = torchvision


def main() -> None:
    """Rewrite the pages named, or all."""
    os.environ["COLUMNS"] = str(WIDTH)
    sys.path[:0] = [str(ROOT / "examples")]
    _repair_torchvision()
    pages = [Path(name).resolve() for name in sys.argv[1:]] or PAGES
    for page in pages:
        before = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            start = Path.cwd()
            os.chdir(folder)
            after = rewritten(before, Path(folder))
            os.chdir(start)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
