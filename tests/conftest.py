"""Shared by all tests."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# A calibration or a device file of whoever runs the tests must not change what they see.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="edge-opt-tests-")
