"""Examples of the README and docs run; their figures are those of the committed results."""

import ast
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from heinsen_jax import attention
from heinsen_jax.attention.matrix_state import MatrixStateAttention
from heinsen_jax.config import as_json, load_config
from heinsen_jax.models import LanguageModel
from heinsen_jax.models.flops import flops_per_token
from heinsen_jax.models.layers import with_layers
from heinsen_jax.study import Comparison, Difference, differences_of, load_study, results_of
from heinsen_jax.study.differences import holm
from heinsen_jax.study.paragraphs import paragraphs
from heinsen_jax.study.runner import run_study
from heinsen_jax.study.runs import costs
from heinsen_jax.training.metrics import PEAK_FLOPS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
README_TEXT = " ".join(README.split())
PAGES = "\n".join([README, *(page.read_text() for page in sorted(ROOT.glob("docs/*.md")))])
STUDY_PAGE = (ROOT / "docs/studies.md").read_text()
STUDY_TEXT = " ".join(STUDY_PAGE.split())
STUDIES = sorted((ROOT / "benchmarks/results/studies").glob("*"))
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", PAGES, re.DOTALL))


def result(name: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def results_of_study(name: str) -> list[Comparison]:
    study = load_study(ROOT / f"configs/studies/{name}.py")
    return results_of(study, ROOT / "benchmarks/results/studies" / name)


def results_by_model(name: str) -> dict[str, Comparison]:
    return {x.compared["model"]: x for x in results_of_study(name)}


def adjusted_p_values(differences: Sequence[Difference], metric: str) -> dict[str, float]:
    """Holm's adjusted p-values of the differences of models in a metric, by model."""
    found = {x.compared["model"]: x.p_value for x in differences if x.metric == metric}
    return holm({model: p for model, p in found.items() if p is not None})


SHORT = "layer", "tiny"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in SHORT)) for name in EXAMPLES],
)
def test_examples_run(name, capsys):
    defined: dict = {}
    exec(compile(EXAMPLES[name], name, "exec"), defined)
    if name == "tiny":
        defined["get_config"]()
    elif name not in ("keywords", "data", "study"):
        limit = 0.01 if name == "model" else 1e-4  # a loss, or the size of rounding errors
        assert float(capsys.readouterr().out) < limit


def test_the_example_of_a_study_is_checked_and_reported(tmp_path):
    environment = {"cpu": "a CPU", "backend": "cpu", "device": "cpu", "jax": "1"}
    environment |= {"commit": "abc", "uncommitted_changes": False}
    metrics = {name: 0.5 for name in ("accuracy_32", "accuracy_64", "accuracy_256")}
    row = {"metrics": metrics, "parameters": 1, "state_bytes": 1, "environment": environment}
    file = tmp_path / "induction_lengths.py"
    file.write_text(EXAMPLES["study"])
    run_study(load_study(file), tmp_path, lambda runs, folder: ((run, row) for run in runs))
    assert "9 of 9 runs" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.png").exists()


def test_links_are_valid():
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_number_of_mechanisms_is_right():
    others = len(attention.names()) - 1
    assert f"It also has {others} other mechanisms" in README_TEXT


def test_the_table_of_mechanisms_names_all():
    table = README.partition("| name and paper | mechanism | state | |\n")[2].partition("\n\n")[0]
    names = " ".join(row.split("|")[1] for row in table.splitlines()[1:])
    assert sorted(re.findall(r"`(\w+)`", names)) == sorted(attention.names())


@pytest.mark.parametrize("name", attention.names())
def test_mechanisms_link_the_paper_that_their_layer_cites(name):
    cited = re.search(r"arXiv:(\d{4}\.\d{5})", attention.mechanism(name).__doc__ or "")
    cell = f"[`{name}`](https://arxiv.org/abs/{cited[1]})" if cited else f"`{name}`"
    assert cell in README


def test_results_that_are_not_finite_are_those_of_the_notebook(capsys):
    script = (ROOT / "notebooks/3_numbers_at_the_edge.py").read_text()
    first, last = script.index("import jax\n"), script.index("# ## The state of no tokens")
    with jax.numpy_rank_promotion("allow"):
        exec(compile(script[first:last], "notebook 3", "exec"), {})
    shown = capsys.readouterr().out.partition("rising by 1.0 nats per token\n")[2]
    simple, ours = re.findall(r"not finite: +(\d+) of 2048", shown)[:2]
    said = re.search(r"(\d+) of 2048 results are not finite with one maximum", README_TEXT)
    assert said
    assert int(said[1]) == pytest.approx(int(simple), rel=0.01)
    assert int(ours) == 0


def size_row(label: str) -> str:
    """Return the row of the table of sizes for a layer and its options, such as `gated=False`."""
    name, *options = re.findall("`(.*?)`", label)
    fields = (option.split("=") for option in options)
    config = {field: ast.literal_eval(value) for field, value in fields}
    build = partial(attention.build, name, model_dim=128, num_heads=4, **config)
    layer: Any = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(layer, nnx.Param)))
    state_bytes = f"{layer.state_size(1):,}"
    if layer.state_size(2) != layer.state_size(1):
        state_bytes += " per token"
    depths = f"{layer.key_depth} | {layer.value_depth}"
    return f"| {label} | {depths} | {parameters:,} | {state_bytes} |"


def test_sizes_of_layers_are_those_of_the_table():
    page = (ROOT / "docs/mechanisms.md").read_text()
    table = page.partition("<!-- sizes -->\n")[2].partition("\n\n")[0]
    rows = {row.split("|")[1].strip(): row for row in table.splitlines()[2:]}
    assert {label: size_row(label) for label in rows} == rows
    kinds = {name: attention.mechanism(name) for name in attention.names()}
    named = {f"`{x}`" for x, kind in kinds.items() if issubclass(kind, MatrixStateAttention)}
    assert named
    assert named <= rows.keys()


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_examples_exist():
    needed = {"layer", "nnx", "linen", "data", "state", "keywords", "mechanism"}
    needed |= {"flax_nnx", "flax_linen", "tiny"}
    assert needed <= set(EXAMPLES)


@pytest.mark.parametrize("name", ["quickstart", "shakespeare_char_cpu"])
def test_losses_are_those_of_the_results(name):
    measured = result(name)
    assert f"{measured['final']['loss']:.2f} | {measured['unigram_loss']:.2f}" in PAGES
    now = as_json(load_config(ROOT / "configs" / f"{name}.py"))
    for part in ("model", "data", "optimizer", "training"):  # newer fields have no effect
        fields = with_layers(measured["config"][part])
        assert fields == {field: now[part][field] for field in fields}


