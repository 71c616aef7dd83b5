"""A trained model with softmax attention becomes one with a state of constant size."""

import json
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import data, linearize
from heinsen_jax.config import ExperimentConfig, load_config
from heinsen_jax.errors import UserError
from heinsen_jax.interop.transformers import import_model
from heinsen_jax.linearize import __main__ as linearize_command
from heinsen_jax.linearize import comparison
from heinsen_jax.linearize.comparison import recall
from heinsen_jax.linearize.layers import _divergence, choose_layers
from heinsen_jax.linearize.plan import plan_stages, read_teacher
from heinsen_jax.models import LanguageModel, LanguageModelConfig, Layers
from heinsen_jax.models.conversion import linear_layers, shared_weights
from heinsen_jax.objectives.evaluation import evaluate_model
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.folder import open_run
from heinsen_jax.runs.load import load_run
from heinsen_jax.runtime import distributed
from heinsen_jax.training import loop, prepare_run, program, train
from heinsen_jax.training import memory as memory_module
from heinsen_jax.training.checkpoint import Checkpoints
from heinsen_jax.training.memory import Memory
from heinsen_jax.training.profiling import Tracer
from heinsen_jax.training.program import Program
from heinsen_jax.training.recorded import record
from heinsen_jax.training.settings import resolve_settings
from tests.conftest import GOLDEN_FOLDER
from tests.training.conftest import corpus, small  # noqa: F401


