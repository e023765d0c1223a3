"""`edge-opt mcp` over stdio, with the client of the `mcp` package itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from edge_opt.cli.mcp_command import checked
from edge_opt.errors import InvalidInput


def test_tools_answer_over_stdio_and_stay_in_the_root(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(8, 4, bias=False)\n")
    command = ["-m", "edge_opt", "mcp", "--root", str(tmp_path)]
    started = StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))

    async def talk() -> tuple[Any, ...]:
        async with Client(started) as client:
            tools = (await client.list_tools()).tools
            arguments = {"model": "net.py:net", "inputs": ["1x8"]}
            profiled = await client.call_tool("profile", arguments)
            refused = await client.call_tool("profile", {"model": "../other.py:net", "inputs": "1x8"})
            return tools, profiled, refused

    tools, profiled, refused = anyio.run(talk)
    assert {tool.name for tool in tools} == {"profile", "check", "compare", "targets", "llm", "explain"}
    assert all(tool.annotations.read_only_hint and tool.input_schema["properties"] for tool in tools)
    assert not profiled.is_error and profiled.structured_content["totals"]["macs"] == 8 * 4
    assert refused.is_error and "'../other.py:net' is outside of" in refused.content[0].text


@pytest.mark.parametrize(
    "text", ["/etc/passwd", "../x.py:net", "--output=x", "~/x.onnx", "sub/../../x.json", "link.py:net", "/r#best"]
)
def test_paths_outside_of_the_root_are_refused(text: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.touch()
    root = tmp_path / "root"
    root.mkdir()
    (root / "link.py").symlink_to(outside)
    with pytest.raises(InvalidInput):
        checked(text, root)


@pytest.mark.parametrize("text", ["net.py:Net(width=2)", "torchvision:resnet18", "hf:Qwen/Qwen3-4B", "1x3x8x8"])
def test_references_and_shapes_are_values(text: str, tmp_path: Path) -> None:
    assert checked(text, tmp_path) == text