def test_mechanisms_are_compared_with_the_results():
    of = result("mechanisms")["mechanisms"]
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
    assert f"log-attention takes {log['16384']} µs after any number of tokens" in PAGES
    assert softmax["512"] < log["512"]
    assert softmax["1024"] > log["1024"]
    assert f"{softmax['1024']} µs after 1024, and {softmax['16384']} µs after 16,384" in PAGES


def test_speeds_are_those_of_the_results():
    measured = result("log_attention_cpu")
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
    table = PAGES.partition("<!-- numerics -->")[2].partition("\n\n")[0]
    worst = [
        (implementation, dtype, measured["worst"])
        for implementation, by_type in result("numerics")["errors"].items()
        for dtype, measured in by_type.items()
    ]
    assert len(worst) == 8
    for implementation, dtype, errors in worst:
        cells = f"{errors['value']:.0e} | {errors['gradient_norm']:.0e}"
        assert f"| `{implementation}`, {dtype} | {cells} |" in table


@pytest.mark.parametrize(
    ("peers", "name"), [("torch", "original"), ("torch", "softmax"), ("jla", "jla")]
)
def test_comparisons_are_those_of_the_results(peers, name):
    lengths = result(f"comparison_{peers}")["lengths"]
    ratios = [lengths[length]["times_as_fast"][name] for length in ("1024", "4096")]
    assert f"| {ratios[0]:.1f} | {ratios[1]:.1f} |" in PAGES
    if name == "original":
        assert f"{min(ratios):.0f} times as fast as the original" in README


def test_times_of_the_gated_delta_rule_are_those_of_the_results():
    measured = result("gated")
    assert all(measured["requirements"].values())
    table = PAGES.partition("<!-- gated -->")[2].partition("\n\n")[0]
    times = measured["times_linear"]
    cells = [row.split("|")[2].strip() for row in table.strip().splitlines()[2:]]
    names = [name for name in times if "devices" not in name]
    assert sorted(cells) == sorted(f"{times[name]:.2f}" for name in names)
    text = " ".join(PAGES.split())
    for name in ("gla", "kda"):
        assert f"{measured['exchanged_bytes'][name]:,}" in text
        assert f"{times[f'{name}, two devices'] / times[name]:.2f} times" in text
    mechanisms = result("comparison_jla")["gated_delta_rule"]
    for name, of_short in mechanisms["1024"].items():
        of_long = mechanisms["4096"][name]
        assert of_short["met"]
        assert of_long["met"]
        ratios = of_short["times_as_fast"], of_long["times_as_fast"]
        assert f"| {ratios[0]:.1f} | {ratios[1]:.1f} |" in PAGES


def test_costs_of_exactness_are_those_of_the_results():
    measured = result("tiers")
    table = PAGES.partition("<!-- tiers -->")[2].partition("\n\n")[0]
    lengths = [measured["tiers"]["log_attention"][n]["times_tier_one"] for n in ("1024", "4096")]
    worst = max(max(of.values()) for of in lengths)
    assert f"cost up to {worst:.1f} times as much as ordinary ones" in README_TEXT
    for tier in ("two", "two, decay", "terms", "terms, decay", "three", "three, decay"):
        assert f"| {lengths[0][tier]:.1f} | {lengths[1][tier]:.1f} |" in table
    text = " ".join(PAGES.split())
    assert f"needs {max(0, 100 * measured['test']['cost']):.0f}% of that tier's time" in text
    assert f"reach {100 * measured['matmul']['fraction']:.0f}% of the floating-point rate" in text


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_reports_of_studies_are_of_their_results(folder):
    study = load_study(ROOT / f"configs/studies/{folder.name}.py")
    results = results_of_study(folder.name)
    report = (folder / "report.md").read_text()
    recorded = [*map(json.loads, (folder / "results.jsonl").read_text().splitlines())]
    for part in paragraphs(study, results, recorded):
        count = f"{len(recorded)} of "  # and then the number of runs of the grid
        assert (count if part.startswith(count) else part) in report
    assert (folder / "report.png").exists() == bool(study.plots)


def test_language_models_are_those_of_the_study():
    study = load_study(ROOT / "configs/studies/language_model.py")
    results = results_by_model("language_model")
    differences = {
        (x.compared["model"], x.metric): x for x in differences_of(study, [*results.values()])
    }
    verdicts = {key: x.verdict for key, x in differences.items()}
    table = STUDY_PAGE.partition("<!-- language model -->")[2].partition("\n\n")[0]
    lines = table.strip().splitlines()[2:]
    for line, (name, result) in zip(lines, results.items(), strict=True):
        assert result.mean("parameters") <= 850_000
        cells = [name, f"{result.mean('parameters'):,.0f}"]
        for metric in ("loss", "loss_256", "loss_1024"):
            mean, spread = result.mean(metric), result.spread(metric)
            cells.append(f"{mean:.3f} ± {spread:.3f}" if result.values(metric) else "")
        cells += [verdicts.get((name, metric), "") for metric in ("loss", "loss_1024")]
        assert line == f"| {' | '.join(cells)} |"
    ours = results["log, decay by head"].mean("loss")
    assert ours < 1.56
    worse = "softmax, no positions", "softmax, learned positions", "softmax, ALiBi", "FoX"
    others = "softmax, rotary", "Gated DeltaNet", "Mamba-2"
    hybrids = [name for name in results if "3 log" in name or "alternating" in name]
    assert {verdicts[name, "loss"] for name in worse} == {"worse"}
    assert {verdicts[name, "loss"] for name in (*others, *hybrids)} == {"no difference"}
    added = [differences[name, "loss"].mean for name in worse]
    assert f"by {min(added):.3f} to {max(added):.3f} nats" in STUDY_TEXT
    p_values = adjusted_p_values([*differences.values()], "loss")
    differ = {name for name, p in p_values.items() if p < 0.05}
    assert f"Holm's correction for the {len(p_values)} comparisons" in STUDY_TEXT
    assert {name for name in differ if "the paper's model" not in name} == {
        "AdamW: log, decay by head",
        "AdamW: softmax, rotary",
    }
    with_both = [name for name in results if f"AdamW: {name}" in results]
    saved = [results[f"AdamW: {x}"].mean("loss") - results[x].mean("loss") for x in with_both]
    assert f"by {min(saved):.2f} to {max(saved):.2f} nats" in STUDY_TEXT
    paper = (results[f"{x}log, the paper's model"].mean("loss_1024") for x in ("AdamW: ", ""))
    assert "from {:.3f} to {:.3f}".format(*paper) in STUDY_TEXT
    at_1024 = {name: x.mean("loss_1024") for name, x in results.items() if x.values("loss_1024")}
    best, second = sorted(at_1024, key=lambda name: at_1024[name])[:2]
    assert (best, second) == ("Mamba-2", "log, decay by head")
    assert min(results["softmax, rotary"].values("loss_1024")) > at_1024[second] + 0.1
    window = "window of 64, rotary"
    gained = [results[name].mean("loss") - at_1024[name] for name in (second, window)]
    assert {f"{x:.2f}" for x in gained} == {"0.04"}


