"""Measurements in the README and docs are those of the committed records."""

import math
import re
import statistics
import subprocess
from dataclasses import replace

import pytest

from heinsen_jax.config import as_json, load_config, override
from heinsen_jax.models.flops import flops_per_token
from heinsen_jax.models.layers import with_layers
from heinsen_jax.study.runs import costs
from heinsen_jax.training.metrics import PEAK_FLOPS
from heinsen_jax.training.optimizer import learning_rates
from tests.docs.pages import (
    PAGES,
    PAGES_TEXT,
    README,
    README_TEXT,
    ROOT,
    read_record,
    table,
)


@pytest.mark.parametrize("name", ["quickstart", "shakespeare_char_cpu"])
def test_losses_are_those_of_the_results(name):
    measured = read_record(name)
    assert f"{measured['final']['loss']:.2f} | {measured['unigram_loss']:.2f}" in PAGES
    now = as_json(load_config(ROOT / "configs" / f"{name}.py"))
    for part in ("model", "data", "optimizer", "training"):  # newer fields have no effect
        fields = with_layers(measured["config"][part])
        assert fields == {field: now[part][field] for field in fields}


def test_mechanisms_are_compared_with_the_results():
    of = read_record("mechanisms")["mechanisms"]
    seconds = {name: x["forward_backward_seconds"]["16384"] for name, x in of.items()}
    states = {name: x["state_bytes"]["16384"] for name, x in of.items() if x["state_bytes"]}
    assert f"needs {seconds['log']:.2f} s where softmax attention" in PAGES
    assert f"attention needs {seconds['softmax']:.1f} s" in PAGES
    assert f"{states['log'] / 1e3:.0f} kB of state" in README_TEXT
    assert f"needs {states['softmax'] / 1e6:.1f} MB" in PAGES
    decoding = {
        name: {n: round(1e6 * x) for n, x in of[name]["decode_seconds"].items()}
        for name in ("log", "softmax")
    }
    log, softmax = decoding["log"], decoding["softmax"]
    assert {round(x, -1) for x in log.values()} == {20}
    assert f"log-attention needs {log['16384']} µs after any number of tokens" in PAGES
    assert softmax["512"] < log["512"]
    assert softmax["1024"] > log["1024"]
    assert f"{softmax['1024']} µs after 1024, and {softmax['16384']} µs after 16,384" in PAGES


def test_speeds_are_those_of_the_results():
    measured = read_record("log_attention_cpu")
    seconds, ratios = measured["speed_seconds"], measured["ratios"]
    assert f"{1e3 * seconds['scan']:.0f} ms | {1e3 * seconds['chunked']:.1f} ms" in PAGES
    assert f"{ratios['speed']:.0f} times as fast" in PAGES
    assert f"{100 * ratios['memory']:.1f}%" in PAGES
    for page in (README, PAGES.removeprefix(README)):
        assert f"{ratios['decoding']:.2f} times" in page
    per_token = {n: 1e6 * s / int(n) for n, s in measured["seconds_per_length"].items()}
    times = f"{per_token['1024']:.1f} µs at 1024 tokens, {per_token['4096']:.1f} at 4096"
    decoding = 1e6 * measured["decoding_seconds"]["1000000"]
    assert f"Decoding a token needs {decoding:.1f} µs after 1,000,000" in PAGES
    assert f"{times} and {per_token['65536']:.1f} at 65,536" in PAGES


def test_worst_errors_are_those_of_the_results():
    shown = "\n".join(table("numerics"))
    worst = [
        (implementation, dtype, measured["worst"])
        for implementation, by_type in read_record("numerics")["errors"].items()
        for dtype, measured in by_type.items()
    ]
    assert len(worst) == 8
    for implementation, dtype, errors in worst:
        cells = f"{errors['value']:.0e} | {errors['gradient_norm']:.0e}"
        assert f"| `{implementation}`, {dtype} | {cells} |" in shown


