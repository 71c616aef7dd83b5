"""The training loop: from configurations to a trained model in a run's folder."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax.sharding import Mesh

from heinsen_jax.data import DataConfig, TokenDataset, end_of_text_id, train_batches
from heinsen_jax.errors import UserError
from heinsen_jax.generate import generate
from heinsen_jax.models import LanguageModelConfig, flops_per_token
from heinsen_jax.sharding import MeshConfig, make_mesh, shard_batch
from heinsen_jax.training.checkpoint import Checkpoints
from heinsen_jax.training.evaluate import evaluate
from heinsen_jax.training.metrics import Reporter, model_flops_utilization, plot_losses
from heinsen_jax.training.objective import MaskedTokens, Objective, next_token
from heinsen_jax.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from heinsen_jax.training.state import (
    TrainState,
    abstract_state,
    graph_of,
    init_sharded,
    initializer,
)
from heinsen_jax.training.step import make_evaluation_step, make_train_step


@pydantic.dataclasses.dataclass(
    config=pydantic.ConfigDict(extra="forbid"), frozen=True, kw_only=True
)
class TrainingConfig:
    """How long to train, and how often to look."""

    steps: pydantic.PositiveInt = 1000
    """Updates in all."""
    accumulation_steps: pydantic.PositiveInt = 1
    """Parts of a batch whose gradients are summed before an update."""
    report_every: pydantic.PositiveInt = 10
    """Steps between two rows of training metrics."""
    evaluate_every: pydantic.PositiveInt = 250
    """Steps between two evaluations, each with a checkpoint and a sample; the last step has one."""
    evaluation_batches: pydantic.PositiveInt | None = None
    """Batches of an evaluation; the whole validation text when None."""
    checkpoint_every: pydantic.PositiveInt | None = None
    """Steps between two checkpoints besides those of evaluations."""
    keep_checkpoints: pydantic.PositiveInt = 2
    """How many of the latest checkpoints stay, besides the best."""
    sample_prompt: str = "\n"
    """What a sample begins with."""
    sample_tokens: pydantic.NonNegativeInt = 200
    """Tokens of a sample; 0 for none."""
    skip_above: pydantic.PositiveFloat | None = 20.0
    """An update is skipped if its gradient's norm is more than so many times the usual one; None:
    never. Updates that are not finite always are."""
    most_skipped: pydantic.PositiveInt = 20
    """Training ends when so many updates in a row were skipped."""
    masked_fraction: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.15
    """How much of a text a model has to fill in, if it is not causal."""


@dataclass(frozen=True)
class Result:
    """How training ended.

    Attributes:
      step: updates made.
      metrics: of the last evaluation; empty where training stopped before one.
      signal: the number of the signal that stopped it, or None.
    """

    step: int
    metrics: dict[str, float]
    signal: int | None = None


class Experiment(Protocol):
    """What `train` needs of an experiment's configuration."""

    @property
    def seed(self) -> int: ...
    @property
    def model(self) -> LanguageModelConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def training(self) -> TrainingConfig: ...
    @property
    def mesh(self) -> MeshConfig: ...


def train(workdir: Path, dataset: TokenDataset, experiment: Experiment) -> Result:
    """Trains from the latest checkpoint in `workdir`, or from the start, to the last step.

    SIGTERM and SIGINT save a checkpoint after the step in progress and end training early.

    Raises:
      UserError: as `check_settings`, or a checkpoint cannot be read.
    """
    mesh = check_settings(dataset, experiment)
    with jax.set_mesh(mesh), _caught_signals() as caught:
        return _Run(workdir, dataset, experiment, mesh)(caught)


def check_settings(dataset: TokenDataset, experiment: Experiment) -> Mesh:
    """Makes sure that the parts of an experiment fit one another, and returns its mesh.

    Raises:
      UserError: they do not; the message names the fields and the mend.
    """
    model, data, training = experiment.model, experiment.data, experiment.training
    vocabulary = dataset.tokenizer.n_vocab
    if model.vocab_size < vocabulary:
        raise UserError(
            f"model.vocab_size={model.vocab_size} is smaller than the vocabulary of "
            f"data.tokenizer={data.tokenizer}: make it at least {vocabulary}"
        )
    if training.sample_tokens and not dataset.tokenizer.encode_ordinary(training.sample_prompt):
        raise UserError("training.sample_prompt is empty: give a character, or sample_tokens=0")
    if not model.is_causal:
        _check_masked(model, training, vocabulary)
    if model.max_length is not None and data.sequence_length > model.max_length:
        raise UserError(
            f"data.sequence_length={data.sequence_length} is more than "
            f"model.max_length={model.max_length}: the model has no positions for it"
        )
    learning_rate(experiment.optimizer, training.steps)
    mesh = make_mesh(experiment.mesh)
    if data.batch_size % (training.accumulation_steps * mesh.size):
        raise UserError(
            f"data.batch_size={data.batch_size} must be a multiple of "
            f"training.accumulation_steps={training.accumulation_steps} times {mesh.size} "
            "device(s)"
        )
    return mesh