def test_longer_contexts_are_those_of_the_study():
    study = load_study(ROOT / "configs/studies/long_context.py")
    results = results_by_model("long_context")
    found = differences_of(study, [*results.values()])
    verdicts = {(x.compared["model"], x.metric): x.verdict for x in found}
    table = STUDY_PAGE.partition("<!-- long context -->")[2].partition("\n\n")[0]
    for line, (name, x) in zip(table.strip().splitlines()[2:], results.items(), strict=True):
        assert 1_050_000 < x.mean("parameters") < 1_070_000
        cells = [name, f"{x.mean('state_bytes') / 1000:,.0f}"]
        cells += [f"{x.mean(metric):.2f}" for metric in ("loss_32", "loss_128")]
        cells += [f"{x.mean(y):.3f} ± {x.spread(y):.3f}" for y in ("loss", "loss_2048")]
        cells += [verdicts.get((name, metric), "") for metric in ("loss", "loss_2048")]
        assert line == f"| {' | '.join(cells)} |"
    for metric in ("loss", "loss_2048"):
        p_values = adjusted_p_values(found, metric)
        assert len(p_values) == len(results) - 1
        assert {name for name, p in p_values.items() if p > 0.05} == {"log, slots"}
    rates = [*study.axes["learning_rate"]]
    folder = ROOT / "benchmarks/results/studies/long_context"
    tried = {
        (labels["model"], labels["learning_rate"])
        for line in (folder / "results.jsonl").read_text().splitlines()
        if (labels := json.loads(line)["labels"])["seed"] == "1"
    }
    for name, x in results.items():
        best = rates.index(x.tuned["learning_rate"])
        assert {(name, rates[best - 1]), (name, rates[best + 1])} < tried


def test_what_is_said_of_longer_contexts_is_of_the_study():
    results = results_by_model("long_context")
    loss = {name: x.mean("loss") for name, x in results.items()}
    longest = {name: x.mean("loss_2048") for name, x in results.items()}
    gain = {name: x.mean("loss_32") - longest[name] for name, x in results.items()}
    late = {name: loss[name] - longest[name] for name in results}
    size = {name: x.mean("state_bytes") for name, x in results.items()}
    log, slots, rotary, fox = "log, decay by head", "log, slots", "softmax, rotary", "FoX"
    three, two, alibi = "3 log, then softmax", "alternating log and softmax", "softmax, ALiBi"
    window, merged = "window of 64, rotary", "window of 64 merged with log"
    alternating, recurrent = (
        "alternating log and window of 64",
        ("Gated DeltaNet", "Mamba-2", "GLA"),
    )
    after_windows = "3 windows of 64, then softmax"
    cached = fox, alibi, three, two
    constant = log, slots, alternating, *recurrent

    def span(values: dict[str, float], names: tuple[str, ...], less: float = 0) -> str:
        of = [values[name] - less for name in names]
        return f"{min(of):.2f} to {max(of):.2f}"

    said = f"hybrids of log-attention and softmax attention gain {span(gain, cached)} nats, "
    said += f"softmax attention after windows {gain[after_windows]:.2f}, log-attention with decay "
    said += f"{gain[log]:.2f}, and Gated DeltaNet, Mamba-2 and GLA {span(gain, recurrent)}."
    assert said in STUDY_TEXT
    assert f"a window of 64 gains {late[window]:.2f}, since" in STUDY_TEXT
    most = max(late[name] for name in constant)
    assert f"constant states gain no more than {most:.2f}." in STUDY_TEXT
    assert min(late[name] for name in cached) > 2 * most
    assert max(late[rotary], late[merged]) < 0
    assert min(loss[x] for x in (*constant, window, merged)) == loss[alternating]
    less = {x: f"{loss[x] - loss[alternating]:.2f} less than" for x in (log, window, rotary)}
    said = f"have the smallest loss, {loss[alternating]:.3f} at 512 tokens: {less[log]} "
    said += f"log-attention alone, {less[window]} windows alone, which need more bytes, and "
    assert f"{said}{less[rotary]} softmax attention with rotary positions" in STUDY_TEXT
    assert size[alternating] < size[window]
    said = f"Mamba-2 and GLA, by {span(loss, recurrent, loss[log])}; the states of the first two"
    assert said in STUDY_TEXT
    assert size["GLA"] < size[log] < min(size[name] for name in recurrent[:2])
    assert f"better than log-attention, by {loss[log] - loss[window]:.2f}." in STUDY_TEXT
    assert abs(loss[window] - loss[merged]) < results[window].spread("loss")
    said = f"worse by {longest[merged] - longest[window]:.2f} at 2048, in "
    assert f"{said}{size[merged] / size[window]:.1f} times the bytes" in STUDY_TEXT
    more = size[slots] / size[log] - 1
    assert f"Slots show no difference, with a state {more:.0%} larger" in STUDY_TEXT
    said = f"reaches {loss[three]:.3f}, ALiBi in all layers {loss[alibi]:.3f}, and FoX "
    low, middle, high = sorted(results[fox].values("loss"))
    said += f"{loss[fox]:.3f}; two of FoX's three seeds reach {low:.2f} and {middle:.2f}, the third"
    assert f"{said} {high:.2f}. Softmax attention in every second layer has the " in STUDY_TEXT
    assert f"smallest loss, {loss[two]:.3f}." in STUDY_TEXT
    assert min(loss.values()) == loss[two]