@pytest.mark.parametrize(
    ("peers", "name", "label"),
    [
        ("torch", "original", "the original PyTorch code"),
        ("torch", "softmax", "PyTorch's `scaled_dot_product_attention`"),
        ("jla", "jla", "jax-linear-attention, which is correct for moderate inputs only"),
    ],
)
def test_comparisons_are_those_of_the_results(peers, name, label):
    lengths = read_record(f"comparison_{peers}")["lengths"]
    ratios = [lengths[length]["times_as_fast"][name] for length in ("1024", "4096")]
    assert f"| {label} | {ratios[0]:.1f} | {ratios[1]:.1f} |" in table("comparison")
    if name == "original":
        assert f"{min(ratios):.0f} times as fast as the original" in README


GATED = {
    "linear": "`linear_attention`",
    "log": "log-attention, `heinsen_attention`",
    "no gates": "no gates",
    "mamba2": "decay by head (Mamba-2)",
    "gla": "decay by feature (GLA)",
    "deltanet": "erasure (DeltaNet)",
    "gated_deltanet": "decay by head, erasure (Gated DeltaNet)",
    "kda": "decay by feature, erasure (KDA)",
    "mlstm": "`mlstm_attention`",
    "gla, large decays": "decay by feature, large",
    "kda, large decays": "decay by feature, large, and erasure",
}
"""Rows of the table of the gated delta rule."""
RIVALS = {"mamba2": "Mamba-2", "gla": "GLA", "gated_deltanet": "Gated DeltaNet", "kda": "KDA"}


def test_times_of_the_gated_delta_rule_are_those_of_the_results():
    measured = read_record("gated")
    assert all(measured["requirements"].values())
    times = measured["times_linear"]
    names = {name for name in times if "devices" not in name}
    assert table("gated") == [f"| {label} | {times[x]:.2f} |" for x, label in GATED.items()]
    assert names == GATED.keys()
    for name in ("gla", "kda"):
        assert f"{measured['exchanged_bytes'][name]:,}" in PAGES_TEXT
        assert f"{times[f'{name}, two devices'] / times[name]:.2f} times" in PAGES_TEXT
    mechanisms = read_record("comparison_jla")["gated_delta_rule"]
    for name, of_short in mechanisms["1024"].items():
        of_long = mechanisms["4096"][name]
        assert of_short["met"]
        assert of_long["met"]
        ratios = of_short["times_as_fast"], of_long["times_as_fast"]
        row = f"| {RIVALS[name]} | {ratios[0]:.1f} | {ratios[1]:.1f} |"
        assert row in table("gated comparison")


TIERS = {
    "two": "keys that rise too far for the fast tier",
    "two, decay": "the same, with decay of each key feature",
    "terms": "such keys, and queries with other largest features, 80 nats apart",
    "terms, decay": "the same, with decay of each key feature",
    "three": "log-values whose exponentials do not fit",
    "three, decay": "the same, with decay of each key feature",
}
"""Rows of the table of tiers."""


def test_costs_of_exactness_are_those_of_the_results():
    measured = read_record("tiers")
    lengths = [measured["tiers"]["log_attention"][n]["times_tier_one"] for n in ("1024", "4096")]
    worst = max(max(of.values()) for of in lengths)
    assert f"cost up to {worst:.1f} times as much as ordinary ones" in README_TEXT
    assert table("tiers") == [
        f"| {label} | {lengths[0][tier]:.1f} | {lengths[1][tier]:.1f} |"
        for tier, label in TIERS.items()
    ]
    assert f"needs {max(0, 100 * measured['test']['cost']):.0f}% of that tier's time" in PAGES_TEXT
    assert (
        f"reach {100 * measured['matmul']['fraction']:.0f}% of the floating-point rate"
        in PAGES_TEXT
    )


def test_shared_contexts_are_those_of_the_results():
    for row in read_record("harness")["rows"]:
        assert f"\n| {row['length']} | {row['times_as_fast']:.1f} |" in PAGES


def test_costs_of_separate_documents_are_those_of_the_results():
    rows = read_record("documents")["rows"]
    shown = "\n".join(table("documents"))
    names = {"log-attention": "log", "softmax attention": "softmax"}
    names["Gated DeltaNet"] = "gated_deltanet"
    for label, name in names.items():
        ratios = {row["length"]: f"{row['ratio']:.2f}" for row in rows if row["attention"] == name}
        assert f"| {label} | {ratios[256]} | {ratios[1024]} |" in shown
    worst, largest = (max(row[x] for row in rows) - 1 for x in ("ratio", "ratio_of_programs"))
    said = f"needs at most {math.ceil(100 * worst)}% more time, and its program is up to "
    assert f"{said}{math.ceil(100 * largest)}% larger" in PAGES_TEXT


