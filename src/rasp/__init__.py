"""Runtime Analyzer and Statistical Profiler: one call, one table of what each module costs."""

from rasp.config import CFG, get_config, set_config
from rasp.stat import stat
from rasp.table import load_report, round_value, save_report

__all__ = ["CFG", "get_config", "load_report", "round_value", "save_report", "set_config", "stat"]