def test_log_attention_is_the_better_partner_in_both_hybrids():
    study = load_study(ROOT / "configs/studies/long_context.py")
    results = results_by_model("long_context")

    def difference(of: str, baseline: str) -> Difference:
        found = differences_of(replace(study, baseline=baseline), [results[baseline], results[of]])
        (same,) = (x for x in found if (x.compared["model"], x.metric) == (of, "loss"))
        return same

    gated, windows = "alternating Gated DeltaNet and window of 64", "3 windows of 64, then softmax"
    for name, baseline, said in (
        (gated, "alternating log and window of 64", "with log-attention (95% confidence interval "),
        (windows, "3 log, then softmax", "after three layers of log-attention ("),
    ):
        found = difference(name, baseline)
        said = f"{results[name].mean('loss'):.3f}, {found.mean:.2f} more than {said}"
        assert found.interval
        assert f"{said}{found.interval[0]:.2f} to {found.interval[1]:.2f})" in STUDY_TEXT
        assert difference(name, "window of 64, rotary").verdict == "no difference"


def test_losses_at_equal_budgets_are_those_of_the_results():
    results = results_of_study("long_context_updates")
    mean = {(x.compared["model"], int(x.compared["updates"])): x.mean("loss") for x in results}
    record = result("equal_budgets")
    numbers, models = record["budgets"], record["models"]

    def at(model: str, updates: int, budget: str) -> float:
        return statistics.mean(models[model]["loss"][str(updates)][budget])

    table = STUDY_PAGE.partition("<!-- equal budgets -->")[2].partition("\n\n")[0]
    for line, (name, row) in zip(table.strip().splitlines()[2:], models.items(), strict=True):
        cells = [name, *(f"{mean[name, x]:.2f}" for x in (150, 300, 600))]
        cells.append(f"{row['seconds_per_update']:.2f}")
        for losses in (row["loss"][str(x)] for x in numbers):
            cells += [
                "" if None in x else f"{statistics.mean(x):.2f}"
                for x in (losses["flops"], losses["time"])
            ]
        assert line == f"| {' | '.join(cells)} |"
    rotary, fox, log, gated = "softmax, rotary", "FoX", "log, decay by head", "Gated DeltaNet"
    gain = {x: f"{mean[x, 150] - mean[x, 600]:.2f}" for x in (rotary, fox, log, gated)}
    said = f"positions gains {gain[rotary]} nats, FoX {gain[fox]}, log-attention {gain[log]} and "
    assert f"{said}Gated DeltaNet {gain[gated]}." in STUDY_TEXT
    for updates, name in product((300, 600), (rotary, fox)):
        losses = (models[x]["loss"][str(updates)]["time"] for x in (log, name))
        assert stats.ttest_ind(*losses, equal_var=False).pvalue > 0.05
    ahead = [at(x, 300, "time") - at(log, 300, "time") for x in (rotary, fox)]
    behind = [at(log, 600, "time") - at(x, 600, "time") for x in (rotary, fox)]
    said = "softmax attention, by {:.2f} and {:.2f}; with that of 600, it is {:.2f} and {:.2f} "
    assert f"{said.format(*ahead, *behind)}behind; with two seeds, the 95%" in STUDY_TEXT
    for updates, best in ((300, "window of 64"), (600, "softmax")):
        for budget in ("flops", "time"):
            trained = [x for x in models if None not in models[x]["loss"][str(updates)][budget]]
            smallest = min(trained, key=lambda x: at(x, updates, budget))
            assert smallest == f"alternating log and {best}"


def test_losses_by_position_are_those_of_the_study():
    results = results_by_model("long_context")
    loss = {
        name: [x.mean(f"loss_2048_at_{end}") for end in (32, 128, 256, 512, 1024, 2048)]
        for name, x in results.items()
    }
    window = loss.pop("window of 64, rotary")
    less = {name: np.subtract(values, window) for name, values in loss.items()}
    table = STUDY_PAGE.partition("<!-- positions -->")[2].partition("\n\n")[0]
    first, *lines = table.strip().splitlines()[2:]
    assert first == f"| window of 64, rotary: loss | {' | '.join(f'{x:.2f}' for x in window)} |"
    for line, (name, values) in zip(lines, less.items(), strict=True):
        assert line == f"| {name} | {' | '.join(f'{x:+.2f}' for x in values.round(2) + 0)} |"
    alternating = "alternating log and window of 64"
    for name in ("log, decay by head", alternating):
        assert np.ptp(less[name][2:]) < 0.05
    for name in ("Gated DeltaNet", "Mamba-2", "GLA"):
        assert np.ptp(less[name][2:]) < 0.06
    for name in ("FoX", "softmax, ALiBi", "3 log, then softmax", "alternating log and softmax"):
        assert (np.diff(less[name][:5]) < 0).all()
        assert less[name][5] > less[name][4] - 0.01
    for name in ("softmax, rotary", "window of 64 merged with log"):
        assert (np.diff(less[name][3:]) > 0.03).all()


def test_the_table_on_longer_contexts_is_of_the_study():
    results = results_by_model("long_context")
    table = README.partition("| | state after 512 tokens |")[2].partition("\n\n")[0]
    lines = table.splitlines()[2:]
    assert len(lines) == 7
    for line in lines:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        x = results[name]
        losses = (f"{x.mean(metric):.3f}" for metric in ("loss", "loss_2048"))
        assert cells == [f"{x.mean('state_bytes') / 1000:,.0f} kB", *losses]


def test_the_headline_is_of_seeds_that_selected_nothing():
    study = load_study(ROOT / "configs/studies/language_model_seeds.py")
    results = results_by_model("language_model_seeds")
    ours, *others = results
    assert {len(x.values("loss")) for x in results.values()} == {5}
    at_1024 = {name: x.mean("loss_1024") for name, x in results.items() if x.values("loss_1024")}
    assert min(at_1024, key=lambda name: at_1024[name]) == ours
    found = differences_of(study, [*results.values()])
    worse = {"loss": ("Gated DeltaNet", "softmax, ALiBi", "softmax, learned positions")}
    worse["loss_1024"] = "Gated DeltaNet", "softmax, ALiBi", "softmax, rotary"
    for metric, names in worse.items():
        of_metric = {x.compared["model"]: x for x in found if x.metric == metric}
        p_values = adjusted_p_values(found, metric)
        assert {name for name, p in p_values.items() if p < 0.05} == {*names}
        assert all(f"by {of_metric[name].mean:.3f}" in STUDY_TEXT for name in names)

    def named(*names: str) -> str:
        with_losses = [
            f"{name.removeprefix('softmax, ')} ({results[name].mean('loss'):.3f})".replace(
                "rotary", "rotary positions"
            )
            for name in names
        ]
        return f"{', '.join(with_losses[:-1])} and {with_losses[-1]}"

    equal = "softmax, rotary", "FoX", "Mamba-2"
    better = "softmax, ALiBi", "softmax, learned positions", "Gated DeltaNet"
    assert {*better} == {*worse["loss"]}
    assert {*better, *equal} == {*others} - {"window of 64, rotary"}
    paper = results_by_model("language_model")["log, the paper's model"].mean("loss")
    said = f"reaches {results[ours].mean('loss'):.3f} nats per character over five new seeds (the "
    said += f"paper's model {paper:.3f}): after Holm's correction at 5%, better than "
    said += f"{named(*better)}, with no difference from {named(*equal)}."
    assert said in README_TEXT