def test_a_million_tokens_are_those_of_the_results():
    measured = read_record("million_tokens")
    assert measured["rows"][-1]["tokens"] == 1_000_000
    worst = max(row["largest_difference"] for row in measured["rows"])
    assert f"is farther than {worst:.0e} from float64's" in PAGES


def test_training_steps_are_those_of_the_results():
    measured = read_record("training_step")
    seconds, profile = measured["seconds"], measured["profile"]
    assert f"needs {1e3 * seconds['ours']:.1f} ms" in PAGES
    assert f"trains it in PyTorch, {1e3 * seconds['peer']:.1f} ms" in PAGES
    shares = f"{100 * profile['log_attention']:.0f}% of the time in log-attention itself, and "
    shares += f"{100 * profile['attention']:.0f}% in the rest of the attention layers"
    assert shares in PAGES_TEXT


def test_costs_of_the_full_size_are_those_of_the_configuration():
    config = load_config("heinsen_125m_pile")
    flops = []
    for model in (config.model, load_config("gpt2_small_pile").model):
        parameters = costs(replace(config, model=model))["parameters"]
        flops.append(flops_per_token(model, parameters, config.data.sequence_length))
    assert f"costs {flops[0] / 1e9:.3f} GFLOPs of training" in PAGES_TEXT
    assert f"almost as many parameters, {flops[1] / 1e9:.3f}, because" in PAGES_TEXT
    assert f"{config.training.steps:,} updates of {config.data.batch_size} sequences" in PAGES_TEXT
    shown = "\n".join(table("full size"))
    tokens = config.training.steps * config.data.sequence_length * config.data.batch_size
    for mfu in (10, 20, 40, 50):
        rate = PEAK_FLOPS["NVIDIA H100 80GB HBM3"] * mfu / 100
        hours = [x * tokens / rate / 3600 for x in flops]
        assert f"| {mfu}% | {hours[0]:.0f} | {hours[1]:.0f} |" in shown
    ours, of_gpt2 = (x * 5 / 4 for x in hours)
    both = ours + of_gpt2
    said = f"At 40%, both full runs need {both:.0f} GPU hours: {ours / 8:.0f} hours of the node "
    said += f"for the paper's model, {of_gpt2 / 8:.0f} for GPT-2 small. At 20%, they need "
    assert f"{said}{2 * both:.0f}, and at 10%, {4 * both:,.0f}." in PAGES_TEXT
    assert f"{2 * tokens / 1e9:.0f} GB, 2 bytes per token" in PAGES_TEXT
    pilot = 2 * both * 19_000 / config.training.steps
    assert f"two seeds each: {pilot:.0f} GPU hours at 40%, {2 * pilot:.0f} at 20%" in PAGES_TEXT
    said = f"{ours / 8:.0f} to {round(ours / 2, -1):.0f} hours, 8 H100s"
    assert said in PAGES_TEXT


def test_first_updates_of_the_full_size_are_those_of_the_record():
    record = read_record("paper_model")
    names = {"the paper's model": "heinsen_125m", "GPT-2 small": "gpt2_small"}
    assert list(names.values()) == [*record["models"]]
    for line, (shown, name) in zip(table("paper model"), names.items(), strict=True):
        found = record["models"][name]
        losses = [*found["loss"].values()]
        means = (statistics.mean(losses[end - 10 : end]) for end in (100, 200))
        cells = [shown, f"{found['parameters']:,}", *(f"{x:.2f}" for x in means)]
        cells += [f"{found['validation_loss']:.2f}", f"{found['seconds_per_update']:.1f}"]
        assert line == f"| {' | '.join(cells)} | {found['peak_bytes'] / 1e9:.1f} GB |"
    settings = {"updates": 200, "batch_size": 2, "sequence_length": 512}
    assert record["settings"].items() >= settings.items()
    assert record["environment"]["cpu"] == "AMD EPYC"
    ours, theirs = (record["models"][name]["validation_loss"] for name in names.values())
    assert ours > theirs
    assert "GPT-2 small is ahead after 200 updates." in PAGES_TEXT


