"""Training from the weights of a model: all of them, LoRA alone, and in bfloat16."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.config import load_config, override
from heinsen_jax.errors import UserError
from heinsen_jax.interop.transformers import from_pretrained, import_model, to_pretrained
from heinsen_jax.models import LanguageModelConfig, Layers
from heinsen_jax.models.conversion import shared_weights, without_lora
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.load import load_run
from heinsen_jax.training import prepare_run, train
from heinsen_jax.training.optimizer import apply_updates
from tests.conftest import GOLDEN_FOLDER
from tests.models.small import apply, random_model

QWEN = GOLDEN_FOLDER / "transformers/qwen2"
TOKENS = np.arange(24).reshape(2, 12)


def parameters(model) -> dict[str, np.ndarray]:
    return flatten_with_names(jax.tree.map(np.asarray, nnx.state(model, nnx.Param)))


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """An imported model, and overrides for short runs on a text."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "text.txt").write_text("attention of constant cost\n" * 100)
    run = import_model(str(QWEN), folder / "qwen")
    sizes = {"data.corpus": folder / "text.txt", "data.cache": folder / "cache"}
    sizes |= {"data.sequence-length": 16, "data.batch-size": 2, "data.validation-fraction": 0.2}
    sizes |= {"training.steps": 2, "training.evaluation-batches": 2, "training.sample-tokens": 0}
    return run, [word for name, x in sizes.items() for word in (f"--{name}", str(x))]


def tuned(imported, workdir, *words: str):
    folder, sizes = imported
    config = override(load_config(folder / "config.json"), [*sizes, *words])
    train(prepare_run(config, workdir))
    return load_run(workdir, best=False)[0]


def test_an_imported_model_is_trained_from_its_weights(imported, tmp_path, capsys):
    folder, _ = imported
    assert load_config(folder / "config.json").training.start == str(folder)
    rate = "--optimizer.learning-rate=1e-6", "--optimizer.end-learning-rate=1e-7"
    ours = tuned(imported, tmp_path / "run", *rate, "--model.param-dtype=float32")
    assert f"initial weights: {folder}" in capsys.readouterr().out
    start = parameters(from_pretrained(QWEN)[0])
    for name, x in parameters(ours).items():
        assert x.dtype == np.float32
        assert 0 < np.abs(x - np.float32(start[name])).max() < 1e-5
    assert load_config(tmp_path / "run/config.json").training.start == str(folder)


def test_lora_alone_is_trained_and_written_back(imported, tmp_path):
    """Its matrices are in float32, and all others in the bfloat16 of the file."""
    rate = "--optimizer.learning-rate=0.1", "--optimizer.warmup-steps=0"
    ours = tuned(imported, tmp_path / "run", *rate, "--model.lora-rank=2")
    start, trained = parameters(from_pretrained(QWEN)[0]), parameters(ours)
    additions = trained.keys() - start.keys()
    layers = {name.removeprefix("blocks.0.").partition(".lora.")[0] for name in additions}
    mlp = {f"mlp.{name}" for name in ("gate", "up", "down")}
    assert layers == {"attention.project", "attention.output"} | mlp
    for name, x in trained.items():
        if name in start:
            np.testing.assert_array_equal(x, start[name])
            assert x.dtype == start[name].dtype
        else:
            assert x.dtype == np.float32
            assert np.abs(x).max() > 0
    same = without_lora(ours)
    assert parameters(same).keys() == start.keys()
    wanted = apply(ours, TOKENS)
    assert np.abs(wanted - apply(from_pretrained(QWEN)[0], TOKENS)).max() > 0.1
    np.testing.assert_allclose(apply(same, TOKENS), wanted, atol=1e-4)
    folder = to_pretrained(ours, tmp_path / "exported", like=QWEN, dtype="float32")
    np.testing.assert_allclose(apply(from_pretrained(folder)[0], TOKENS), wanted, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["gated_deltanet", "kda", "mamba2", pytest.param("mlstm", marks=pytest.mark.nightly)]
)
def test_lora_of_every_projection_adds_to_its_matrix(name):
    """Also with parameters in bfloat16."""
    sizes = {"vocab_size": 24, "model_dim": 12, "num_heads": 2, "num_layers": 2, "block": "llama"}
    pattern = Layers(name, options={"key_depth": 4}), "short_convolution"
    config = LanguageModelConfig(**sizes, attention=pattern, lora_rank=2, param_dtype="bfloat16")
    ours = random_model(config)
    layers = {x.partition(".lora.")[0] for x in parameters(ours) if ".lora." in x}
    every = {f"blocks.0.attention.{x}" for x in ("query", "key", "value", "output")}
    every |= {"blocks.0.attention.gate"} if name != "kda" else set()  # KDA's is of low rank
    gates = "input_gate", "output_gate", "value", "output"
    every |= {f"blocks.1.attention.{x}" for x in gates}
    assert layers == every | {f"blocks.{i}.mlp.{x}" for i in (0, 1) for x in ("gate", "up", "down")}
    same = without_lora(ours)
    assert same.config.param_dtype == "float32"
    np.testing.assert_allclose(apply(same, TOKENS), apply(ours, TOKENS), atol=2e-4)


def test_parameters_in_bfloat16_are_trained(imported, tmp_path, capsys):
    """The file's dtype, unless another is chosen."""
    rate = "--optimizer.learning-rate=1e-4", "--optimizer.warmup-steps=0"
    ours = tuned(imported, tmp_path / "run", *rate, "--training.accumulation-steps=2")
    assert "parameters in bfloat16, rounded stochastically" in capsys.readouterr().out
    start = parameters(from_pretrained(QWEN)[0])
    changed = [np.mean(x != start[name]) for name, x in parameters(ours).items()]
    assert {x.dtype for x in parameters(ours).values()} == {x.dtype for x in start.values()}
    assert max(changed) > 0