def _check_masked(model: LanguageModelConfig, training: TrainingConfig, vocabulary: int) -> None:
    if model.vocab_size == vocabulary:
        raise UserError(
            f"model.vocab_size={model.vocab_size} with model.is_causal=False: make it at least "
            f"{vocabulary + 1}, for the mask is a token of its own"
        )
    if training.sample_tokens:
        raise UserError(
            "model.is_causal=False, and such a model cannot write: set training.sample_tokens=0"
        )


class _Run:
    """One call of `train`: what its steps share."""

    def __init__(self, workdir: Path, dataset: TokenDataset, experiment: Experiment, mesh: Mesh):
        self.workdir, self.dataset, self.mesh = workdir, dataset, mesh
        self.seed = experiment.seed
        self.model, self.data = experiment.model, experiment.data
        self.training = experiment.training
        self.schedule = learning_rate(experiment.optimizer, self.training.steps)
        self.transform = make_optimizer(experiment.optimizer, self.training.steps)
        self.graph = graph_of(self.model)
        self.objective: Objective = next_token
        if not self.model.is_causal:
            vocabulary = dataset.tokenizer.n_vocab
            self.objective = MaskedTokens(self.training.masked_fraction, vocabulary)
        self.evaluation_step = make_evaluation_step(self.graph, self.objective)

    def __call__(self, caught: list[int]) -> Result:
        keep = self.training.keep_checkpoints
        with Checkpoints(self.workdir, keep=keep) as self.checkpoints:
            start, state, train_step = self._begin()
            count = sum(x.size for x in jax.tree.leaves(state.parameters))
            self.flops_per_token = flops_per_token(self.model, count)
            steps = self.training.steps
            with Reporter(self.workdir, start_step=start, steps=steps) as self.reporter:
                for damaged, reason in self.checkpoints.damaged.items():
                    folder = self.checkpoints.folder / str(damaged)
                    self.reporter.line(f"{folder} is damaged ({reason}): it is not used")
                self._introduce(start, count)
                result = self._steps(state, start, train_step, caught)
        self._conclude(result)
        return result

    def _begin(self) -> tuple[int, TrainState, Any]:
        """The step to go on from, the state there, and the compiled update."""
        init = initializer(self.model, self.transform, self.seed)
        abstract = abstract_state(init, self.mesh)
        start = self.checkpoints.latest_step()
        state = (
            init_sharded(init, abstract)
            if start is None
            else self.checkpoints.restore(start, abstract)
        )
        train_step = make_train_step(
            self.graph,
            self.transform,
            accumulation_steps=self.training.accumulation_steps,
            out_shardings=jax.tree.map(lambda x: x.sharding, abstract),
            objective=self.objective,
            seed=self.seed,
            skip_above=self.training.skip_above,
        )
        return start or 0, state, train_step

    def _steps(self, state: TrainState, start: int, train_step: Any, caught: list[int]) -> Result:
        batches = train_batches(
            self.dataset,
            self.data,
            seed=self.seed,
            start_step=start,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        training, clock, metrics = self.training, _Clock(start), {}
        pending = None  # metrics are fetched a step late, so that the device never waits for us
        for step in range(start + 1, training.steps + 1):
            state, measured = train_step(state, shard_batch(next(batches), self.mesh))
            last = step == training.steps
            if pending is not None:
                self._report(*pending, clock)
                pending = None
            if step % training.report_every == 0 or last:
                pending = step, measured
            if step % training.evaluate_every == 0 or last or caught:
                if pending is not None:
                    self._report(*pending, clock)
                    pending = None
                if caught and not last:
                    self.checkpoints.save(step, state)
                    return Result(step, metrics, caught[0])
                metrics = self._look(step, state)
                clock.restart(step)
            elif training.checkpoint_every and step % training.checkpoint_every == 0:
                self.checkpoints.save(step, state)
        return Result(training.steps, metrics)

    def _report(self, step: int, measured: dict[str, Any], clock: "_Clock") -> None:
        values = {name: float(x) for name, x in measured.items()}
        in_a_row = int(values.pop("skipped_in_a_row"))
        if in_a_row:
            self.reporter.line(
                f"warning: the last {in_a_row} update(s) up to step {step} were skipped: loss "
                f"{values['loss']:.4g}, gradient norm {values['gradient_norm']:.4g}"
            )
        if in_a_row >= self.training.most_skipped:
            raise UserError(
                f"training ends at step {step}: {in_a_row} updates in a row were skipped, for they "
                "were not finite, or their gradients larger than training.skip_above allows. Try "
                "a smaller optimizer.learning_rate, or look at the data near this step"
            )
        tokens = self.data.batch_size * self.data.sequence_length
        values["learning_rate"] = float(jnp.asarray(self.schedule(step - 1)))
        values["tokens_per_second"] = rate = tokens * clock.steps_per_second(step)
        utilization = model_flops_utilization(rate, self.flops_per_token)
        if utilization is not None:
            values["mfu"] = utilization
        self.reporter.training(step, values)

    def _look(self, step: int, state: TrainState) -> dict[str, float]:
        """Evaluates, saves, and lets the model write."""
        metrics = evaluate(
            self.evaluation_step,
            state.parameters,
            self.dataset,
            self.data,
            self.mesh,
            max_batches=self.training.evaluation_batches,
            is_causal=self.model.is_causal,
        )
        self.checkpoints.save(step, state, loss=metrics["loss"])
        self.reporter.validation(step, metrics)
        if self.training.sample_tokens:
            text = self._sample(state)
            self.reporter.sample(step, text)
            if self.reporter.active:
                folder = self.workdir / "samples"
                folder.mkdir(exist_ok=True)
                (folder / f"step_{step:08d}.txt").write_text(text, encoding="utf-8")
        return metrics

    def _sample(self, state: TrainState) -> str:
        tokenizer, training = self.dataset.tokenizer, self.training
        prompt = tokenizer.encode_ordinary(training.sample_prompt)
        tokens = generate(
            nnx.merge(self.graph, state.parameters),
            jnp.asarray(prompt, jnp.int32),
            training.sample_tokens,
            temperature=0.8,
            key=jax.random.key(self.seed),
            num_tokens=tokenizer.n_vocab,
        ).tolist()
        end = end_of_text_id(tokenizer)
        tokens = tokens[: tokens.index(end)] if end in tokens else tokens
        return tokenizer.decode(prompt + tokens)

    def _introduce(self, start: int, count: int) -> None:
        split = self.dataset.manifest.splits["train"]
        devices = f"{jax.device_count()} {jax.devices()[0].device_kind} device(s)"
        self.reporter.line(f"{count:,} parameters on {devices}; {split.tokens:,} training tokens")
        if start:
            self.reporter.line(f"continuing {self.workdir} from step {start}")

    def _conclude(self, result: Result) -> None:
        line = self.reporter.line
        if not self.reporter.active:
            return
        if result.signal is not None:
            name = signal.Signals(result.signal).name
            line(f"stopped by {name} after step {result.step}, which is saved in {self.workdir}")
            line("to go on, give the same command again")
            return
        sample = self.workdir / "samples" / f"step_{result.step:08d}.txt"
        if sample.exists():
            line(f"\na sample:\n{sample.read_text(encoding='utf-8')}\n")
        line(f"loss plot: {plot_losses(self.workdir)}")
        if self.model.is_causal:
            line("next, let it write:")
            line(f'  python -m heinsen_jax.generate --workdir {self.workdir} --prompt "..."')


class _Clock:
    """Steps a second since the last look."""

    def __init__(self, step: int):
        self.restart(step)

    def restart(self, step: int) -> None:
        self._step, self._time = step, time.monotonic()

    def steps_per_second(self, step: int) -> float:
        now = time.monotonic()
        rate = (step - self._step) / max(now - self._time, 1e-9)
        self._step, self._time = step, now
        return rate


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT, collected instead of obeyed; a second SIGINT interrupts at once."""
    caught: list[int] = []

    def catch(number: int, _: Any) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    previous = {s: signal.signal(s, catch) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
