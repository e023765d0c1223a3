"""The operator profile of a feature stream under its published name."""

from edge_opt.stream import build_hardware_profile_table, write_hardware_profile_artifacts

__all__ = ["build_hardware_profile_table", "write_hardware_profile_artifacts"]
