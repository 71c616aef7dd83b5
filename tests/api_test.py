"""The reference of public functions is made without warnings, on new machines, too."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_reference_is_made_where_no_fonts_are_cached(tmp_path):
    """Without its cache matplotlib starts a process when it is imported, which pdoc forbids."""
    environment = os.environ | {"MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    command = [sys.executable, str(ROOT / "docs/api.py"), str(tmp_path / "api")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "api/heinsen_jax/ops.html").exists()