def test_recall_is_that_of_a_model_that_copies(monkeypatch):
    """It predicts each token of the second copy from the first."""
    config = LanguageModelConfig(vocab_size=264, model_dim=8, num_layers=1, num_heads=1)
    model, length = LanguageModel(config, rngs=nnx.Rngs(0)), 20
    strings = np.random.default_rng(0).integers(1, 264, (8, length))
    rows = np.hstack([np.zeros((8, 2), int), strings, strings])

    def copies(self, tokens):
        right = jax.nn.one_hot(jnp.roll(tokens, length - 1, -1), 264)
        return right.at[: len(tokens) // 2, length + 4].set(0), None  # wrong for half of one place

    monkeypatch.setattr(LanguageModel, "features", copies)
    monkeypatch.setattr(LanguageModel, "readout", jax.tree_util.Partial(lambda x: x))
    found = recall(model, rows, length)
    assert found == pytest.approx(1 - 0.5 / (length - 1), abs=1e-3)


FROM_TEACHER = {"start": None, "initialization_tokens": 4096}


def test_stages_have_the_settings_of_the_command(tmp_path):
    """Stage 2 starts from the weights of stage 1; all batches differ from the teacher's."""
    sizes = {"vocab_size": 264, "model_dim": 16, "num_layers": 2, "num_heads": 2}
    model = LanguageModelConfig(attention="softmax", block="llama", **sizes)
    teacher, workdir = ExperimentConfig(model=model, seed=5), str(tmp_path / "run")
    options = linearize.Options(
        model="T",
        workdir=workdir,
        attention=("log:features=hedgehog",),
        keep=("1",),
        transfer_steps=40,
        steps=20,
        teacher_dtype="bfloat16",
    )
    one, two, further, window = plan_stages(teacher, options, ["--training.log-every", "3"])
    assert (further.folder, window.folder) == (f"{workdir}-teacher", f"{workdir}-window")
    assert (further.experiment.model, further.experiment.training.start) == (model, "T")
    assert further.experiment.distillation.teacher is None
    assert window.experiment.model.layer_pattern == ("sliding_window", "softmax")
    assert window.experiment.distillation == replace(two.experiment.distillation, **FROM_TEACHER)
    for baseline in (further.experiment, window.experiment):
        assert (baseline.training.steps, baseline.training.log_every) == (60, 3)
        assert baseline.seed == two.experiment.seed
        assert baseline.optimizer == two.experiment.optimizer
    assert (one.folder, two.folder) == (f"{workdir}-transfer", workdir)
    first, second = one.experiment, two.experiment
    assert (first.distillation.start, second.distillation.start) == (None, one.folder)
    assert (first.distillation.target, second.distillation.target) == ("attention", "logits")
    assert (first.distillation.trained, second.distillation.trained) == ("new", "all")
    assert first.distillation.teacher == second.distillation.teacher == "T"
    assert first.distillation.teacher_dtype == second.distillation.teacher_dtype == "bfloat16"
    assert (first.training.steps, second.training.steps) == (40, 20)
    assert first.training.log_every == second.training.log_every == 3
    assert (first.optimizer.weight_decay, second.optimizer.warmup_steps) == (0.0, 2)
    assert len({teacher.seed, first.seed, second.seed}) == 3
    assert first.model == second.model
    assert first.model.layer_pattern == ("log", "softmax")
    alone = replace(options, transfer_steps=0, lora_rank=2, baselines=False)
    (only,) = plan_stages(teacher, alone, [])
    assert (only.experiment.distillation.start, only.experiment.distillation.trained) == (
        None,
        "new",
    )


@pytest.fixture
def few_comparisons(monkeypatch) -> None:
    """Compare losses at one more length only, and the recall of one."""
    monkeypatch.setattr(comparison, "LENGTHS", (64,))
    monkeypatch.setattr(comparison, "COPIED", (16,))


@pytest.fixture(scope="module")
def teacher(small, tmp_path_factory) -> Path:  # noqa: F811
    """A trained model of three layers with softmax attention."""
    chosen = replace(
        small,
        model=replace(small.model, attention="softmax", block="llama", num_layers=3),
        training=replace(small.training, sample_tokens=0),
    )
    folder = tmp_path_factory.mktemp("teacher")
    train(prepare_run(chosen, folder))
    return folder


def command(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["linearize", *arguments])
    monkeypatch.setattr(distributed, "initialize", lambda *_: None)  # only at the start
    return linearize_command.main()


def loss_before(stage: ExperimentConfig, teacher: Path, dataset: data.Dataset) -> float:
    """The loss of a stage's model before its first update, with the teacher's weights."""
    graph, state = nnx.split(LanguageModel(stage.model, rngs=nnx.Rngs(0)))
    arrays = flatten_with_names(state) | shared_weights(stage.model, load_run(teacher)[0])
    state = jax.tree.unflatten(jax.tree.structure(state), [*arrays.values()])
    batches = stage.training.evaluation_batches
    return evaluate_model(
        nnx.merge(graph, state),
        dataset,
        stage.data,
        masked_fraction=stage.training.masked_fraction,
        max_batches=batches,
    )["loss"]


def test_a_teacher_is_linearized_and_resumed(small, tmp_path, monkeypatch, capsys):  # noqa: F811
    chosen: ExperimentConfig = replace(
        small,
        model=replace(small.model, attention="softmax", block="llama", num_layers=2),
        training=replace(small.training, sample_tokens=0),
    )
    dataset, teacher, workdir = data.load(chosen.data), tmp_path / "teacher", tmp_path / "log"
    teacher.mkdir()
    wanted = train(prepare_run(chosen, teacher, dataset=dataset))
    arguments = ["--model", str(teacher), "--workdir", str(workdir), "--keep", "1"]
    arguments += ["--attention", "log:features=hedgehog", "--transfer-steps", "40"]
    arguments += ["--steps", "20", "--training.log-every", "10", "--no-baselines"]
    arguments += ["--initialization-tokens", "0"]
    tokens = (
        chosen.training.evaluation_batches * chosen.data.batch_size * chosen.data.sequence_length
    )
    monkeypatch.setattr(comparison, "TOKENS", tokens)
    assert command(monkeypatch, *arguments) == 0
    found = json.loads((workdir / linearize.RESULTS_FILE).read_text())["results"]
    names = [row["name"] for row in found]
    assert names == ["teacher", "attention transfer", "linearized"]
    length = str(chosen.data.sequence_length)
    losses = [row["loss"][length] for row in found]
    assert losses[0] == pytest.approx(wanted.metrics["loss"])
    assert found[0]["divergence"][length] == pytest.approx(0, abs=1e-6)
    assert found[1]["divergence"][length] > found[2]["divergence"][length] > 0
    assert found[2]["seconds"] > found[1]["seconds"] > 0
    assert [*found[0]["recall"]] == ["64", "256"]
    first = load_config(f"{workdir}{linearize.TRANSFER_SUFFIX}/config.json")
    initial = loss_before(first, teacher, dataset)
    untrained, transferred, tuned = np.array([initial, *losses[1:]]) - losses[0]
    assert 0 < transferred < 0.85 * untrained
    assert 0 < tuned < 0.6 * transferred
    assert [row["tokens"] for row in found] == [0, 40 * 256, 60 * 256]
    half = found[0]["state_bytes"]["32768"] / 2  # of the layer that stays
    assert half < found[2]["state_bytes"]["32768"] < 1.1 * half
    assert load_run(workdir)[0].config.layer_pattern == ("log", "softmax")
    assert load_config(workdir / "config.json").training.log_every == 10
    assert (first.optimizer.weight_decay, first.training.steps) == (0.0, 40)
    second = load_config(workdir / "config.json")
    assert second.distillation.start == f"{workdir}{linearize.TRANSFER_SUFFIX}"
    seeds = chosen.seed, first.seed, second.seed
    assert len(set(seeds)) == 3, "batches of the teacher and of both stages differ"
    capsys.readouterr()
    assert command(monkeypatch, *arguments) == 0  # finished runs are not repeated
    said = capsys.readouterr().out
    assert said.count("nothing is left to train") == 2
    assert command(monkeypatch, *arguments, "--transfer-steps", "50") == 2
    assert f"{workdir}-transfer has 40 of 50 updates; give --restart" in capsys.readouterr().err
    assert command(monkeypatch, *arguments, "--training.steps", "50") == 2
    assert "--training.steps: differs by run; give options of this" in capsys.readouterr().err
    shutil.rmtree(teacher / "checkpoints")
    assert command(monkeypatch, *arguments, "--restart") == 2
    assert f"{teacher}" in capsys.readouterr().err
    assert (workdir / linearize.RESULTS_FILE).exists(), "the earlier run stays where it is"


@pytest.mark.nightly
def test_an_interrupted_linearization_continues_where_it_was(small, tmp_path, monkeypatch):  # noqa: F811
    chosen = replace(
        small,
        model=replace(small.model, attention="softmax"),
        training=replace(small.training, sample_tokens=0, steps=10),
    )
    teacher, signals = tmp_path / "teacher", [signal.SIGTERM]
    teacher.mkdir()
    dataset = data.load(chosen.data)
    train(prepare_run(chosen, teacher, dataset=dataset))

    class Stopped(Tracer):
        """Sends this process a signal at step 8."""

        def __call__(self, step: int, last: bool = False) -> None:
            if step == 8 and signals:
                signal.raise_signal(signals.pop())
            super().__call__(step, last)

    monkeypatch.setattr(loop, "Tracer", Stopped)
    arguments = ["--model", str(teacher), "--attention", "log:features=hedgehog"]
    arguments += ["--transfer-steps", "20", "--steps", "10"]
    workdir, whole = tmp_path / "stopped", tmp_path / "whole"
    assert command(monkeypatch, *arguments, "--workdir", str(workdir)) == 128 + signal.SIGTERM
    transferred = load_run(f"{workdir}{linearize.TRANSFER_SUFFIX}", best=False)[2]
    assert 8 <= transferred < 20
    assert not (workdir / "checkpoints").exists(), "stage 2 waits for stage 1"
    (workdir / "checkpoints").mkdir(parents=True, exist_ok=True)  # killed before its first update
    losses = []
    for folder in (workdir, whole):
        assert command(monkeypatch, *arguments, "--workdir", str(folder)) == 0
        found = json.loads((folder / linearize.RESULTS_FILE).read_text())["results"]
        losses.append([x for row in found for x in row["loss"].values()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    signals.append(signal.SIGTERM)  # in stage 1 of a restart, which the same command then resumes
    arguments += ["--workdir", str(workdir)]
    assert command(monkeypatch, *arguments, "--restart") == 128 + signal.SIGTERM
    assert command(monkeypatch, *arguments) == 0
    arguments[arguments.index("--transfer-steps") + 1] = "25"
    assert command(monkeypatch, *arguments, "--restart") == 0
    found = json.loads((workdir / linearize.RESULTS_FILE).read_text())["results"]
    assert found[1]["tokens"] == 25 * 256


@pytest.mark.nightly
@pytest.mark.usefixtures("few_comparisons")
def test_both_stages_save_by_time_and_stop(small, tmp_path, monkeypatch, capsys):  # noqa: F811
    """A stop in stage 2 keeps both stages, and only that stage continues."""
    chosen = replace(
        small,
        model=replace(small.model, attention="softmax"),
        training=replace(small.training, sample_tokens=0, steps=2),
    )
    teacher, workdir, saved = tmp_path / "teacher", tmp_path / "linear", []
    dataset = data.load(chosen.data)
    teacher.mkdir()
    train(prepare_run(chosen, teacher, dataset=dataset))
    capsys.readouterr()
    save = Checkpoints.save

    def recorded(self, step, state, **options):
        saved.append(step)
        save(self, step, state, **options)

    class Stopped(Tracer):
        """Sends this process a signal at step 3 of stage 2."""

        def __call__(self, step: int, last: bool = False) -> None:
            if step == 3 and len(saved) > 4:
                signal.raise_signal(signal.SIGTERM)
            super().__call__(step, last)

    monkeypatch.setattr(Checkpoints, "save", recorded)
    arguments = ["--model", str(teacher), "--workdir", str(workdir), "--attention"]
    arguments += ["log:features=hedgehog", "--transfer-steps", "4", "--steps", "4"]
    arguments += ["--no-baselines"]
    arguments += ["--training.checkpoint-minutes", "1e-9"]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Tracer", Stopped)
        assert command(monkeypatch, *arguments) == 128 + signal.SIGTERM
    assert saved == [1, 2, 3, 4, 1, 2, 3]
    with monkeypatch.context() as patch:  # after the last update of stage 1
        late, wait = [signal.SIGTERM], Checkpoints.wait

        def interrupted(self):
            wait(self)
            for number in late[:1]:
                late.clear()
                signal.raise_signal(number)

        patch.setattr(Checkpoints, "wait", interrupted)
        elsewhere = [*arguments, "--workdir", str(tmp_path / "late")]
        assert command(monkeypatch, *elsewhere) == 128 + signal.SIGTERM
    assert saved[7:] == [1, 2, 3, 4]
    del saved[7:]
    said = capsys.readouterr().out
    assert "next, generate text" not in said
    assert command(monkeypatch, *arguments) == 0
    assert saved[7:] == [4]
    said = capsys.readouterr().out
    assert said.count("nothing is left to train") == 1
    assert said.count("next, generate text") == 1, "stage 2 alone is a model to generate with"


def test_all_runs_must_fit_before_the_first_is_trained(teacher, tmp_path, monkeypatch, capsys):
    def trained(*_):
        raise AssertionError("a stage is trained")

    monkeypatch.setattr("heinsen_jax.linearize.run.train", trained)
    monkeypatch.setattr(program, "memory_of", lambda update: Memory(1 << 60, 0))
    monkeypatch.setattr(memory_module, "available_host_memory", lambda: 1 << 50)
    arguments = ["--model", str(teacher), "--workdir", str(tmp_path / "linear")]
    arguments += ["--attention", "log:features=hedgehog", "--transfer-steps", "1"]
    assert command(monkeypatch, *arguments) == 2
    assert "training needs" in capsys.readouterr().err
    earlier = tmp_path / "linear-transfer"
    (earlier / "config.json").write_text((teacher / "config.json").read_text())
    assert command(monkeypatch, *arguments, "--restart") == 2
    assert "training needs" in capsys.readouterr().err
    assert (earlier / "config.json").exists(), "no run is moved before all stages are checked"


def test_layers_are_chosen_by_the_divergence(small, tmp_path):  # noqa: F811
    """It is the divergence of a model that keeps this layer, whatever the layer patterns."""
    pattern = "softmax", "deltanet", Layers("softmax", options={"scale": 4.0}), "softmax"
    chosen = replace(small.model, attention=pattern, block="llama", num_layers=4)
    chosen = replace(small, model=chosen, training=replace(small.training, sample_tokens=0))
    chosen = replace(chosen, training=replace(chosen.training, steps=20))
    folder = tmp_path / "teacher"
    folder.mkdir()
    train(prepare_run(chosen, folder))
    teacher = load_run(folder)[0]
    options = linearize.Options(
        **{"model": str(folder), "workdir": str(tmp_path / "run"), "baselines": False},
        **{"attention": ("sliding_window:window_size=2", "log"), "initialization_tokens": 128},
    )
    (stage,) = plan_stages(chosen, options, [])
    settings = resolve_settings(stage.experiment, data.load(chosen.data))
    program_of_all = Program(settings)
    student = nnx.merge(program_of_all.graph, program_of_all.initial_state().parameters)
    assert student.config.layer_pattern == ("sliding_window", "deltanet", "sliding_window", "log")
    batch = next(program_of_all.batches(0, batch_size=4))
    wanted = []
    for layer in (0, 2, 3):
        config = linear_layers(teacher.config, options.attention, [str(layer)])
        hybrid = LanguageModel(config, rngs=nnx.Rngs(0))
        names = flatten_with_names(nnx.state(hybrid, nnx.Param))
        place, given = f"blocks.{layer}.", shared_weights(config, student)
        own = shared_weights(config, teacher)
        given |= {x: y for x, y in own.items() if x.startswith(place) or x not in given}
        leaves = [given[x] for x in names]
        nnx.update(hybrid, jax.tree.unflatten(jax.tree.structure(nnx.state(hybrid)), leaves))
        log_p, log_q = (jax.nn.log_softmax(x(batch.tokens[:, :-1])) for x in (hybrid, teacher))
        wanted.append(float(jnp.mean(jnp.sum(jnp.exp(log_q) * (log_q - log_p), -1))))
    for layer, want in zip((0, 2, 3), wanted, strict=True):
        mask = jnp.arange(4) == layer
        features, _ = teacher.features(batch.tokens[:, :-1])
        have = _divergence(student, teacher, features, batch, mask)
        assert float(have) == pytest.approx(want, rel=1e-4)
    for number in (1, 2):
        best = sorted(np.array([0, 2, 3])[np.argsort(wanted)[:number]])
        assert choose_layers(Program(settings), number) == best
    with pytest.raises(UserError, match="--keep auto:3: 3 layers are replaced; keep fewer"):
        choose_layers(Program(settings), 3)


@pytest.fixture
def arguments_with_choice(teacher, tmp_path) -> list[str]:
    """Options for a teacher of three layers, of which one is kept."""
    arguments = ["--model", str(teacher), "--workdir", str(tmp_path / "linear"), "--keep", "auto:1"]
    arguments += ["--attention", "log_window:window_size=4", "--steps", "8"]
    return [*arguments, "--initialization-tokens", "512"]


@pytest.mark.nightly
def test_a_linearization_in_two_stages_keeps_its_choice(
    arguments_with_choice, tmp_path, monkeypatch
):
    tuned = [*arguments_with_choice, "--no-baselines", "--lora-rank", "2", "--transfer-steps", "2"]
    tuned += ["--workdir", str(tmp_path / "tuned")]
    assert command(monkeypatch, *tuned) == 0
    assert command(monkeypatch, *tuned) == 0  # resumes with the same layers
    config = load_config(tmp_path / "tuned/config.json")
    assert [*config.model.layer_pattern].count("softmax") == 1
    assert config.distillation.initialization_tokens == 0


@pytest.mark.usefixtures("few_comparisons")
def test_a_linearization_with_its_baselines(arguments_with_choice, tmp_path, monkeypatch, capsys):
    """By default: layers to keep are chosen once, and the teacher and windows alone are trained as
    long."""
    arguments, workdir = arguments_with_choice, tmp_path / "linear"
    assert command(monkeypatch, *arguments) == 0
    said = capsys.readouterr().out
    (kept,) = re.findall(r"^layers to keep: (\d)$", said, re.M)
    results = json.loads((workdir / linearize.RESULTS_FILE).read_text())["results"]
    names = ["teacher", "linearized", "teacher trained further", "windows alone"]
    assert [row["name"] for row in results] == names
    assert [row["tokens"] for row in results] == [0, *[8 * 256] * 3]
    assert results[0]["divergence"]["32"] < results[1]["divergence"]["32"]
    layers = ["log_window"] * 3
    layers[int(kept)] = "softmax"
    assert [*load_run(workdir)[0].config.layer_pattern] == layers
    windows = load_run(f"{workdir}-window")[0].config
    assert windows.layer_pattern[int(kept)] == "softmax"
    assert windows.mechanisms()[(int(kept) + 1) % 3].window_size == 4
    assert command(monkeypatch, *arguments) == 0  # resumes with the same layers
    said = capsys.readouterr().out
    assert f"layers to keep: {kept}" in said
    assert said.count("nothing is left to train") == 3
    other = [*arguments[:5], "auto:2", *arguments[6:]]
    assert command(monkeypatch, *other) == 2
    assert "holds a run that keeps 1 layers; give that number" in capsys.readouterr().err
    wrong = [*arguments[:5], "auto:1", "0", *arguments[6:]]
    assert command(monkeypatch, *wrong) == 2
    assert "--keep auto:1 0: give auto:N alone" in capsys.readouterr().err


@pytest.mark.nightly
def test_microbatches_fit_into_memory(arguments_with_choice, tmp_path, monkeypatch, capsys):
    arguments, path = [*arguments_with_choice, "--no-baselines"], tmp_path / "linear/config.json"
    measured = program.memory_of

    def large(update):
        memory = measured(update)
        return memory._replace(workspace=memory.workspace * 10**5)

    monkeypatch.setattr(program, "memory_of", large)
    smallest = [lambda memory: memory.workspace < 10**5 * 2.2e6]
    monkeypatch.setattr(memory_module.Limits, "allow", lambda self, memory: smallest[-1](memory))
    assert command(monkeypatch, *arguments) == 0
    said = capsys.readouterr().out
    assert re.search(r"^linearized: to fit into memory: microbatches of \d sequences", said, re.M)
    steps = load_config(path).training.accumulation_steps
    assert steps > 1
    smallest.append(lambda memory: True)
    assert command(monkeypatch, *arguments) == 0  # resumes with the same microbatches
    assert load_config(path).training.accumulation_steps == steps


def test_documents_are_treated_alike_in_all_runs(small, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Not separated, if one of the models cannot; and losses at all lengths are compared."""
    text = tmp_path / "documents"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"document {number} of a few words\n" * 30)
    chosen = replace(
        small,
        model=replace(small.model, attention="softmax", block="llama"),
        data=replace(small.data, corpus=str(text), cache=str(tmp_path / "cache")),
        training=replace(small.training, sample_tokens=0, steps=2),
    )
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    train(prepare_run(chosen, teacher))
    for attention, documents in (
        ("sliding_window:window_size=4,num_sinks=2", "continuous"),
        ("log_window:window_size=4", None),
    ):
        workdir = tmp_path / str(documents)
        arguments = ["--model", str(teacher), "--workdir", str(workdir), "--steps", "1"]
        assert command(monkeypatch, *arguments, "--attention", attention) == 0
        for suffix in ("", "-teacher", "-window"):
            assert load_config(f"{workdir}{suffix}/config.json").data.documents == documents
        said = "documents: continuous in all runs, since a model does not support segments"
        assert (said in capsys.readouterr().out) == (documents is not None)
        first, *_ = json.loads((workdir / linearize.RESULTS_FILE).read_text())["results"]
        assert [*first["loss"]] == ["32", "256", "1024", "4096"]


@pytest.mark.nightly
def test_mechanisms_without_new_parameters_have_one_stage(small, tmp_path, monkeypatch):  # noqa: F811
    chosen = replace(
        small,
        model=replace(small.model, attention="softmax", positions="learned", max_length=1024),
        training=replace(small.training, sample_tokens=0, steps=10),
    )
    dataset, teacher = data.load(chosen.data), tmp_path / "teacher"
    teacher.mkdir()
    train(prepare_run(chosen, teacher, dataset=dataset))
    arguments = ["--model", str(teacher), "--workdir", str(tmp_path / "linear")]
    arguments += ["--model.dtype", "bfloat16", "--model.remat"]  # not of the architecture
    arguments += ["--no-baselines"]
    assert command(monkeypatch, *arguments, "--attention", "linear", "--steps", "5") == 0
    assert not (tmp_path / f"linear{linearize.TRANSFER_SUFFIX}").exists()
    results = json.loads((tmp_path / "linear" / linearize.RESULTS_FILE).read_text())["results"]
    assert [[*row["state_bytes"]] for row in results] == [["1024"]] * 2  # no longer contexts
    student = load_config(tmp_path / "linear/config.json").model
    assert (student.dtype, student.remat) == ("bfloat16", True)
    # It resumes with more updates, with the same warmup as before.
    assert chosen.optimizer.warmup_steps > 0
    assert command(monkeypatch, *arguments, "--attention", "linear", "--steps", "20") == 0
    assert load_run(tmp_path / "linear", best=False)[2] == 20
    assert load_config(tmp_path / "linear/config.json").optimizer.warmup_steps == 0


@pytest.mark.nightly
def test_low_rank_additions_leave_the_matrices_of_the_teacher(
    small,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
):
    chosen = replace(
        small,
        model=replace(small.model, attention="softmax"),
        optimizer=replace(small.optimizer, name="muon", ema_decay=0.9),
        training=replace(small.training, sample_tokens=0, steps=10),
    )
    dataset, teacher, workdir = data.load(chosen.data), tmp_path / "teacher", tmp_path / "linear"
    teacher.mkdir()
    train(prepare_run(chosen, teacher, dataset=dataset))
    arguments = ["--model", str(teacher), "--workdir", str(workdir), "--lora-rank", "2"]
    arguments += ["--initialization-tokens", "0", "--no-baselines"]
    assert command(monkeypatch, *arguments, "--attention", "linear", "--steps", "5") == 0
    ours, theirs = (
        flatten_with_names(nnx.state(load_run(folder)[0], nnx.Param))
        for folder in (workdir, teacher)
    )
    for name, value in theirs.items():
        np.testing.assert_array_equal(value, ours[name])
    added = {name: value for name, value in ours.items() if name not in theirs}
    assert len(added) == 4
    assert all(np.any(value) for value in added.values())  # B, initially 0, is trained
    capsys.readouterr()
    arguments[3] = str(tmp_path / "hedgehog")
    few = "--attention log:features=hedgehog --transfer-steps 1 --steps 1"
    assert command(monkeypatch, *arguments, *few.split()) == 0
    of_stage = re.findall(
        r"^(?:attention transfer|linearized): .*from the teacher: (.*)$",
        capsys.readouterr().out,
        re.M,
    )
    features = {"attention.key_features", "attention.query_features"}
    assert {*of_stage[0].split(", ")} == features
    assert features < {*of_stage[1].split(", ")}  # and low-rank additions


def test_a_teacher_without_text_needs_data(small, tmp_path, monkeypatch, capsys):  # noqa: F811
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    record(teacher, small, data.load(small.data))
    (teacher / "data_manifest.json").unlink()
    (teacher / "checkpoints").mkdir()
    arguments = ["--model", str(teacher), "--workdir", str(tmp_path / "w")]
    assert command(monkeypatch, *arguments) == 2
    assert "--data is missing" in capsys.readouterr().err


def test_text_for_a_task_is_refused(tmp_path, monkeypatch, capsys):
    task = replace(load_config("recall"), training=replace(load_config("recall").training, steps=4))
    task = replace(task, model=replace(task.model, attention="softmax"))
    dataset, teacher = data.load(task.data), tmp_path / "teacher"
    teacher.mkdir()
    record(teacher, task, dataset)
    (teacher / "checkpoints").mkdir()
    arguments = ["--model", str(teacher), "--workdir", str(tmp_path / "w"), "--data", "a.txt"]
    assert command(monkeypatch, *arguments) == 2
    assert "--data a.txt" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_explained(tmp_path, monkeypatch, capsys):
    arguments = ["--model", str(tmp_path), "--workdir", str(tmp_path / "w")]
    assert command(monkeypatch, *arguments) == 2
    assert f"{tmp_path} holds no run (config.json is missing)" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    assert command(monkeypatch, *arguments) == 2
    said = f"is a checkpoint of transformers, not a run; import it with .* import {tmp_path}"
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--lora-rank", "0", "lora_rank: .*greater than 0"),
        ("--divergence-weight", "2", "divergence_weight: .*less than or equal to 1"),
        ("--transfer-learning-rate", "0", "--transfer-learning-rate 0.0: must be greater than 0"),
        ("--optimizer.beta1", "2", "--optimizer.beta1: .*less than 1"),  # of stage 2
        ("--transfer-steps", "-1", "--transfer-steps -1: must not be negative"),
        ("--model.num-layers", "2", "--model.num-layers: differs by run"),
    ],
)
def test_invalid_options_are_named(small, tmp_path, monkeypatch, capsys, option, value, said):  # noqa: F811
    chosen = replace(small, model=replace(small.model, attention="softmax"))
    teacher = tmp_path / "teacher"
    (teacher / "checkpoints").mkdir(parents=True)
    record(teacher, chosen, data.load(chosen.data))
    arguments = ["--model", str(teacher), "--workdir", str(tmp_path / "w"), option, value]
    assert command(monkeypatch, *arguments) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / f"w{linearize.TRANSFER_SUFFIX}").exists(), "nothing was trained"


def test_folders_of_other_runs_are_refused(small, tmp_path, monkeypatch, capsys):  # noqa: F811
    chosen = replace(small, model=replace(small.model, attention="softmax"))
    chosen = replace(chosen, training=replace(chosen.training, sample_tokens=0))
    window = linear_layers(chosen.model, "log_window")
    models = {"linear-transfer": chosen.model, "other": window, "imported": chosen.model}
    for name, model in {"teacher": chosen.model, **models}.items():
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        record(tmp_path / name, replace(chosen, model=model), data.load(chosen.data))
    (tmp_path / "imported/checkpoints").rmdir()
    (tmp_path / "link").symlink_to(tmp_path / "teacher")
    for teacher, workdir, said in (
        ("teacher", "teacher", "a run would be written to .*teacher, the folder of --model"),
        ("link", "teacher", "a run would be written to .*teacher, the folder of --model"),
        ("linear-transfer", "linear", "would be written to .*linear-transfer, the folder of --mod"),
        ("teacher", "other", "other: holds another run; give another folder, or --restart"),
        ("teacher", "imported", "imported holds a run of another architecture"),
    ):
        arguments = ["--model", str(tmp_path / teacher), "--workdir", str(tmp_path / workdir)]
        arguments += ["--transfer-steps", "1"]
        assert command(monkeypatch, *arguments) == 2
        assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / f"imported{linearize.TRANSFER_SUFFIX}").exists(), "nothing was trained"


def test_an_imported_teacher_and_its_dtype(tmp_path):
    """Its own weights are those of the teacher, and additions of low rank are refused."""
    teacher = import_model(str(GOLDEN_FOLDER / "transformers/qwen2"), tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("attention of constant cost\n" * 100)
    options = linearize.Options(
        model=str(teacher), workdir=str(tmp_path / "run"), data=str(tmp_path / "text.txt")
    )
    path = teacher / "config.json"
    values = json.loads(path.read_text())
    values["data"] |= {"text_column": "words", "test_fraction": 0.1}  # of the teacher's text alone
    path.write_text(json.dumps(values))
    with open_run(teacher) as run:
        config = read_teacher(options, run)
    assert (config.data.text_column, config.data.test_fraction) == ("text", 0.0)
    assert config.training.start is None
    stages = plan_stages(config, options, ["--model.param-dtype", "float32"])
    assert {stage.experiment.model.param_dtype for stage in stages} == {"float32"}
    values["model"]["lora_rank"] = 2
    path.write_text(json.dumps(values))
    with open_run(teacher) as run, pytest.raises(UserError, match="has low-rank additions"):
        read_teacher(options, run)