def test_recall_figures_are_those_of_the_study():
    results = results_of_study("recall")
    accuracy = {tuple(x.compared.values()): x.mean("accuracy") for x in results}
    for width in ("32", "64"):
        for name in ("softmax", "gqa", "mla", "l1"):
            assert accuracy[name, width] > 0.99
    log, linear, rmt = (f"{100 * accuracy[x, '64']:.0f}%" for x in ("log", "linear", "rmt"))
    assert f"log-attention answers {log} of the queries" in README_TEXT
    assert f"log-attention of width 64 answers {log} of the queries" in STUDY_TEXT
    others = f"with a state of the same size {linear}, and the recurrent memory (`rmt`)"
    assert f"{others} with a smaller state {rmt}" in STUDY_TEXT
    of_bytes = {tuple(x.compared.values()): x.mean("state_bytes") for x in results}
    assert of_bytes["log", "64"] == of_bytes["linear", "64"] > of_bytes["rmt", "64"]
    cache = of_bytes["softmax", "64"]
    for name in ("log, slots", "deltanet", "kda", "gated_deltanet"):
        assert accuracy[name, "64"] > 0.99
        assert 0.3 < of_bytes[name, "64"] / cache < 0.4
    slots, delta = (f"{100 * accuracy[x, '32']:.0f}%" for x in ("log, slots", "deltanet"))
    said = (f"{of_bytes[x, '32'] / 1000:.1f} kB" for x in ("log, slots", "deltanet", "mla"))
    said = f"slots answer {slots} in {next(said)}, and DeltaNet {delta} in {next(said)}"
    assert f"At width 32, {said}." in STUDY_TEXT
    assert f"the smallest state of them, {of_bytes['mla', '32'] / 1000:.1f} kB" in STUDY_TEXT
    assert all(accuracy[name, "64"] < 0.5 for name in ("mamba2", "retnet", "gla", "hgrn2", "fox"))
    assert accuracy["fox", "32"] < 0.5
    assert 0.15 < of_bytes["mlstm", "64"] / cache < 0.18
    seeds = next(x for x in results if list(x.compared.values()) == ["mlstm", "64"])
    said = (100 * x for x in seeds.values("accuracy"))
    assert "answers {:.0f}% with one seed and {:.0f}% with the other".format(*said) in STUDY_TEXT
    assert f"of width 32 answers {100 * accuracy['mamba2', '32']:.0f}%, in twice" in STUDY_TEXT
    assert 2 < of_bytes["mamba2", "32"] / of_bytes["softmax", "32"] < 2.3
    assert accuracy["log_window", "64"] > 0.99
    assert 1 < of_bytes["log_window", "64"] / cache < 1.05
    study = replace(load_study(ROOT / "configs/studies/recall.py"), baseline="log")
    verdicts = {tuple(x.compared.values()): x.verdict for x in differences_of(study, results)}
    for name in ("linear", "rmt"):
        assert verdicts[name, "64"] == "no difference"
    log, linear = (
        next(x.values("accuracy") for x in results if list(x.compared.values()) == [name, "32"])
        for name in ("log", "linear")
    )
    assert min(log) < max(linear)  # differences between seeds are as large


FEATURES = {
    "log-attention": "log",
    "normalized queries and keys": "normalized",
    "features of Hedgehog, 64 x 16": "Hedgehog",
    "one head, 64 x 32": "one head: 64 x 32",
    "product features, 144 x 16": "product features: 144 x 16",
    "product features, 2 heads, 64 x 16": "product features: 2 heads, 64 x 16",
    "DeltaNet, 8 x 16": "deltanet, 8 x 16",
    "DeltaNet, 16 x 16": "deltanet, 16 x 16",
    "Gated DeltaNet, 16 x 16": "gated_deltanet, 16 x 16",
    "Gated DeltaNet, 24 x 24": "gated_deltanet, 24 x 24",
    "Gated DeltaNet, 24 x 48": "gated_deltanet",
}
"""Rows of the table of features, by names that differ from the labels of the study."""


def test_features_and_slots_are_those_of_the_study():
    results = {x.compared["mechanism"]: x for x in results_of_study("recall_features")}
    accuracy = {name: x.mean("accuracy") for name, x in results.items()}
    size = {name: x.mean("state_bytes") for name, x in results.items()}
    table = STUDY_PAGE.partition("<!-- features -->")[2].partition("\n\n")[0]
    for line in table.strip().splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        result = results[FEATURES.get(name, name)]
        found = f"{result.mean('accuracy'):.2f} ± {result.spread('accuracy'):.2f}"
        assert cells == [f"{result.mean('state_bytes'):,.0f}", found]
    slots, one, delta = "2 heads, 64 slots x 16", "64 slots x 16", "deltanet, 16 x 16"
    good = [x for x in accuracy if x.startswith("gated_deltanet") and accuracy[x] >= 0.9]
    assert min(accuracy[slots], accuracy[one], accuracy[delta]) >= 0.9
    assert size[slots] < min(size[name] for name in good) == max(size.values())
    assert size[delta] < size[one] < size["log"]
    assert f"in a state {100 * size[slots] / size['log'] - 100:.0f}% larger" in README_TEXT
    said = {name: f"{100 * x:.0f}%" for name, x in accuracy.items()}
    text = " ".join(STUDY_PAGE.split())
    assert accuracy[slots] > 0.99
    assert "64 slots of 16 values answer more than 99% of the queries" in text
    assert f"log-attention answers {said['log']} with a state of nearly the same size" in text
    assert f"one head, with a smaller state, answers {said[one]}." in text
    assert f"16 x 16 answers {said[delta]}." in text
    shown = table.strip().splitlines()[2:]
    assert f"The table shows {len(shown)} of the {len(results)} rows of the report." in text
    assert "more than 99% in a state" in README_TEXT
    assert size[delta] < size[slots] / 2
    assert f"DeltaNet {said[delta]} in less than half of it" in README_TEXT


