"""Language models of Python code, chosen by validation files and reported on test files.

python -m studies code_contexts --jobs 2

Needs about fifteen hours on two CPU cores.
"""

from collections.abc import Mapping
from dataclasses import replace

from heinsen_jax.config import load_config
from heinsen_jax.models import Layers
from studies import LengthPlot, Points, PositionPlot, Ranking, Study, sweeps
from studies.grid import FieldValue

Fields = dict[str, FieldValue]

ABOUT = """
600 updates of 8 x 512 tokens of the library of Python 3.11, with separate files and tokens of 3
bytes on average, by Muon. A twentieth of the files chooses the learning rates; losses are of
another twentieth, in nats per token, on the same tokens in sequences of 32 to 2048: shorter ones
show how much a model benefits from context, the longest whether it extrapolates. In the plot by
position, a point is the mean from half of its position to it, in sequences of 2048 tokens; it
compares models, not positions, as tokens differ.

All models have four layers of width 128 with a convolution of 4 tokens before each branch, and MLPs
whose width is chosen so that they have 1.05M to 1.07M parameters. They have four heads, if no other
number is given; fewer heads are larger, and so is their state. In hybrids, softmax attention has no
positions, or ALiBi; "alternating" has two layers of each kind. Windows have rotary positions. Keys
of Mamba-2, its state size per channel, have 32 numbers like keys of the other mechanisms; 128 were
published. Llama's block has SwiGLU, and no convolution but those that belong to Gated DeltaNet.
Learning rates of 22 models were searched; the others have log-attention's. The grid has three seeds
for six models, of which the table has the finished ones, and one for the others. The second seed of
Gated DeltaNet of one head is much worse than the first at the rate that was the best for it.
"""
LENGTHS = 32, 128, 512, 2048
BASELINE = "log, decay by head"
RATE = "0.016"
"""The learning rate of models for which it is not searched: log-attention's."""
BEST = (
    *(BASELINE, "softmax, ALiBi", "Gated DeltaNet, 1 head", "3 log, then softmax"),
    *("3 Gated DeltaNet of 1 head, then softmax", "alternating log and window of 64"),
)
"""Models with three seeds, and in the studies of more updates and of another corpus."""
COLORS = {
    BASELINE: sweeps.COLORS["log, decay by head"],
    "softmax, ALiBi": sweeps.COLORS["softmax"],
    "FoX": sweeps.COLORS["FoX"],
    "Gated DeltaNet, 1 head": sweeps.COLORS["Gated DeltaNet"],
    "3 Gated DeltaNet of 1 head, then softmax": "C1",
    "3 log, then softmax": "C3",
    "alternating log and window of 64": "black",
}
GATED, KIMI = "gated_deltanet", "kda"
ONE_HEAD = Layers(
    GATED,
    options={"num_key_heads": 1, "num_value_heads": 1, "key_depth": 96, "value_depth": 192},
)
MAMBA2 = Layers("mamba2", options={"key_depth": 32})
LLAMA: Fields = {"model.block": "llama"}
ALIBI = Layers("softmax", options={"positions": "alibi"})


def model(
    attention: Layers | str | tuple[Layers | str, ...], mlp_dim: int = 512, num_heads: int = 4
) -> Fields:
    sizes: Fields = {"model.mlp_dim": mlp_dim, "model.num_heads": num_heads}
    return {"model.attention": attention, **sizes}


def three(layer: Layers | str, mlp_dim: int = 512, last: Layers = sweeps.SOFTMAX) -> Fields:
    """Fields of three equal layers and another one."""
    first = Layers(layer) if isinstance(layer, str) else layer
    return model((replace(first, repeats=3), last), mlp_dim)


