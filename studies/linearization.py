"""Studies of linearization: a trained model, the teacher, gets other attention layers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from heinsen_jax.config import ExperimentConfig
from heinsen_jax.linearize import attention_transfer
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.models.conversion import linear_layers, new_parameters
from heinsen_jax.training.config import DistillationConfig
from studies import sweeps
from studies.grid import FieldValue, Study
from studies.points import Points

ABOUT = """
Runs have 1% to 100% of the teacher's training tokens, with other seeds than the teacher's: half of
them for attention transfer, with peak learning rates of 0.01, the rest for the whole model, with
0.5 cross-entropy + 0.5 KL(teacher || model) and the teacher's optimizer; all of them for the latter
if the new layers have no parameters of their own, or with the label "stage 2 only". Its warm-up has
5% of all updates. "softmax, trained further" is the teacher after the same training, "from scratch"
has no teacher. With decay, merged windows initially have time constants up to the length of
training sequences, log-attention alone up to 4096 tokens. Windows have the teacher's rotary
positions; the other mechanisms encode positions by decay and convolutions only, so that
differences are not of the mechanism alone. "1 of 4 softmax" keeps every fourth layer as it is.
Tokens include both stages.
"""
TRAINED_FURTHER, FROM_SCRATCH, STAGE_2 = "softmax, trained further", "from scratch", "stage 2 only"
DECAY = "decay=head,max_timescale={length}"
MECHANISMS = {
    "log, Hedgehog": "log:features=hedgehog,decay=None",
    "log, Hedgehog, decay": "log:features=hedgehog,decay=head",
    "window of 1 merged with log": "log_window:window_size=1",
    "window of 16 merged with log": "log_window:window_size=16",
    "window of 64 merged with log": "log_window:window_size=64",
    "window of 16 merged with log, decay": "log_window:window_size=16," + DECAY,
    "window of 16": "sliding_window:window_size=16",
    "window of 64": "sliding_window:window_size=64",
    "linear, elu + 1": "linear",
    "Taylor": "taylor",
    "Gated DeltaNet": "gated_deltanet",
}
MERGED = "window of 16 merged with log"
"""The mechanism of the models from scratch."""
MAIN = TRAINED_FURTHER, *MECHANISMS
"""The models without kept layers, with both stages or the only one that they need."""
HYBRID_MECHANISMS = "log, Hedgehog", MERGED, "window of 16", "Gated DeltaNet"
"""Mechanisms with which some softmax layers are kept."""
HYBRIDS = {"1 of 4 softmax": ("3::4",), "1 of 2 softmax": ("1::2",)}
FRACTIONS = 0.01, 0.03, 0.1, 0.3, 1.0
"""Tokens of runs, as fractions of the teacher's."""
SEEDS = 11, 12
COLORS = {
    TRAINED_FURTHER: sweeps.COLORS["softmax"],
    "log, Hedgehog": sweeps.COLORS["log"],
    "log, Hedgehog, decay": sweeps.COLORS["log, decay by head"],
    MERGED: "black",
    "window of 16": "C1",
    "Gated DeltaNet": sweeps.COLORS["Gated DeltaNet"],
}


def models(teacher: LanguageModelConfig, length: int) -> sweeps.Sweep:
    """The teacher's architecture with other attention layers, except windows of `length` tokens,
    which are softmax attention."""
    chosen = {
        label: attention.format(length=length)
        for label, attention in MECHANISMS.items()
        if f"window_size={length}" not in re.split("[:,]", attention)
    }
    sweep: sweeps.Sweep = {TRAINED_FURTHER: {}}
    for label, attention in chosen.items():
        sweep[label] = {"model": linear_layers(teacher, attention)}
    for label in HYBRID_MECHANISMS:
        for words, keep in HYBRIDS.items():
            sweep[f"{label}, {words}"] = {"model": linear_layers(teacher, chosen[label], keep)}
    for label in ("log, Hedgehog", MERGED):
        sweep[f"{label}, {STAGE_2}"] = sweep[label]
    no_teacher: dict[str, FieldValue] = {"distillation": DistillationConfig()}
    return sweep | {f"{MERGED}, {FROM_SCRATCH}": sweep[MERGED] | no_teacher}


def stages(
    labels: Mapping[str, str], config: ExperimentConfig, teacher: LanguageModelConfig
) -> Sequence[ExperimentConfig]:
    """Both stages of a run, with half of its updates each, or stage 2 alone."""
    is_single = config.distillation.teacher is None or labels["model"].endswith(STAGE_2)
    if is_single or not new_parameters(config.model, teacher):
        return (config,)
    first = config.training.steps // 2
    other_batches = replace(config, seed=config.seed + 100)
    rest = replace(config.training, steps=config.training.steps - first)
    return attention_transfer(other_batches, first), replace(config, training=rest)


def study(
    title: str,
    about: str,
    teacher: ExperimentConfig,
    folder: str,
    test_lengths: tuple[int, ...],
    unit: str,
    select: Callable[[Mapping[str, str]], bool],
) -> Study:
    """The linearizations of a teacher.

    Args:
      title: title of the study.
      about: description of the teacher.
      teacher: the teacher's experiment.
      folder: the folder of its run.
      test_lengths: further lengths of sequences in the evaluation.
      unit: unit of the loss.
      select: function of labels that returns whether to run their combination.
    """
    rate, updates = teacher.optimizer.learning_rate, teacher.training.steps
    budgets: sweeps.Sweep = {}
    for fraction in FRACTIONS:
        steps = round(fraction * updates)
        fields: dict[str, FieldValue] = {"training.steps": steps, "training.evaluate_every": steps}
        budgets[f"{fraction:.0%}"] = fields | {"optimizer.warmup_steps": steps // 20}
    last = f"loss_{test_lengths[-1]}"
    sweep = models(teacher.model, teacher.data.sequence_length)
    where = {"model": tuple(label for label in MAIN if label in sweep)}
    return Study(
        title=title,
        about=f"{about.strip()}\n\n{ABOUT.strip()}",
        base=replace(
            teacher,
            data=replace(teacher.data, test_lengths=test_lengths),
            training=replace(teacher.training, loss_by_position=False),
            distillation=DistillationConfig(teacher=folder),
        ),
        axes={
            "model": sweep,
            "tokens": budgets,
            "learning_rate": sweeps.learning_rates(*(rate * 4.0**x for x in range(-3, 2))),
            "seed": sweeps.seeds(*SEEDS),
        },
        search="neighbors",
        extra_metrics=(last,),
        select=select,
        baseline=TRAINED_FURTHER,
        plots=tuple(
            Points(metric, x="tokens", lines="model", unit=unit, highlighted=COLORS, where=where)
            for metric in ("loss", last)
        ),
        stages=lambda labels, config: stages(labels, config, teacher.model),
    )
