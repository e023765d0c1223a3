"""The configuration of a run: one YAML file, every key checked."""

from edge_opt.config.reading import read_config
from edge_opt.config.schema import RunConfig

__all__ = ["RunConfig", "read_config"]