def models() -> sweeps.Sweep:
    slots = Layers("log", options=sweeps.SLOTS | {"value_depth": 32})
    one_key = Layers("gqa", options={"num_kv_heads": 1, "positions": "alibi"})
    return {
        **tuned(),
        "3 log, then softmax with ALiBi": three("log", last=ALIBI),
        "3 Gated DeltaNet, then softmax with ALiBi": three(GATED, 416, ALIBI),
        "3 Gated DeltaNet of 1 head, then softmax with ALiBi": three(ONE_HEAD, 416, ALIBI),
        "alternating log and softmax": model(("log", sweeps.SOFTMAX)),
        "alternating Gated DeltaNet and softmax": model((GATED, sweeps.SOFTMAX), 448),
        "alternating Gated DeltaNet and window of 64": model((GATED, sweeps.WINDOW), 448),
        "softmax, ALiBi, one key/value head": model(one_key, 608),
        "log, slots": model(slots, 576),
    }


def is_run(labels: Mapping[str, str]) -> bool:
    """Whether a model is run with a learning rate and a seed."""
    is_tried = labels["model"] in tuned() or labels["learning_rate"] == RATE
    return is_tried and (labels["seed"] == "1" or labels["model"] in BEST)


def tuned() -> sweeps.Sweep:
    """Models whose learning rates are searched."""
    return {
        BASELINE: model("log"),
        "softmax, no positions": model(sweeps.SOFTMAX),
        "softmax, ALiBi": model(ALIBI),
        "softmax, rotary": model("softmax"),
        "FoX": model("fox"),
        "Gated DeltaNet": model(GATED, 384),
        "3 log, then softmax": three("log"),
        "3 Gated DeltaNet, then softmax": three(GATED, 416),
        "Gated DeltaNet, 1 head": model(GATED, 384, num_heads=1),
        "3 Gated DeltaNet of 1 head, then softmax": three(ONE_HEAD, 416),
        "Kimi Delta Attention, 1 head": model(KIMI, 256, num_heads=1),
        "log, decay by head, 1 head": model("log", num_heads=1),
        "Kimi Delta Attention": model(KIMI, 448),
        "Mamba-2": model(MAMBA2, 352),
        "Taylor": model("taylor", 608),
        "window of 64, rotary": model(sweeps.WINDOW),
        "alternating log and window of 64": model(("log", sweeps.WINDOW)),
        "3 Kimi Delta Attention, then softmax": three(KIMI, 464),
        "3 Mamba-2, then softmax": three(MAMBA2, 384),
        "3 windows of 64, then softmax": three(sweeps.WINDOW),
        "softmax, rotary, Llama's block": model("softmax", 352) | LLAMA,
        "Gated DeltaNet, Llama's block": model(GATED, 256) | LLAMA,
    }


def get_study() -> Study:
    base = load_config("python_code")
    training = replace(base.training, log_every=200, evaluation_batches=50, sample_tokens=0)
    return Study(
        title="Python code: loss and context",
        about=ABOUT,
        base=replace(
            base,
            data=replace(base.data, test_fraction=0.05, test_lengths=LENGTHS),
            optimizer=replace(base.optimizer, name="muon"),
            training=training,
        ),
        axes={
            "model": models(),
            "learning_rate": sweeps.learning_rates(*(2**n * 1e-3 for n in range(1, 8))),
            "seed": sweeps.seeds(1, 2, 3),
        },
        select=is_run,
        search="neighbors",
        metric="test_loss",
        selected_by="loss",
        extra_metrics=tuple(f"test_loss_{length}" for length in LENGTHS if length != 512),
        baseline=BASELINE,
        plots=(
            Points(
                "test_loss_2048",
                x="longest_state_bytes",
                lines="model",
                title="Loss on sequences of 2048 tokens",
                unit="nats per token",
                frontier=True,
                highlighted=COLORS,
            ),
            Ranking(
                "test_loss_2048",
                title="Loss on sequences of 2048 tokens",
                unit="nats per token",
                highlighted=COLORS,
                baseline=BASELINE,
            ),
            LengthPlot(
                LENGTHS,
                metric="test_loss",
                lines="model",
                unit="nats per token",
                highlighted=COLORS,
            ),
            PositionPlot(
                LENGTHS[-1],
                metric="test_loss",
                lines="model",
                unit="nats per token",
                highlighted=COLORS,
            ),
        ),
    )
