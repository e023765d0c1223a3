"""The configuration of a run: one YAML file, every key checked."""

from edge_opt.errors import MissingExtra

try:
    from edge_opt.config.reading import read_config
    from edge_opt.config.schema import RunConfig
except ModuleNotFoundError as error:
    if error.name not in ("pydantic", "yaml"):
        raise
    raise MissingExtra(f"this needs {error.name}, which is not installed; run `pip install 'edge-opt[run]'`") from error

__all__ = ["RunConfig", "read_config"]
