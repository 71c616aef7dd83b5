"""Missing extras are named: in one line by programs, otherwise in an ImportError."""

import re
import runpy
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "extra", "needs"),
    [
        ("heinsen_jax.interop.hub", "hub", "huggingface_hub"),
        ("heinsen_jax.interop.harness", "harness", "lm_eval.__main__"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # warning of runpy if it was imported before
def test_a_missing_extra_is_named(module, extra, needs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, needs, None)
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_module(module, run_name="__main__")
    assert re.fullmatch(rf"error: .*{needs}.*heinsen_jax\[{extra}\].*\n", capsys.readouterr().err)
    with pytest.raises(ImportError, match=rf"{needs}.*heinsen_jax\[{extra}\]"):
        runpy.run_module(module, run_name="imported")
