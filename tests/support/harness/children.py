"""What a test's child process needs to import what the test imports."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
