"""Executing runs of a study: one run in its folder, and many in processes or on a cluster."""

import contextlib
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import jax
import pydantic
from flax import nnx

from heinsen_jax import data
from heinsen_jax.config import ExperimentConfig, as_json
from heinsen_jax.data import DataConfig, Dataset, Task, TextDataset
from heinsen_jax.errors import UserError, failure, parse_json
from heinsen_jax.models import LanguageModel, flops_per_token
from heinsen_jax.objectives.documents import resolve_documents
from heinsen_jax.objectives.evaluation import evaluate_model
from heinsen_jax.runs.folder import CHECKPOINT_FOLDER, RunFolder
from heinsen_jax.runs.load import load_model
from heinsen_jax.runs.metrics_file import read_evaluations
from heinsen_jax.runs.record import SAVED_FILE, Sections
from heinsen_jax.runtime import on_ray
from heinsen_jax.runtime.allocator import keep_freed_memory
from heinsen_jax.runtime.environment import environment
from heinsen_jax.storage.buckets import absolute_path
from heinsen_jax.storage.files import joint_hash, write_atomically
from heinsen_jax.storage.locks import locked
from heinsen_jax.training import Diverged, train
from heinsen_jax.training.distillation import Distillation, hash_of_weights
from heinsen_jax.training.preflight import tokens_per_update
from heinsen_jax.training.prepare import Modes, prepare_in
from heinsen_jax.training.recorded import splits_of
from studies.grid import Run, describe
from studies.records import RunRecord

CONTENT_FILE = "content.json"
"""Hashes of the data and of the teacher that a run began with."""
LOG_FILE = "log.txt"
RECORD_FILE = "record.json"


class Stopped(Exception):
    """A signal ended a run before its last step; its state is saved."""


def run_one(stages: Sequence[Sections], workdir: Path) -> RunRecord:
    """Train the stages of a run, which are configurations as plain values; return metrics and
    costs. Earlier stages are in folders of their own.

    A stopped run resumes, and a finished one is not repeated. A run that diverged has `failed`
    instead of `metrics`. Output and record are written to its folder, and its checkpoints are
    removed at the end.

    Raises:
      Stopped: a signal stopped the run.
      UserError: it began with other data or another teacher.
    """
    RunFolder(workdir).check_writable()
    with locked(workdir, wait=True):  # until the process of a killed study has exited
        configs = pydantic.TypeAdapter(tuple[ExperimentConfig, ...]).validate_python(stages)
        content = content_of(configs[-1])
        check_content(_read(workdir / CONTENT_FILE) or content, content, str(workdir))
        write_atomically(workdir / CONTENT_FILE, json.dumps(content).encode())
        finished = _read(workdir / RECORD_FILE)
        if finished is None or _lacks_tests(configs[-1], finished):
            finished = _measured(configs, workdir)
            finished["content"] = content
            write_atomically(workdir / RECORD_FILE, json.dumps(finished).encode())
        for folder in _folders(workdir, len(stages)):
            if (folder / SAVED_FILE).exists():  # no checkpoint is missing
                write_atomically(folder / SAVED_FILE, b'{"step": 0}')
            shutil.rmtree(folder / CHECKPOINT_FOLDER, ignore_errors=True)
    return finished


def _folders(workdir: Path, number: int) -> list[Path]:
    """The folders of the stages of a run."""
    return [*(workdir / f"stage_{place}" for place in range(1, number)), workdir]


def _measured(stages: Sequence[ExperimentConfig], workdir: Path) -> RunRecord:
    """The record of a run. Stages before the last are evaluated on one batch only, and the test
    split, if any, after the last."""
    *earlier, last = stages
    stages = [replace(x, training=replace(x.training, evaluation_batches=1)) for x in earlier]
    stages.append(last)
    begin, metrics, failed, start = time.monotonic(), [], "", None
    with (workdir / LOG_FILE).open("a") as log, contextlib.redirect_stdout(log):
        try:
            for folder, config in zip(_folders(workdir, len(stages)), stages, strict=True):
                metrics.append(_trained(config, folder, start))
                start = folder
            metrics[-1] |= _tested(last, workdir)
        except Diverged as error:
            failed = str(error)
    seconds = round(time.monotonic() - begin, 1)
    curve = {str(step): evaluation for step, evaluation in read_evaluations(workdir).items()}
    measured = RunRecord(**costs(*stages), seconds=seconds, environment=environment(), curve=curve)
    if failed:
        measured["failed"] = failed
    else:
        *before, measured["metrics"] = metrics
        if before:
            measured["before"] = before
    return measured