def test_ablation_figures_are_those_of_the_study():
    results = results_of_study("language_model_parts")
    of = {result.compared["change"]: result for result in results}
    whole = of.pop("baseline: log, decay by head")

    def loss_added(name: str, metric: str = "loss") -> str:
        return f"{of[name].mean(metric) - whole.mean(metric):.3f}"

    text = " ".join(STUDY_PAGE.split())
    assert f"The loss is {loss_added('no convolution')} larger without convolutions" in text
    added = loss_added("no decay"), loss_added("no decay", "loss_1024")
    said = "Without decay it is {} larger, hardly more than this threshold, and {} on sequences"
    assert said.format(*added) in text
    alone = of["windows of 16 only"]
    assert f"alone reach {alone.mean('loss'):.3f}, and {alone.mean('loss_1024'):.3f}" in text
    assert f"unchanged, the model reaches {whole.mean('loss'):.3f}" in text
    added = {name: x.mean("loss") - whole.mean("loss") for name, x in of.items()}
    seeds = [x.values("loss") for x in results_by_model("language_model").values()]
    freedom = sum(len(values) - 1 for values in seeds)
    squares = sum((len(values) - 1) * statistics.variance(values) for values in seeds)
    deviation = math.sqrt(squares / freedom)
    least = stats.t.ppf(1 - 0.025 / len(added), freedom) * 2**0.5 * deviation
    said = f"seeds is {deviation:.3f} in the study above, so that differences of {len(added)} "
    assert f"{said}changes are inconclusive below {least:.3f}," in text
    paper = "the paper's recurrence, MLP ratio 3"
    large = {name for name, x in added.items() if x > least}
    assert large == {"no convolution", "no decay", paper, "windows of 16 only"}
    fewer = 1 - of[paper].mean("parameters") / whole.mean("parameters")
    said = f"with {fewer:.0%} fewer parameters, is worse by {loss_added(paper)}."
    assert said in text


def test_shakespeare_figures_are_those_of_the_study():
    results = results_of_study("shakespeare")
    losses = {result.compared["mechanism"]: result.mean("loss") for result in results}
    assert len(losses) == 19
    text = " ".join(STUDY_PAGE.split())
    assert "smallest loss of these nineteen" in text
    best = sorted(losses, key=lambda name: losses[name])[:2]
    assert sorted(best) == ["log, decay by feature", "log, decay by head"]
    assert (
        f"mechanisms, {losses[best[0]]:.3f}; softmax attention reaches {losses['softmax']:.3f}"
        in text
    )
    spread = max(losses.values()) - min(losses.values())
    assert f"within {np.ceil(1e3 * spread) / 1e3:.3f} nats" in text


COPYING = {
    "softmax attention": "softmax",
    "FoX": "fox",
    "Mamba-2": "mamba2",
    "Performer": "performer",
    "Gated DeltaNet": "gated_deltanet",
    "linear attention": "linear",
    "recurrent memory": "rmt",
    "window of 16 tokens": "sliding_window",
    "additive attention": "additive",
}
"""Rows of the table of copying, by names that differ from the labels of the study."""


CAPACITY = {
    "softmax attention": "softmax",
    "softmax attention, one key/value head": "gqa",
    "hybrid: softmax, then log": "hybrid: softmax, log",
    "Gated DeltaNet": "gated_deltanet",
    "Kimi Delta Attention": "kda",
    "Mamba-2": "mamba2",
    "log-attention": "log",
}
"""Rows of the table of capacity, with or without sizes, whose names differ from the labels."""


def test_capacity_of_recall_is_that_of_the_study():
    results = {x.compared["mechanism"]: x for x in results_of_study("recall_capacity")}
    table = STUDY_PAGE.partition("<!-- capacity -->")[2].partition("\n\n")[0]
    shown, pairs = [], (8, 16, 32, 64)
    for line in table.strip().splitlines()[2:]:
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        first, *sizes = label.split(", ")
        name = CAPACITY.get(label) or ", ".join([CAPACITY.get(first, first.lower()), *sizes])
        result = results[name]
        means = [f"{result.mean(f'accuracy_{number}_pairs'):.2f}" for number in pairs]
        means[-1] += f" ± {result.spread('accuracy_64_pairs'):.2f}"
        assert cells == [f"{result.mean('state_bytes') / 1000:.1f}", *means], name
        shown.append(name)
    assert sorted(shown) == sorted(results)
    size = {name: x.mean("state_bytes") for name, x in results.items()}
    at = {
        number: {name: x.mean(f"accuracy_{number}_pairs") for name, x in results.items()}
        for number in pairs
    }
    assert all(at[64][x] > 0.999 for x in ("softmax", "gqa", "mla", "fox", "hybrid: softmax, log"))
    slots = "log, 256 slots"
    said = f"256 slots answers {at[64][slots]:.2f} of 64 pairs in {size[slots] / 1000:.0f} kB"
    assert said in STUDY_TEXT
    spread = max(results[x].spread("accuracy_64_pairs") for x in (slots, "mamba2"))
    assert abs(at[64]["mamba2"] - at[64][slots]) < spread
    assert f"in {100 * size[slots] / size['mamba2']:.0f}% of its bytes" in STUDY_TEXT
    delta = f"answers {at[64]['deltanet']:.2f} in {size['deltanet'] / 1000:.0f} kB"
    assert delta in STUDY_TEXT
    slots = "log, 144 slots"
    assert all(
        of["deltanet"] > of[slots] and of["mlstm"] > of["log, 64 slots"] for of in at.values()
    )
    rivals = "gated_deltanet", "kda"
    assert all(0.9 < size[slots] / size[name] < 1.1 for name in ("deltanet", *rivals))
    gains = [f"{at[64][slots] - at[64][name]:.2f}" for name in rivals]
    assert f"by {gains[0]} and {gains[1]}" in STUDY_TEXT
    assert all(at[number][slots] < at[number][name] for number in (8, 16) for name in rivals)
    plain = f"answers {at[64]['log']:.2f} of 64 pairs, and {at[64]['log, decay by head']:.2f} with"
    assert plain in STUDY_TEXT
    smallest = sum(x.tuned["learning_rate"] == "0.005" for x in results.values())
    assert 2 * smallest == len(results)
    assert "half of the mechanisms is the smallest" in STUDY_TEXT


