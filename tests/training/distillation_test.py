"""Imitation of a teacher: the losses, and runs that resume."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import data
from heinsen_jax.data import Batch
from heinsen_jax.errors import UserError
from heinsen_jax.interop.hub import save_pretrained
from heinsen_jax.models import LanguageModel, Layers
from heinsen_jax.models.conversion import shared_weights
from heinsen_jax.objectives.cross_entropy import distilled_losses
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.load import load_run
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.training import prepare_run, train
from heinsen_jax.training.config import DistillationConfig
from heinsen_jax.training.distillation import Distillation
from heinsen_jax.training.settings import resolve_settings
from tests.models.conversion_test import HEDGEHOG, model, of_layer


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("segment_ids", [None, np.arange(13)[None] // np.array([[4], [7]])])
def test_errors_are_those_of_each_attention_layer_given_the_inputs_of_the_teacher(
    segment_ids, remat
):
    """At the tokens up to the last prediction of each row."""
    teacher = model("softmax", seed=1, convolution_size=3)
    ours = model(("softmax", HEDGEHOG), seed=2, convolution_size=3, remat=remat)
    tokens = np.random.default_rng(0).integers(0, 264, (2, 13))
    loss_mask = np.array([[True, False] * 6, [False, True, True, False] + [False] * 8])
    mask = np.arange(12)[None] < np.array([[11], [3]])
    ids = None if segment_ids is None else segment_ids[:, :-1]
    settings = DistillationConfig(teacher="unused", target="attention")
    objective = Distillation(settings, ours.config, teacher, frozenset())
    batch = Batch(tokens, loss_mask, segment_ids)

    @jax.jit
    def compiled():
        found = objective(ours, batch, jax.random.key(0), nnx.state(teacher))
        x, _ = teacher.embedded(tokens[:, :-1])
        errors = []
        for layer in range(4):
            block = of_layer(teacher, layer)
            if layer % 2:
                inputs = block.convolutions[0](block.norm(x), state=None, segment_ids=ids)[0]
                wanted = block.attention(inputs, segment_ids=ids)
                imitated = of_layer(ours, layer).attention(inputs, segment_ids=ids)
                error = jnp.sum((imitated - wanted) ** 2, -1)
                errors.append(error / jnp.sum(wanted**2, -1)[mask].mean())
            x, _ = block(x, state=None, return_state=False, segment_ids=ids)
        return found.losses, found.sums()[0], sum(errors) / 2

    losses, total, wanted = compiled()
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    np.testing.assert_allclose(total, np.sum(wanted[mask]), rtol=1e-4)


def test_predictions_of_the_teacher_are_within_segments():
    """Those of two documents in a row are those of each alone."""
    teacher, ours = model("softmax", seed=1), model(HEDGEHOG, seed=2)
    tokens = np.random.default_rng(0).integers(0, 264, (1, 13))
    loss_mask, ids = np.arange(12)[None] != 5, np.arange(13)[None] // 6
    objective = Distillation(
        DistillationConfig(teacher="unused"), ours.config, teacher, frozenset()
    )

    @jax.jit
    def sums(*batch):
        return objective(ours, Batch(*batch), jax.random.key(0), nnx.state(teacher)).sums()[0]

    alone = [sums(x, np.ones_like(x[:, 1:], bool)) for x in (tokens[:, :6], tokens[:, 6:])]
    np.testing.assert_allclose(sums(tokens, loss_mask, ids), sum(alone), rtol=1e-5)


def test_losses_are_cross_entropy_and_divergence():
    """In chunks, with the gradient of the model but not of the teacher."""
    rng = np.random.default_rng(0)
    ours, theirs = (jnp.asarray(rng.standard_normal((2, 11, 5)), jnp.float32) for _ in range(2))
    targets = jnp.asarray(rng.integers(0, 5, (2, 11)))

    def direct(ours, theirs):
        p, q = jax.nn.softmax(ours), jax.lax.stop_gradient(jax.nn.softmax(theirs))
        crosses = -jnp.log(jnp.take_along_axis(p, targets[..., None], -1)[..., 0])
        return 0.25 * crosses + 0.75 * jnp.sum(q * jnp.log(q / p), -1)

    def chunked(ours, theirs):
        identity = jax.tree_util.Partial(lambda x: x)
        return distilled_losses(
            identity, ours, identity, theirs, targets, divergence_weight=0.75, max_logits=60
        )

    np.testing.assert_allclose(chunked(ours, theirs), direct(ours, theirs), rtol=1e-5)
    gradients, wanted = (
        jax.grad(lambda x, y, f=f: jnp.sum(jnp.sin(f(x, y))), (0, 1))(ours, theirs)
        for f in (chunked, direct)
    )
    for have, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-6)


def test_other_weights_of_the_teacher_are_noticed(tmp_path):
    teacher, ours = nnx.clone(model("softmax")), model(HEDGEHOG)
    config = DistillationConfig(teacher="T")

    def distillation():
        return Distillation(config, ours.config, teacher, frozenset())

    distillation().check_unchanged(tmp_path)  # of a run that has not begun
    distillation().record(tmp_path)
    distillation().check_unchanged(tmp_path)
    teacher.norm.scale[...] = 2 * teacher.norm.scale[...]
    with pytest.raises(UserError, match=r"teacher=T: its weights have changed"):
        distillation().check_unchanged(tmp_path)


@pytest.fixture(scope="module")
def teacher(small, tmp_path_factory):
    """A trained model with softmax attention, and its configuration."""
    chosen = replace(
        small,
        model=replace(small.model, attention="softmax", block="llama", num_layers=2),
        training=replace(small.training, sample_tokens=0),
    )
    workdir = tmp_path_factory.mktemp("teachers") / "softmax"
    return workdir, run(workdir, chosen), chosen


def run(workdir, chosen, **options):
    workdir.mkdir(exist_ok=True)
    dataset = data.load(chosen.data)
    return train(prepare_run(chosen, workdir, dataset=dataset, **options))


def test_transfer_trains_new_parameters_only_and_resumes(teacher, tmp_path):
    workdir, _, chosen = teacher
    settings = DistillationConfig(teacher=str(workdir), target="attention", trained="new")
    chosen = replace(chosen, model=replace(chosen.model, attention=HEDGEHOG), distillation=settings)
    few = replace(chosen, training=replace(chosen.training, steps=12, log_every=1))
    more = replace(few, training=replace(few.training, steps=24))
    # The schedule depends on the steps: both parts have that of the whole run.
    same = {"optimizer": replace(chosen.optimizer, schedule="constant")}
    few, more = replace(few, **same), replace(more, **same)
    run(tmp_path / "whole", more)
    run(tmp_path / "resumed", few)
    run(tmp_path / "resumed", more)
    whole, resumed = (
        flatten_with_names(nnx.state(load_run(tmp_path / name, best=False)[0], nnx.Param))
        for name in ("whole", "resumed")
    )
    theirs = shared_weights(more.model, load_run(workdir)[0])
    for name, value in whole.items():
        np.testing.assert_array_equal(value, resumed[name])
        if name in theirs:
            np.testing.assert_array_equal(value, theirs[name])
    errors = [row["train/loss"] for row in read_metrics(tmp_path / "whole") if "train/loss" in row]
    assert np.mean(errors[-5:]) < 0.9 * errors[0]


@pytest.mark.nightly
def test_distillation_starts_from_weights_and_lowers_the_loss(teacher, tmp_path):
    workdir, _, chosen = teacher
    linear = replace(chosen.model, attention=Layers("log", options={"values": "linear"}))
    alone = run(tmp_path / "alone", replace(chosen, model=linear))
    settings = DistillationConfig(teacher=str(workdir))
    taught = run(tmp_path / "taught", replace(chosen, model=linear, distillation=settings))
    assert taught.metrics["loss"] < alone.metrics["loss"] - 0.1
    settings = replace(settings, start=str(tmp_path / "alone"))
    start = Distillation.of(settings, linear).start()
    ours = flatten_with_names(nnx.state(load_run(tmp_path / "alone")[0], nnx.Param))
    assert start.keys() == ours.keys()
    for name, value in start.items():
        np.testing.assert_array_equal(value, ours[name])


def test_the_teacher_is_loaded_into_the_memory_of_the_host(teacher, tmp_path, monkeypatch):
    """No device needs to hold all of it; from a checkpoint, and from a file of weights."""
    workdir, _, chosen = teacher
    saved = save_pretrained(workdir, tmp_path / "saved")
    monkeypatch.setattr(jax, "local_devices", lambda: pytest.fail("a device was used"))
    for folder in (workdir, saved):
        settings = DistillationConfig(teacher=str(folder), start=str(folder))
        distillation = Distillation.of(settings, chosen.model)
        arrays = jax.tree.leaves(nnx.state(distillation.teacher, nnx.Param))
        assert {type(x) for x in [*arrays, *distillation.start().values()]} == {np.ndarray}


def test_the_teacher_may_have_another_dtype(teacher, tmp_path):
    """Its predictions are rounded, and initial weights are not."""
    workdir, _, chosen = teacher
    linear = replace(chosen.model, attention=HEDGEHOG)
    settings = DistillationConfig(teacher=str(workdir), divergence_weight=1.0)
    exact, rounded = (
        Distillation.of(replace(settings, teacher_dtype=dtype), linear)
        for dtype in (None, "bfloat16")
    )
    for name, value in exact.start().items():
        np.testing.assert_array_equal(value, rounded.start()[name])
    weights = flatten_with_names(nnx.state(rounded.teacher, nnx.Param))
    assert {x.dtype.name for x in weights.values() if x.ndim > 2} == {"bfloat16"}
    ours = LanguageModel(linear, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, linear.vocab_size, (2, 13))
    batch = Batch(tokens, np.ones((2, 12), bool))
    exact, rounded = (
        x(ours, batch, jax.random.key(0), nnx.state(x.teacher, nnx.Param)).losses
        for x in (exact, rounded)
    )
    assert 0 < np.mean(np.abs(exact - rounded)) < 0.02


def test_a_run_resumes_with_the_weights_of_its_teacher(teacher, tmp_path):
    """Others, as of a teacher that was trained further, are refused, or allowed and recorded."""
    workdir, _, chosen = teacher
    changing = shutil.copytree(workdir, tmp_path / "teacher")
    linear = replace(chosen.model, attention=Layers("log", options={"values": "linear"}))
    student = replace(chosen, model=linear, distillation=DistillationConfig(teacher=str(changing)))
    few, more = (
        replace(student, training=replace(student.training, steps=steps)) for steps in (6, 8)
    )
    folder = tmp_path / "student"
    run(folder, few)
    shutil.rmtree(changing)
    short = replace(chosen.training, steps=2)
    run(changing, replace(chosen, seed=chosen.seed + 1, training=short))
    for experiment in (few, more):
        with pytest.raises(UserError, match=r"teacher: its weights have changed.*--allow-change"):
            run(folder, experiment)
    assert run(folder, few, allow_change=True).step == 6  # nothing is left to train
    assert run(folder, more).step == 8


@pytest.mark.usefixtures("unchecked")  # a mesh of devices that do not exist
def test_a_teacher_that_cannot_split_sequences_is_refused(teacher, monkeypatch):
    workdir, _, chosen = teacher
    linear = Layers("log", options={"values": "linear"})
    distillation = DistillationConfig(teacher=str(workdir))
    chosen = replace(chosen, model=replace(chosen.model, attention=linear))
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "context": 2}
    module = "heinsen_jax.training.settings"
    monkeypatch.setattr(f"{module}.make_mesh", lambda _: SimpleNamespace(shape=sizes))
    monkeypatch.setattr(f"{module}.share_of_process", lambda _: None)
    dataset = data.load(chosen.data)
    resolve_settings(chosen, dataset)
    with pytest.raises(UserError, match=r"mesh\.context=2: .*'softmax' of distillation\.teacher"):
        resolve_settings(replace(chosen, distillation=distillation), dataset)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target": "attention"}, "distillation.target has no effect without a teacher"),
        ({"teacher": "T", "target": "attention"}, "target='attention': all layers"),
        ({"teacher": "T", "trained": "new"}, "trained='new': the teacher has all parameters"),
        ({"teacher": "nothing/there"}, "nothing/there"),
    ],
)
def test_settings_that_do_not_fit_are_refused(teacher, tmp_path, settings, said):
    workdir, _, chosen = teacher
    if settings.get("teacher") == "T":
        settings = settings | {"teacher": str(workdir)}
    with pytest.raises(UserError, match=said):
        run(tmp_path / "run", replace(chosen, distillation=DistillationConfig(**settings)))


def test_weights_to_start_from_are_sought_before_compilation(teacher, tmp_path, capsys):
    workdir, _, chosen = teacher
    settings = DistillationConfig(teacher=str(workdir), start="nothing")
    with pytest.raises(UserError, match=r"distillation\.start=nothing: nothing holds no run"):
        run(tmp_path / "run", replace(chosen, distillation=settings))
    assert "compil" not in capsys.readouterr().out