def test_commands_of_the_full_size_are_accepted():
    """Bash prints the commands of the plan, since `python` is a function that prints."""
    steps = re.findall(r"```bash\n(.*?)```", PAGES.partition("<!-- plan -->")[2], re.DOTALL)[:3]
    plan = "".join(steps)
    script = f'python() {{ echo "$@"; }}\n{plan}'
    printed = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
    commands = [line.split() for line in printed.stdout.splitlines()]
    folders = []
    for program, _, config, _, folder, *fields in (x for x in commands if x[0] != "-m"):
        assert (ROOT / program).exists()
        chosen = override(load_config(ROOT / config), fields)
        assert len(learning_rates(chosen.optimizer, chosen.training.steps))
        folders.append(folder)
    assert len(folders) == len({*folders}) == 8
    evaluated = [x for x in commands if x[0] == "-m"]
    assert [x[:3] for x in evaluated] == [["-m", "heinsen_jax.evaluate", "--workdir"]] * 2
    assert [x[3] for x in evaluated] == [x for x in folders if x.endswith("-full")]


def test_speeds_on_a_gpu_are_those_of_the_records():
    record = read_record("gpu_attention")
    assert (record["environment"]["device"], {x["depth"] for x in record["shapes"]}) == (
        "NVIDIA H100 80GB HBM3",
        {64},
    )
    seconds = {}
    for line, shape in zip(table("gpu attention"), record["shapes"], strict=True):
        of = shape["results"]
        ways = ("chunked", "gpu", "cudnn", "torch softmax")
        times = [of[way]["seconds"]["both"] for way in ways]
        seconds[shape["length"]] = dict(zip(ways, times, strict=True))
        cells = [f"{shape['length']:,}", *(f"{1e3 * x:.1f}" for x in times)]
        assert line == f"| {' | '.join(cells)} |"
    assert "OutOfMemory" in record["shapes"][0]["results"]["torch original"]["refused"]
    single, long = seconds[65_536], seconds[8192]
    said = f"need {single['gpu'] / single['chunked']:.1f} times as long as `chunked`"
    assert said in PAGES_TEXT
    assert long["cudnn"] / long["chunked"] == pytest.approx(1, abs=0.02)
    assert f"{long['cudnn'] / long['gpu']:.1f} times as fast there with experimental" in README_TEXT
    assert max(seconds[1024]["cudnn"] / seconds[1024][way] for way in ("gpu", "chunked")) < 1
    errors = {name: f"{100 * x:.1f}%" for name, x in record["relative_errors"]["bfloat16"].items()}
    said = f"are {errors['gpu']} for the kernels and {errors['chunked']} for `chunked`"
    assert said in PAGES_TEXT
    original = record["relative_errors"]["bfloat16"]["torch original"]
    assert f"operation in bfloat16, has {100 * original:.0f}%" in PAGES_TEXT


def test_speeds_on_an_h200_are_those_of_the_record():
    record = read_record("gpu_attention_h200")
    assert record["environment"]["device"] == "NVIDIA H200"
    seconds = {}
    for line, shape in zip(table("gpu attention h200"), record["shapes"], strict=True):
        times = {
            way: shape["results"][way].get("seconds", {}).get("both", math.nan)
            for way in ("chunked", "gpu", "cudnn", "torch softmax")
        }
        sizes = shape["dtype"], shape["depth"], shape["length"]
        seconds[sizes] = times
        cells = (f"{1e3 * x:.1f}".replace("nan", "–") for x in times.values())
        assert line == f"| {sizes[0]} | {sizes[1]} | {sizes[2]:,} | {' | '.join(cells)} |"
    for length in (1024, 8192):
        *_, kernels, cudnn, torch = seconds["bfloat16", 32, length].values()
        assert kernels < min(cudnn, torch)
    assert ("float32", 64, 8192) not in seconds
    for (dtype, _, length), times in seconds.items():
        is_faster = times["gpu"] < times["chunked"]
        assert is_faster == (dtype == "bfloat16" or length == 1024)
    original = [
        1e3 * shape["results"]["torch original"]["seconds"]["both"]
        for shape in record["shapes"]
        if "seconds" in shape["results"]["torch original"]
    ]
    said = f"needs {min(original):.0f} to {max(original):.0f} ms at 1024 tokens."
    assert f"The original's formula {said}" in PAGES_TEXT
    errors = record["relative_errors"]["float32"]
    assert f"{errors['gpu']:.1e} for the kernels, {errors['chunked']:.1e} for" in PAGES_TEXT
    assert f"and {errors['torch original']:.1e} for the original's formula" in PAGES_TEXT