def test_copying_figures_are_those_of_the_study():
    results = {tuple(x.compared.values()): x for x in results_of_study("copying")}
    table = STUDY_PAGE.partition("<!-- copying -->")[2].partition("\n\n")[0]
    lines = table.strip().splitlines()[2:]
    assert 3 * len(lines) == len(results)
    lengths = {"copying": (20, 30, 60), "selective copying": (64, 256), "induction": (256, 1024)}
    accuracy = {}
    for line in lines:
        shown, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = COPYING.get(shown, shown.replace("log-attention", "log"))
        of = {
            (task, length): results[task, name].mean(f"accuracy_{length}")
            for task in lengths
            for length in lengths[task]
        }
        size = results["copying", name].mean("state_bytes")
        assert cells == [f"{size / 1000:.1f}", *(f"{x:.2f}" for x in of.values())]
        accuracy |= {(name, *at): x for at, x in of.items()}
    at_60 = {name: x for (name, *at), x in accuracy.items() if at == ["copying", 60]}
    best = sorted(at_60, key=lambda name: -at_60[name])[:3]
    assert best == ["softmax", "log, slots", "mamba2"]
    said = "slots reaches {:.2f} at 60 letters, Mamba-2 {:.2f} with seven times the bytes, "
    said = said.format(*(at_60[name] for name in best[1:]))
    said += f"Performer {at_60['performer']:.2f}; two seeds do not separate them"
    assert said in STUDY_TEXT
    study = replace(load_study(ROOT / "configs/studies/copying.py"), baseline="log, slots")
    near = differences_of(study, [*results.values()])
    verdicts = {tuple(x.compared.values()): x.verdict for x in near if x.metric == "accuracy_60"}
    for name in ("mamba2", "performer"):
        assert verdicts["copying", name] == "no difference"
    parameters = [x.mean("parameters") for x in results.values()]
    assert (
        "are not: {:,.0f} to {:,.0f}".format(*(round(f(parameters), -3) for f in (min, max)))
        in STUDY_TEXT
    )
    slots, mamba = (results["copying", name].mean("state_bytes") for name in best[1:])
    assert 6 < mamba / slots < 7.5
    selective = {name: x for (name, *at), x in accuracy.items() if at == ["selective copying", 64]}
    assert max(selective, key=lambda name: selective[name]) == "gated_deltanet"
    assert f"softmax attention reaches {selective['softmax']:.2f}" in STUDY_TEXT
    assert {f"{selective[x]:.2f}" for x in ("log, slots", "log, decay by feature")} == {"0.99"}
    longest = {
        name for (name, *at), x in accuracy.items() if at == ["induction", 1024] and x > 0.98
    }
    assert longest == {"softmax", "performer", "log, decay by head", "log, slots"}
    short = {at[1]: x.mean("accuracy_64") for at, x in results.items() if at[0] == "induction"}
    assert {name for name, x in short.items() if x < 0.99} == {"sliding_window"}
    assert results["copying", "fox"].mean("accuracy_20") > 0.9999
    assert min(results["selective copying", "mamba2"].values("accuracy_64")) < 0.6


STATE_TRACKING = {
    "log-attention": "log",
    "log-attention, decay by head": "log, decay by head",
    "log-attention, slots": "log, slots",
    "softmax attention": "softmax",
    "FoX": "fox",
    "GLA": "gla",
    "Mamba-2": "mamba2",
    "mLSTM": "mlstm",
}
"""Rows of the table of state tracking, by names that differ from the labels of the study."""


def test_state_tracking_figures_are_those_of_the_study():
    results = {tuple(x.compared.values()): x for x in results_of_study("state_tracking")}
    groups = "parity", "modulo 5", "permutations"
    metrics = "accuracy", "accuracy_128", "accuracy_256"
    found = {
        name: {(x, y): results[name, x].mean(y) for x in groups for y in metrics}
        for name in {name for name, _ in results}
    }
    table = STUDY_PAGE.partition("<!-- state tracking -->")[2].partition("\n\n")[0]
    lines = table.strip().splitlines()[2:]
    assert len(lines) == len(found)
    for line in lines:
        shown, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        of = found[STATE_TRACKING.get(shown, shown)]
        assert cells == [f"{of[x, y]:.2f}" for x in groups for y in metrics[:2]]
    negative = "DeltaNet, negative eigenvalues", "Gated DeltaNet, negative eigenvalues"
    for name in found.keys() - set(negative):
        assert found[name]["parity", "accuracy_128"] < (0.61 if "Delta" in name else 0.57)
        for inverting in negative:
            best = found[inverting]["permutations", "accuracy"]
            assert best > found[name]["permutations", "accuracy"]
    assert found[negative[0]]["parity", "accuracy"] > 0.9999
    longer = f"{100 * found[negative[0]]['parity', 'accuracy_256']:.0f}%"
    assert f"that of 256 bits with {longer} accuracy" in STUDY_TEXT
    assert all(of["permutations", "accuracy_128"] < 0.3 for of in found.values())
    assert all(of["modulo 5", "accuracy_256"] < 0.33 for of in found.values())


HYBRIDS = {
    "log-attention": "log",
    "softmax attention": "softmax",
    "slots, 1 of 8 layers softmax, last": "slots, 1 of 8 softmax, last",
    **{
        f"1 of {n} layers softmax, {place}": f"1 of {n} softmax, {place}"
        for n in (8, 4, 2)
        for place in ("first", "last")
    },
}
"""Rows of the table of hybrids, by names that differ from the labels of the study."""


def size_in_words(size: int) -> str:
    return f"{size / 1e3:,.0f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"


