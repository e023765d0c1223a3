"""The commented configuration file that `edge-opt init` writes."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel

from edge_opt.config.schema import RunConfig

_HEAD = """\
# From data to the model to ship: `edge-opt run THIS_FILE`. Every key is here with its default.
# One key for one run: `edge-opt run THIS_FILE --set epochs=3 --set model.conv1_channels=8`.
"""


def template() -> str:
    """Every key with its default, under a heading, with what it is for.

    >>> print(template().splitlines()[4])
    # Decides the parts of the data, first weights and fine-tuning.
    """
    lines = [_HEAD]
    for name, field in RunConfig.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and "group" in extra:
            lines.append(f"\n## {extra['group']}\n")
        lines.append(f"# {field.description}\n{name}: {_shown(field.default)}\n")
    return "".join(lines)


def _shown(default: Any) -> str:
    plain = default.model_dump() if isinstance(default, BaseModel) else default
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")
