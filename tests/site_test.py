"""The documentation site builds without warnings, and contains the public functions."""

import os
import subprocess
import sys
from pathlib import Path

from heinsen_jax.attention import mechanism, names

ROOT = Path(__file__).resolve().parents[1]


def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (
        'id="heinsen_jax.ops.log_attention.log_attention"'
        in (tmp_path / "site/reference/ops/index.html").read_text()
    )
    mechanisms = (tmp_path / "site/reference/mechanisms/index.html").read_text()
    for name in names():
        assert f'<h2 id="{name}">' in mechanisms
        kind = mechanism(name)
        assert f'id="{kind.__module__}.{kind.__name__}"' in mechanisms
    assert "<code>negative_eigenvalues</code>" in mechanisms
    assert (tmp_path / "site/benchmarks/results/front_page.png").exists()
