"""Runtime Analyzer and Statistical Profiler: one call, one table of what each module costs."""

from rasp.config import CFG
from rasp.stat import stat

__all__ = ["CFG", "stat"]
