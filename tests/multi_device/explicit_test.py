"""Ops, layers, models and training on the user's mesh: explicit axes, as JAX makes them by default,
and other kinds."""

from collections.abc import Iterable
from typing import Any

import pytest

from heinsen_jax.attention import names
from heinsen_jax.config.load import load_config
from tests.multi_device.apart import run_apart
from tests.multi_device.processes_test import CONFIG
from tests.ops.catalogue import OPS

TOLERANCE = 2e-5
SENSITIVE = {"mlstm": 1e-3, "rwkv7": 1e-4}
"""Tolerances where results under `jit` and without it differ by as much on one device."""
SHORT_OPS = "linear", "softmax, tiled", "mla, expanded"
LONG_OPS = [name for name in OPS if name not in SHORT_OPS and "bidirectional" not in name]
LAYOUTS = "rows,heads,both,fsdp"
SHORT_LAYERS = "gated_deltanet", "softmax"
SPLIT = {"rows": "P(('data', 'model'), None", "heads": "P(None, None", "both": "P('data', None"}
EXCHANGE = {
    "additive": "an average of all heads",
    "gqa": "the heads of one key/value head",
    "log": "both parts of its gated output",
    "goom_ssm": "both parts of its gated output",
    "mla": "its latent vectors",
}
"""Layers that exchange activations if heads are split, and which."""


def by_duration(short: Iterable[str], long: Iterable[str]) -> Any:
    """Run a test for some names in the short suite, together, and for the others nightly."""
    fast = [pytest.param([*short], id="short")] if short else []
    slow = [pytest.param([name], marks=pytest.mark.nightly, id=name) for name in long]
    return pytest.mark.parametrize("tested", [*fast, *slow])


def check_ops(kind: str, tested: list[str]) -> dict[str, Any]:
    results = run_apart("explicit_run.py", kind, *tested)
    for name, layouts in results.items():
        for layout, result in layouts.items():
            assert result["error"] < TOLERANCE, (kind, name, layout)
    return results


@by_duration(SHORT_OPS, LONG_OPS)
def test_ops_on_explicit_axes_never_gather_and_split_outputs_like_queries(tested):
    for name, layouts in check_ops("explicit", tested).items():
        for layout, result in layouts.items():
            assert not result["collectives"], (name, layout)
            for sharding in result["shardings"]:
                assert sharding.startswith(SPLIT[layout]), (name, layout)
                has_heads = layout != "rows" and sharding.count(",") == 3
                assert not has_heads or "'model'" in sharding, (name, layout)


@by_duration((), OPS)
def test_ops_on_auto_axes_that_are_named_never_gather(tested):
    for name, layouts in check_ops("auto", tested).items():
        assert not any(result["collectives"] for result in layouts.values()), name


@by_duration((), OPS)
def test_ops_on_mixed_axes(tested):
    for name, layouts in check_ops("mixed", tested).items():
        assert set(layouts["rows"]["collectives"]) <= {"all-reduce"}, name  # of a choice of tiers


@by_duration(("gated, by head",), OPS)
def test_ops_inside_the_users_shard_map(tested):
    check_ops("manual", tested)


def check_modules(kind: str, tested: list[str], layouts: str = LAYOUTS) -> dict[str, Any]:
    results = run_apart("explicit_layers_run.py", kind, layouts, *tested)
    for name, layouts in results.items():
        for layout, result in layouts.items():
            values = ("error", "eager", "streamed", "state")
            errors = {x: result[x] for x in values if x in result}
            tolerance = SENSITIVE.get(name, TOLERANCE)
            assert max(errors.values()) < tolerance, (name, layout, errors)
            assert result["as_parameters"], (name, layout, "gradients")
            rows = "P(None" if layout == "heads" else "P('data'"
            assert result["sharding"].startswith(rows), (name, layout)
            if layout != "heads" and "states" in result:
                assert all(x == "P()" or x.startswith(rows) for x in result["states"]), name
    return results


def check_layers(tested: list[str], layouts: str) -> None:
    for name, results in check_modules("layer", tested, layouts).items():
        assert not results["rows"]["collectives"], name
        for layout in {"heads", "both"} & set(results) if name not in EXCHANGE else ():
            assert set(results[layout]["collectives"]) <= {"all-reduce"}, (name, layout)


def test_layers_on_explicit_axes():
    check_layers([*SHORT_LAYERS], "rows,both")


def test_split_sequences_exchange_states():
    result = check_modules("layer", ["linear"], "tokens")["linear"]["tokens"]
    assert result["sharding"] == "P('data', 'sequence', None)"
    assert result["collectives"] == {"all-gather": 1}, "of states"


@pytest.mark.nightly
@pytest.mark.parametrize("name", names())
def test_each_layer_on_explicit_axes(name):
    check_layers([name], LAYOUTS)


def check_model(name: str, layouts: str) -> None:
    results = check_modules("model", [name], layouts)[name]
    assert not results["rows"]["collectives"]
    assert results["both"]["sharding"] == "P('data', None, 'model')", "logits, by the vocabulary"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["linear", "log", "softmax", "gated_deltanet", "log_window"])
def test_language_models_on_explicit_axes(name):
    check_model(name, LAYOUTS)


def test_training_runs_on_the_users_mesh(tmp_path):
    (tmp_path / "words.txt").write_text("attention at constant cost per token " * 500)
    (tmp_path / "tiny.py").write_text(CONFIG.replace("words.txt", str(tmp_path / "words.txt")))
    result = run_apart("explicit_layers_run.py", "trainer", str(tmp_path))
    assert result["explicit"] == pytest.approx(result["none"], rel=1e-5)
    assert result["auto"] == pytest.approx(result["none"], rel=1e-5)
    assert result["set"] == {"data": 2, "fsdp": 1, "tensor": 2, "context": 1}
    assert load_config(tmp_path / "explicit" / "config.json").mesh.tensor == 2