def _trained(config: ExperimentConfig, workdir: Path, start: Path | None) -> dict[str, float]:
    """Train a stage, from the weights in the folder `start`, if any; return its last metrics."""
    if start is not None:
        config = replace(config, distillation=replace(config.distillation, start=str(start)))
    workdir.mkdir(exist_ok=True)
    # content.json has the data and the teacher; paths may change
    ended = train(prepare_in(RunFolder(workdir), config, Modes(allow_change=True)))
    if ended.signal is not None:
        raise Stopped
    return ended.metrics


def _lacks_tests(config: ExperimentConfig, record: RunRecord) -> bool:
    """Whether a record was made before its data had a test split."""
    is_lacking = "metrics" in record and "test_loss" not in record["metrics"]
    return is_lacking and data.load(config.data).has_test


def _tested(config: ExperimentConfig, workdir: Path) -> dict[str, float]:
    """The metrics of a trained model on the whole test split, if the data has one."""
    dataset = cast(Dataset, data.load(config.data))
    if not dataset.has_test:
        return {}
    metrics = evaluate_model(
        load_model(workdir, best=False)[0],
        dataset,
        resolve_documents(config.data, dataset, config.model)[0],
        masked_fraction=config.training.masked_fraction,
        split="test",
        loss_by_position=config.training.loss_by_position,
    )
    return {f"test_{name}": value for name, value in metrics.items()}


def _read(path: Path) -> Any:
    """The content of a file of an earlier call of `run_one`, if any."""
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove it to repeat the run") from None


def content_of(config: ExperimentConfig) -> dict[str, str]:
    """Hashes of a run's tokens and of its teacher's weights, whose files may change under the same
    name; and the number of test examples of a task, which the fingerprint leaves out."""
    hashes, dataset = {}, data.load(config.data)
    if isinstance(config.data, Task) and config.data.test_examples:
        hashes["test examples"] = str(config.data.test_examples)
    if isinstance(dataset, TextDataset):
        hashes["data"] = joint_hash(json.dumps(splits_of(dataset.content), sort_keys=True))
    if distillation := Distillation.of(config.distillation, config.model):
        hashes["teacher"] = distillation.weights_hash
    if (start := config.training.start) is not None:
        hashes["start"] = hash_of_weights(load_model(start, on_host=True)[0])
    return {name: value[:16] for name, value in hashes.items()}


def check_content(then: Mapping[str, str], now: Mapping[str, str], where: str) -> None:
    """Check that a run had the current data and teacher.

    Args:
      then: its recorded hashes, as `content_of` returns them.
      now: the current hashes for its settings.
      where: name of the record, for messages.

    Raises:
      UserError: it had others.
    """
    if changed := sorted(name for name in then if then[name] != now.get(name)):
        raise UserError(
            f"{where}: the {' and the '.join(changed)} have changed since; bring them back, or "
            "give another --output"
        )


class Costs(TypedDict):
    parameters: int
    state_bytes: int
    longest_state_bytes: int
    tokens: int
    flops: NotRequired[float]


def costs(*stages: ExperimentConfig) -> Costs:
    """Number of parameters, bytes of state after a sequence of the training length and of the
    longest one, and tokens and model FLOPs of all updates of all stages. FLOPs are left out with a
    teacher, or if the FLOPs of a mechanism are not counted."""
    config = stages[-1]
    model = LanguageModel.abstract(config.model)
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    length = config.data.sequence_length
    tokens = sum(stage.training.steps * tokens_per_update(stage.data) for stage in stages)
    known: Costs = {
        "parameters": parameters,
        "state_bytes": model.state_size(length),
        "longest_state_bytes": model.state_size(config.data.longest),
        "tokens": tokens,
    }
    flops = flops_per_token(config.model, parameters, length)
    if flops is None or config.distillation.teacher is not None:
        return known
    return {**known, "flops": flops * tokens}


