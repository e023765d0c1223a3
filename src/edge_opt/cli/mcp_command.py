"""edge-opt mcp: the commands that only read, as tools for coding agents, over stdin and stdout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from edge_opt._support.extras import import_optional
from edge_opt.cli.arguments import option
from edge_opt.errors import EdgeOptError, InvalidInput

_TIME_LIMIT_S = 600
_VARIANT = re.compile(r"@(fp32|fp16|bf16|int8|int4)(:[\w-]+)?$")
# Of a profile, an agent needs the totals: the trace of a large model fills its context.
_PROFILE_KEYS = ("name", "totals", "peak", "unpriced", "coverage", "prediction")


def mcp(root: Path = option(Path(), "DIR", "Folder that files must be in. Default: this folder.")) -> None:
    """Serve profile, check, compare, targets, llm and explain as tools of the Model Context Protocol, over stdio.

    The tools write no files. Models in the folder are imported, so their code runs: serve only folders that you trust.

    \b
    edge-opt mcp --root ~/nets
    """
    folder = root.resolve()
    if not folder.is_dir():
        raise InvalidInput(f"--root {root} is not a folder")
    server(folder).run("stdio")


def checked(text: str, root: Path) -> str:
    """Return an argument; a path outside of the root is refused, and so is an option in the place of a value."""
    if text.startswith("-"):
        raise InvalidInput(f"{text!r} is not a value")
    path = _VARIANT.sub("", text).partition("#")[0]
    source, colon, _ = path.partition(":")
    # A drive letter is not a source.
    name = path if colon and len(source) == 1 else source
    is_path = any(mark in name for mark in ("/", "\\", "~", "..")) or (root / name).exists()
    is_remote = source in ("hf", "timm", "torchvision") and colon
    if is_path and not is_remote and not (root / Path(name).expanduser()).resolve().is_relative_to(root):
        raise InvalidInput(f"{text!r} is outside of {root}; start `edge-opt mcp --root` with a folder that has it")
    return text


def command_json(root: Path, command: str, values: Sequence[str], **options: Any) -> dict[str, Any]:
    """Run a command in a process of its own in the root, and return its JSON; its error is raised as one sentence."""
    words = [sys.executable, "-m", "edge_opt", command, "--json"]
    for name, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                words.append(f"--{name}={checked(str(item), root)}")
    words += ["--", *(checked(value, root) for value in values)]
    done = subprocess.run(
        words, cwd=root, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False, stdin=subprocess.DEVNULL
    )
    try:
        result: dict[str, Any] = json.loads(done.stdout)  # exit code 1, a broken budget, has a result as well
    except ValueError:
        raise InvalidInput(done.stderr.strip()[-1500:] or f"{command} ended with {done.returncode}") from None
    return result


def server(root: Path) -> Any:
    """Return the server with its tools; paths are limited to the root."""
    package = import_optional("mcp.server.mcpserver", "edge-opt mcp needs", "mcp")
    hints = import_optional("mcp_types", "edge-opt mcp needs", "mcp").ToolAnnotations(read_only_hint=True)
    app = package.MCPServer("edge-opt", instructions="What PyTorch models cost on limited hardware; docs/agents.md.")

    def profile(
        model: str, inputs: list[str] | str, target: str | None = None, precision: str | None = None
    ) -> dict[str, Any]:
        """Return MACs, parameters, memory and, with a target, the predicted time of a model.

        model: torchvision:NAME, timm:NAME, net.py:Net or a file; inputs: shapes such as 1x3x224x224.
        """
        chosen = {"target": target, "precision": precision if target else None}
        document = command_json(root, "profile", [model], inputs=inputs, **chosen)
        return {key: document.get(key) for key in _PROFILE_KEYS}

    def check(model: str, budgets: list[str], inputs: list[str] | str, target: str | None = None) -> dict[str, Any]:
        """Return whether a model keeps budgets such as 'macs <= 600M', 'peak_memory_mb <= 64', 'predicted_ms <= 50'."""
        return command_json(root, "check", [model], inputs=inputs, budget=budgets, target=target)

    def compare(models: list[str], inputs: list[str] | str) -> dict[str, Any]:
        """Return what differs between models, layer by layer; the first is the baseline."""
        return command_json(root, "compare", models, inputs=inputs)

    def targets(model: str, inputs: list[str] | str, names: list[str]) -> dict[str, Any]:
        """Return whether a model fits at least two devices, such as raspberry-pi-4, and its predicted times there."""
        return command_json(root, "profile", [model], inputs=inputs, target=names)

    def llm(model: str, target: str, weights: str = "q4_k_m", context: int | None = None) -> dict[str, Any]:
        """Return memory and tokens per second of a language model (hf:ORG/NAME or a .gguf file) on a device."""
        chosen = {"target": target, "weights": weights, "context": context}
        return command_json(root, "llm", [model], **chosen)

    def explain(before: str, after: str, inputs: list[str] | str, target: str | None = None) -> dict[str, Any]:
        """Return why the second of two models or files is faster or is not; net.py:Net@int8 converts.

        Both run here; with a target nothing runs, and times there are predicted.
        """
        return command_json(root, "explain", [before, after], inputs=inputs, target=target)

    errors = import_optional("mcp.server.mcpserver.exceptions", "edge-opt mcp needs", "mcp")

    def answering(tool: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Return the tool with our errors as answers: of any other exception the agent sees no text."""

        @wraps(tool)
        def answer(*args: Any, **kwargs: Any) -> dict[str, Any]:
            try:
                return tool(*args, **kwargs)
            except EdgeOptError as error:
                raise errors.ToolError(str(error)) from error

        return answer

    for tool in (profile, check, compare, targets, llm, explain):
        app.tool(annotations=hints)(answering(tool))
    return app