def test_hybrids_are_those_of_the_study():
    study = load_study(ROOT / "configs/studies/hybrids.py")
    models = {x.labels["layers"]: x.config.model for x in study.first_seed_runs()}
    results = {tuple(x.compared.values()): x for x in results_of_study("hybrids")}
    accuracy = {
        name: (
            results[name, "recall"].mean("accuracy"),
            results[name, "copying"].mean("accuracy_40"),
        )
        for name in models
    }
    table = STUDY_PAGE.partition("<!-- hybrids -->")[2].partition("\n\n")[0]
    lines = table.strip().splitlines()[2:]
    assert len(lines) == len(models)
    for line in lines:
        shown, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = HYBRIDS.get(shown, shown)
        model = LanguageModel.abstract(models[name])
        sizes = [size_in_words(model.state_size(x)) for x in (1024, 32_768, 1_048_576)]
        assert cells == [*(f"{x:.2f}" for x in accuracy[name]), *sizes]
    recall = {name: results[name, "recall"].values("accuracy") for name in models}
    for name in ("1 of 2 softmax, first", "1 of 4 softmax, first", "softmax"):
        assert min(recall[name]) > 0.999
    for name in ("1 of 2 softmax, last", "1 of 4 softmax, last", "1 of 8 softmax, last"):
        assert abs(accuracy[name][0] - accuracy["log"][0]) < 0.03
    assert sum(x > 0.999 for x in recall["1 of 8 softmax, first"]) == 2
    low, high, highest = sorted(recall["slots, 1 of 8 softmax, last"])
    assert (
        f"helps two seeds, {high:.0%} and {highest:.0%}, and not the third, {low:.0%}" in STUDY_TEXT
    )
    verdicts = {
        x.compared["layers"]: x.verdict
        for x in differences_of(study, [*results.values()])
        if x.metric == "accuracy_40" and x.compared["task"] == "copying"
    }
    assert {name for name, x in verdicts.items() if x == "worse"} == {
        "log",
        "1 of 8 softmax, first",
    }
    longer = {tuple(x.compared.values()): x for x in results_of_study("hybrids_updates")}
    names = "1 of 2 softmax, last", "1 of 4 softmax, last", "log"
    two, four, alone = (longer[name, "2400"].mean("accuracy") for name in names)
    assert f"answer {two:.0%} and {four:.0%}, and log-attention alone {alone:.0%}" in STUDY_TEXT
    smallest = next(iter(load_study("hybrids_updates").axes["learning_rate"]))
    assert all(longer[name, "2400"].tuned["learning_rate"] == smallest for name in names[:2])
    spreads = (f"{longer[name, '2400'].spread('accuracy'):.2f}" for name in names)
    assert "half the range of the seeds is {}, {} and {}".format(*spreads) in STUDY_TEXT
    of_text = {x.compared["model"]: x.mean("loss") for x in results_of_study("language_model")}
    said = (f"{of_text[name]:.3f}" for name in ("softmax, then 3 log", "3 log, then softmax"))
    assert "the losses are {} and {}".format(*said) in STUDY_TEXT


def test_shared_contexts_are_those_of_the_results():
    for row in result("harness")["rows"]:
        assert f"\n| {row['length']} | {row['times_as_fast']:.1f} |" in PAGES


def test_costs_of_separate_documents_are_those_of_the_results():
    rows = result("documents")["rows"]
    table = PAGES.partition("<!-- documents -->")[2].partition("\n\n")[0]
    names = {"log-attention": "log", "softmax attention": "softmax"}
    names["Gated DeltaNet"] = "gated_deltanet"
    for label, name in names.items():
        ratios = {row["length"]: f"{row['ratio']:.2f}" for row in rows if row["attention"] == name}
        assert f"| {label} | {ratios[256]} | {ratios[1024]} |" in table
    worst, largest = (max(row[x] for row in rows) - 1 for x in ("ratio", "ratio_of_programs"))
    said = f"needs at most {math.ceil(100 * worst)}% more time, and its program is up to "
    assert f"{said}{math.ceil(100 * largest)}% larger" in " ".join(PAGES.split())


def test_a_million_tokens_are_those_of_the_results():
    measured = result("million_tokens")
    assert measured["rows"][-1]["tokens"] == 1_000_000
    worst = max(row["largest_difference"] for row in measured["rows"])
    assert f"is farther than {worst:.0e} from float64's" in PAGES


def test_training_steps_are_those_of_the_results():
    measured = result("training_step")
    seconds, profile = measured["seconds"], measured["profile"]
    assert f"needs {1e3 * seconds['ours']:.1f} ms" in PAGES
    assert f"trains it in PyTorch, {1e3 * seconds['peer']:.1f} ms" in PAGES
    shares = f"{100 * profile['log_attention']:.0f}% of the time in log-attention itself, and "
    shares += f"{100 * profile['attention']:.0f}% in the rest of the attention layers"
    assert shares in " ".join(PAGES.split())


def test_documented_failures_name_their_tests():
    """Every row of the table names existing tests."""
    table = (ROOT / "docs" / "pods.md").read_text().split("## Failures and recovery\n")[1]
    rows = [row for row in table.splitlines() if row.startswith("| ") and "**" not in row]
    assert len(rows) > 20
    for row in rows[1:]:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), test


def test_costs_of_the_full_size_are_those_of_the_configuration():
    config = load_config("heinsen_125m_pile")
    flops = []
    for model in (config.model, load_config("gpt2_small_pile").model):
        parameters = costs(replace(config, model=model))["parameters"]
        flops.append(flops_per_token(model, parameters, config.data.sequence_length))
    text = " ".join(PAGES.split())
    assert f"costs {flops[0] / 1e9:.3f} GFLOPs of training" in text
    assert f"almost as many parameters, {flops[1] / 1e9:.3f}, because" in text
    assert f"{config.training.steps:,} updates of {config.data.batch_size} sequences" in text
    table = PAGES.partition("<!-- full size -->")[2].partition("\n\n")[0]
    tokens = config.training.steps * config.data.sequence_length * config.data.batch_size
    for mfu in (10, 20, 40, 50):
        rate = PEAK_FLOPS["NVIDIA H100 80GB HBM3"] * mfu / 100
        hours = [x * tokens / rate / 3600 for x in flops]
        assert f"| {mfu}% | {hours[0]:.0f} | {hours[1]:.0f} |" in table
    at_40, of_gpt2 = (x * 5 / 4 for x in hours)
    said = f"At 40%, both full runs need {at_40 + of_gpt2:.0f} GPU hours: {at_40 / 8:.0f} hours of "
    said += f"the node for the paper's model, {of_gpt2 / 8:.0f} for GPT-2 small."
    assert said in text
    assert f"At 10%, they need {4 * (at_40 + of_gpt2):,.0f}." in text
    assert f"{2 * tokens / 1e9:.0f} GB, 2 bytes per token" in text
    assert round(19_000 / config.training.steps, 2) == 0.03