def in_processes(
    runs: Sequence[Run], folder: Callable[[Run], Path], jobs: int
) -> Iterator[tuple[Run, RunRecord]]:
    """Yield each run with its record as they finish. At most `jobs` runs share the cores at a time.

    Raises:
      Stopped: a signal stopped them.
      UserError: a run is invalid, or its process was killed.
    """
    jobs = min(jobs, len(runs))
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(jobs, context, _begin, (context.Value("i", 0), jobs)) as pool:
        waiting = {
            pool.submit(_run_in_pool, [*map(as_json, run.stages)], folder(run)): run for run in runs
        }
        try:
            for done in as_completed(waiting):
                with _named(waiting[done]):
                    finished = done.result()
                yield waiting[done], finished
        except BrokenProcessPool as error:  # of one of the first jobs that have not finished
            unfinished = [run for x, run in waiting.items() if not x.done() or x.exception()]
            names = "; or ".join(describe(run.labels) for run in unfinished[:jobs])
            raise UserError(
                f"{names}: its process was killed, perhaps out of memory; try a smaller --jobs; "
                "the same command resumes"
            ) from error
        except BaseException as error:
            if isinstance(error, SystemExit | GeneratorExit):  # a signal to this process alone
                for process in multiprocessing.active_children():
                    if process not in others:
                        process.terminate()
            pool.shutdown(cancel_futures=True)  # runs that still finish write their records
            raise


def on_cluster(
    runs: Sequence[Run], folder: Callable[[Run], Path], cpus: float, gpus: float
) -> Iterator[tuple[Run, RunRecord]]:
    """Yield each run with its record as they finish, on a Ray cluster, with CPUs and GPUs per run.
    All nodes share the folders of runs and data under these names."""
    by_name = {run.fingerprint: run for run in runs}
    calls = {
        name: ([as_json(_anywhere(x)) for x in run.stages], folder(run).resolve())
        for name, run in by_name.items()
    }
    called = on_ray.calls(run_one, calls, num_cpus=cpus, num_gpus=gpus, max_calls=1)
    yield from ((by_name[name], finished) for name, finished in called)


def _anywhere(config: ExperimentConfig) -> ExperimentConfig:
    """A copy with absolute paths."""
    settings, training, teaching = config.data, config.training, config.distillation
    if training.start is not None:
        training = replace(training, start=absolute_path(training.start))
    if isinstance(settings, DataConfig):
        settings = settings.absolute()
    if (cache := training.compilation_cache) is not None:
        training = replace(training, compilation_cache=absolute_path(cache))
    paths = {"teacher": teaching.teacher, "start": teaching.start}
    given = {field: absolute_path(path) for field, path in paths.items() if path is not None}
    teaching = replace(teaching, **given)
    return replace(config, data=settings, training=training, distillation=teaching)


@contextlib.contextmanager
def _named(run: Run) -> Iterator[None]:
    """Context manager that names the run in errors."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{describe(run.labels)}: {error}") from error


class _Worker:
    is_stopped = False


def _run_in_pool(stages: Sequence[Sections], workdir: Path) -> RunRecord:
    """`run_one` in a process of the pool, which may have its next run when it is stopped."""
    if _Worker.is_stopped:
        raise Stopped
    try:
        return run_one(stages, workdir)
    except (Stopped, KeyboardInterrupt):
        _Worker.is_stopped = True
        raise
    except BaseException as error:  # some of other libraries cannot be sent to the parent
        if (line := failure(error)) is None:
            raise
        raise UserError(line) from None


def available_cores() -> list[int]:
    """The cores that this process may use; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _begin(begun: "Synchronized[int]", jobs: int) -> None:
    """Assign cores to a process, the next one of `jobs`, since XLA has one thread per available
    core; exit with the parent."""
    keep_freed_memory()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with begun.get_lock():
        job, begun.value = begun.value, begun.value + 1
    if cores := available_cores():
        os.sched_setaffinity(0, cores[job::jobs] or cores)


def _end_with_parent() -> None:
    """Exit when the study is killed, instead of training on with a locked folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def folder_name(run: Run) -> str:
    """Readable and unique folder name of a run."""
    words = describe(run.labels).replace(", ", "-").replace(" ", "_").replace("/", "_")
    return f"{words}-{run.fingerprint[:6]}"
