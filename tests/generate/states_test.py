"""States as values: continued many times, and saved to files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.errors import UserError
from heinsen_jax.generate import generate, load_state, repeat_state, save_state, states
from heinsen_jax.generate.states import fingerprint
from heinsen_jax.models import LanguageModelConfig, Layers
from tests.models.mechanisms_test import CAUSAL, build, few_or_nightly
from tests.models.small import apply, random_model

SIZES = {"num_layers": 1, "block": "standard", "convolution_size": 2}
PROMPT = jnp.array([3, 1, 4, 1, 5, 9, 2])


@few_or_nightly(["log", "softmax", "sliding_window", "rmt", "additive"], few=["log"])
def test_a_prompt_is_processed_once_and_continued_often(name):
    batch = () if name == "log" else (2,)
    model = build(name, **SIZES)
    prompt = jnp.broadcast_to(PROMPT, (*batch, 7))
    _, state = apply(model, prompt[..., :-1], return_state=True)
    last = jnp.broadcast_to(prompt[..., -1:, None], (*batch, 4, 1)).astype(int)
    many = generate(model, last, 6, key=jax.random.key(0), state=repeat_state(model, state, 4))
    whole = jnp.broadcast_to(prompt[..., None, :], (*batch, 4, 7))
    np.testing.assert_array_equal(generate(model, whole, 6, key=jax.random.key(0)), many)
    assert len({tuple(row) for row in np.asarray(many).reshape(-1, 6)}) > 1


OPTIONS = {"log, linear": {"values": "linear", "decay": "head"}}


SAVED = [*((name, True) for name in CAUSAL), ("log, linear", False), ("softmax", False)]
SHORT = ("log", True), ("rmt", True), ("softmax", False)


@pytest.mark.parametrize(
    ("name", "has_capacity"),
    [pytest.param(*case, marks=[pytest.mark.nightly] * (case not in SHORT)) for case in SAVED],
)
def test_a_state_survives_saving_and_loading(name, has_capacity, tmp_path):
    model = build(name.partition(",")[0], options=OPTIONS.get(name), **SIZES)
    state = model.init_state((2,), capacity=20 if has_capacity else None)
    _, state = apply(model, jnp.stack([PROMPT, PROMPT[::-1]]), state, return_state=True)
    save_state(tmp_path / "state.safetensors", model, state)
    again = load_state(tmp_path / "state.safetensors", model)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for have, want in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have, want)
    last = jnp.array([[6], [7]])
    further = [apply(model, last, x, return_state=True)[0] for x in (again, state)]
    np.testing.assert_array_equal(*further)


@pytest.mark.parametrize("name", ["memory_compressed", "tglobal", "softmax"])
@pytest.mark.parametrize("capacity", [None, 7, 100])
def test_a_state_of_any_capacity_is_loaded(name, capacity, tmp_path):
    model = build(name, **SIZES)
    state = model.init_state((2, 1), capacity=capacity)
    save_state(tmp_path / "state", model, state)
    again = load_state(tmp_path / "state", model)
    for have, want in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(have, want)


def test_options_that_are_added_later_do_not_change_fingerprints():
    """Otherwise files of earlier versions could not be loaded."""
    sizes = {"vocab_size": 11, "model_dim": 8, "num_layers": 1, "num_heads": 2}
    config = LanguageModelConfig(**sizes, attention="softmax", block="llama")
    model = random_model(config)
    expected = "304f212f3723dce30eb3980527c0ddafe60608c2184ca6ca7a89f55d07f8885f"
    assert fingerprint(model) == expected
    others = {
        "gated_deltanet": "1813cdecb242b81e0758d12db55e5fbef9bb41cfe71d0a5f05ea3ae25145f397",
        "mamba2": "d77c4ab3826c8600faa121ba9ee52fa5798c50be57118952cbd4efe011806cf2",
        "sliding_window": "37e772e5459adec0892c64666c3ddfec339eeee9af681be10518f35f70c02ecc",
    }
    for name, want in others.items():
        assert fingerprint(random_model(dataclasses.replace(config, attention=name))) == want
    other = random_model(dataclasses.replace(config, norm_epsilon=0.5))
    assert fingerprint(other) != expected
    other = dataclasses.replace(config, attention=Layers("softmax", norm_after=True))
    assert fingerprint(random_model(other)) != expected


def test_an_empty_state(tmp_path):
    model = build("softmax", **SIZES)
    save_state(tmp_path / "state.safetensors", model, model.init_state(()))
    again = load_state(tmp_path / "state.safetensors", model)
    start = model.init_state(())
    assert jax.tree.structure(again) == jax.tree.structure(start)
    have, want = (apply(model, PROMPT, x, return_state=True)[0] for x in (again, start))
    np.testing.assert_array_equal(have, want)


def test_the_implementation_does_not_matter(tmp_path):
    model = build("log", **SIZES)
    state = model.init_state(())
    save_state(tmp_path / "state", model, state)
    options = {"remat": True, "options": {"implementation": "chunked"}}
    load_state(tmp_path / "state", build("log", **SIZES, **options))


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    model = build("log", **SIZES)
    with pytest.raises(UserError, match="nowhere/state cannot be written"):
        save_state(tmp_path / "nowhere/state", model, model.init_state(()))


def test_another_models_state_is_refused(tmp_path):
    model = build("log", **SIZES)
    save_state(tmp_path / "state", model, model.init_state(()))
    other = nnx.clone(model)
    other.embed.embedding[...] = np.flip(other.embed.embedding[...])
    with pytest.raises(UserError, match="saved by another model or with other weights"):
        load_state(tmp_path / "state", other)


def test_a_state_of_another_format_is_refused(tmp_path, monkeypatch):
    model = build("log", **SIZES)
    with monkeypatch.context() as earlier:
        earlier.setattr(states, "FORMAT", "1")
        save_state(tmp_path / "state", model, model.init_state(()))
    with pytest.raises(UserError, match="state: has format 1 of states, not 3"):
        load_state(tmp_path / "state", model)


@pytest.mark.parametrize("content", [None, b"", b"nonsense" * 9])
def test_damaged_files_are_named(content, tmp_path):
    if content is not None:
        (tmp_path / "state").write_bytes(content)
    with pytest.raises(UserError, match="state"):
        load_state(tmp_path / "state", build("log", **SIZES))