def test_updates_below_the_precision_of_bfloat16_are_kept_on_average():
    x = {"a": jnp.full(20000, 1, jnp.bfloat16), "b": jnp.ones(3)}
    small = {"a": jnp.full(20000, 1e-3), "b": jnp.full(3, 1e-3)}
    after = apply_updates(x, small, jax.random.key(0))
    assert after["a"].dtype == jnp.bfloat16
    values, counts = np.unique(np.float32(after["a"]), return_counts=True)
    np.testing.assert_array_equal(values, [1, 1 + 2**-7])
    np.testing.assert_allclose(counts[1] / 20000, 1e-3 * 2**7, atol=0.01)
    np.testing.assert_array_equal(after["b"], x["b"] + small["b"])
    none = apply_updates(x, jax.tree.map(jnp.zeros_like, small), jax.random.key(0))
    np.testing.assert_array_equal(none["a"], x["a"])
    for value in (np.nan, np.inf, -np.inf):
        infinite = jax.tree.map(lambda x: jnp.full_like(x, value), small)  # noqa: B023
        bad = apply_updates(x, infinite, jax.random.key(0))
        np.testing.assert_array_equal(np.float32(bad["a"]), np.full(20000, value))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.lora-rank=2", "--training.start=None"], "model.lora_rank=2 adds to given weigh"),
        (["--distillation.teacher=x"], r"training.start=.* with distillation.teacher: set train"),
        (
            ["--optimizer.ema-decay=0.9"],
            "optimizer.ema_decay=0.9 needs parameters in float32",
        ),
        (["--training.start=nowhere"], "training.start=nowhere: nowhere holds no run"),
        (
            ["--model.num-layers=4"],
            "model.num_layers=4 differs from 2 of the model with the weights",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(imported, tmp_path, monkeypatch, words, message):
    monkeypatch.setattr("heinsen_jax.training.settings.check_teacher", lambda *_: None)
    folder, sizes = imported
    config = override(load_config(folder / "config.json"), [*sizes, *words])
    with pytest.raises(UserError, match=message):
        prepare_run(config, tmp_path / "run")


def test_a_run_resumes_without_the_folder_of_its_initial_weights(imported, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(imported[0], moved)
    config = override(load_config(moved / "config.json"), [*imported[1], "--training.steps=1"])
    train(prepare_run(config, tmp_path / "run"))
    shutil.rmtree(moved)
    config = load_config(tmp_path / "run/config.json")
    more = replace(config, training=replace(config.training, steps=2))
    assert train(prepare_run(more, tmp_path / "run")).step == 2


def test_additions_of_another_rank_are_added_to_their_matrices(imported, tmp_path):
    rate = "--optimizer.learning-rate=0.1", "--optimizer.warmup-steps=0"
    low = tuned(imported, tmp_path / "low", *rate, "--model.lora-rank=2")
    still = "--optimizer.learning-rate=1e-12", "--optimizer.end-learning-rate=1e-13"
    start = f"--training.start={tmp_path / 'low'}", "--model.param-dtype=float32"
    more = tuned(imported, tmp_path / "more", *still, *start)
    np.testing.assert_allclose(apply(more, TOKENS), apply(low, TOKENS), atol=1e-4)


@pytest.mark.parametrize("where", ["model", "layers"])
def test_additions_are_not_lost_where_the_new_model_has_none(where):
    config = LanguageModelConfig(
        vocab_size=32, model_dim=8, num_layers=1, num_heads=2, attention="gqa"
    )
    layer = Layers("gqa", options={"lora_rank": 2})
    low = {"lora_rank": 2} if where == "model" else {"attention": layer}
    source, model = random_model(replace(config, **low)), random_model(config)
    given, state = shared_weights(config, source), nnx.state(model, nnx.Param)
    leaves = [given[name] for name in flatten_with_names(state)]
    nnx.update(model, jax.tree.unflatten(jax.tree.structure(state), leaves))
    np.testing.assert_allclose(apply(model, TOKENS), apply(source, TOKENS), atol=1e-5)


def test_lora_does_not_freeze_random_layers(imported, tmp_path):
    folder, sizes = imported
    words = "--model.attention", "gated_deltanet", "gqa", "--model.lora-rank=2"
    config = override(load_config(folder / "config.json"), [*sizes, *words])
    with pytest.raises(UserError, match=r"trains additions alone, but training\.start=.* lacks"):
        prepare_run(config, tmp_path / "run")


def test_frozen_parameters_are_not_rounded():
    """They do not even need random bits."""
    x = {"a": jnp.ones(8, jnp.bfloat16), "b": jnp.ones(3)}
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), x)
    masks = {"a": False, "b": True}
    program = jax.jit(lambda x: apply_updates(x, zeros, jax.random.key(0), masks)).lower(x)
    assert "threefry" not in program.as_text()


def test_lora_has_an_average_of_the_weights(imported, tmp_path):
    """The frozen weights in bfloat16 stay in this dtype, and as they are."""
    words = "--model.lora-rank=2", "--optimizer.ema-decay=0.9", "--training.steps=3"
    ours, start = parameters(tuned(imported, tmp_path / "run", *words)), from_pretrained(QWEN)[0]
    for name, x in parameters(start).items():
        np.testing.assert_array_equal(ours[name], x)