def test_training_on_a_gpu_is_that_of_the_record():
    steps = read_record("gpu_training")["steps"]
    assert {(x["rows"], x["remat_policy"]) for x in steps} == {(32, "all")}
    for line, step in zip(table("gpu training"), steps, strict=True):
        speed = f"{step['tokens_per_second']:,.0f} | {100 * step['utilization']:.0f}%"
        assert line.endswith(f" | {speed} | {step['bytes'] / 1e9:.0f} GB |")
        assert step["implementation"] in line
    chunked, kernels, _ = (f"{100 * step['utilization']:.0f}%" for step in steps)
    assert f"MFU of the paper's model was {chunked}, and {kernels} with the" in PAGES_TEXT
    rates = [step["utilization"] / step["tokens_per_second"] for step in steps[1:]]
    gflops = [f"{989e3 * rate:.2f}" for rate in rates]
    assert f"{gflops[0]} GFLOPs with log-attention and {gflops[1]} with softmax" in PAGES_TEXT
    hours = [300e9 / step["tokens_per_second"] / 8 / 3600 for step in steps[:2]]
    said = f"the full run needs {hours[0]:.0f} hours, or {hours[1]:.0f} with the kernels"
    assert said in PAGES_TEXT
    losses = {
        x["step"]: x["validation/loss"] for x in read_record("shakespeare_char")["validation"]
    }
    best = min(losses, key=losses.__getitem__)
    assert f"lowest, {losses[best]:.2f}, after {best} of 5000 updates" in PAGES_TEXT
    assert f"after {max(losses)}, it is {losses[max(losses)]:.2f}" in PAGES_TEXT


def test_generation_on_a_gpu_is_that_of_the_record():
    record = read_record("gpu_decoding")
    sizes = "77 GB probably did not fit twice in the {:.0f} GB that JAX may use by default."
    assert sizes.format(record["memory"] / 0.8e9) in PAGES_TEXT
    assert record["environment"]["device"] == "NVIDIA H200"
    of = {(x["model"], x["batch"], x["context"]): x for x in record["rows"]}
    models = [(model, batch) for batch in (1, 16) for model in ("log", "softmax")]
    contexts = 4096, 32_768, 1_048_576
    assert len(of) == len(models) * len(contexts)
    for line, (model, batch) in zip(table("gpu decoding"), models, strict=True):
        rows = [of[model, batch, context] for context in contexts]
        cells = [f"{1e3 * x['seconds']:.1f}" if "seconds" in x else x["refused"] for x in rows]
        name = {"log": "log-attention", "softmax": "softmax attention"}[model]
        assert line == f"| {name} | {batch} | {' | '.join(cells)} |"
    assert f"state needs {of['log', 1, 4096]['bytes'] / 1e6:.1f} MB per sequence" in PAGES_TEXT
    caches = [of["softmax", 1, context]["bytes"] for context in contexts]
    said = f"need {caches[0] / 1e6:.0f} MB after 4096 tokens and {caches[2] / 1e9:.0f} GB after"
    assert said in PAGES_TEXT
    roof = caches[1] / read_record("gpu_attention_h200")["card"]["bytes_a_second"]
    times = 1e3 * roof, 16e3 * roof
    said = "needs {:.1f} ms at batch 1 and {:.1f} ms at batch 16, at the measured bandwidth,"
    assert said.format(*times) in PAGES_TEXT
    shares = [n * roof / of["softmax", n, 32_768]["seconds"] for n in (1, 16)]
    assert shares == pytest.approx([1 / 3, 2 / 3], rel=0.05)
