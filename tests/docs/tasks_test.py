"""Accuracies of synthetic tasks in the README and docs are those of the committed studies."""

import json
import math
import re
import statistics
from dataclasses import replace

import numpy as np
from scipy import stats

from heinsen_jax import attention
from heinsen_jax.models.layers import parse_pattern, single_layers
from heinsen_jax.study import adjusted_p_values, differences_of, load_study, results_of, sweeps
from tests.docs.pages import (
    README_TEXT,
    ROOT,
    STUDY_TEXT,
    difference,
    interval,
    results_by_model,
    results_of_study,
    table,
)


def test_recall_figures_are_those_of_the_study():
    results = results_of_study("recall")
    accuracy = {tuple(x.compared.values()): x.mean("accuracy") for x in results}
    for width in ("32", "64"):
        for name in ("softmax", "softmax, one key/value head", "MLA", "L1"):
            assert accuracy[name, width] > 0.99
    log, linear, rmt = (
        f"{100 * accuracy[x, '64']:.0f}%" for x in ("log", "linear", "recurrent memory")
    )
    assert f"log-attention of width 64 answers {log} of the queries" in STUDY_TEXT
    others = f"with a state of the same size {linear}, and the recurrent memory (`rmt`)"
    assert f"{others} with a smaller state {rmt}" in STUDY_TEXT
    of_bytes = {tuple(x.compared.values()): x.mean("state_bytes") for x in results}
    assert of_bytes["log", "64"] == of_bytes["linear", "64"] > of_bytes["recurrent memory", "64"]
    cache = of_bytes["softmax", "64"]
    for name in ("log, slots", "DeltaNet", "Kimi Delta Attention", "Gated DeltaNet"):
        assert accuracy[name, "64"] > 0.99
        assert 0.3 < of_bytes[name, "64"] / cache < 0.4
    slots, delta = (f"{100 * accuracy[x, '32']:.0f}%" for x in ("log, slots", "DeltaNet"))
    said = (f"{of_bytes[x, '32'] / 1000:.1f} kB" for x in ("log, slots", "DeltaNet", "MLA"))
    said = f"slots answer {slots} in {next(said)}, and DeltaNet {delta} in {next(said)}"
    assert f"At width 32, {said}." in STUDY_TEXT
    assert f"the smallest state of them, {of_bytes['MLA', '32'] / 1000:.1f} kB" in STUDY_TEXT
    assert all(accuracy[name, "64"] < 0.5 for name in ("Mamba-2", "RetNet", "GLA", "HGRN2", "FoX"))
    assert accuracy["FoX", "32"] < 0.5
    said = f"Performer of width 64 answers {accuracy['Performer', '64']:.0%} in "
    assert f"{said}{of_bytes['Performer', '64'] / cache:.0%} of the bytes" in STUDY_TEXT
    assert 0.15 < of_bytes["mLSTM", "64"] / cache < 0.18
    seeds = next(x for x in results if list(x.compared.values()) == ["mLSTM", "64"])
    said = (100 * x for x in seeds.values("accuracy"))
    assert "answers {:.0f}% with one seed and {:.0f}% with the other".format(*said) in STUDY_TEXT
    assert f"of width 32 answers {100 * accuracy['Mamba-2', '32']:.0f}%, in twice" in STUDY_TEXT
    assert 2 < of_bytes["Mamba-2", "32"] / of_bytes["softmax", "32"] < 2.3
    assert accuracy["window merged with log", "64"] > 0.99
    assert 1 < of_bytes["window merged with log", "64"] / cache < 1.05
    study = replace(load_study(ROOT / "configs/studies/recall.py"), baseline="log")
    verdicts = {tuple(x.compared.values()): x.verdict for x in differences_of(study, results)}
    for name in ("linear", "recurrent memory"):
        assert verdicts[name, "64"] == "no difference"
    log, linear = (
        next(x.values("accuracy") for x in results if list(x.compared.values()) == [name, "32"])
        for name in ("log", "linear")
    )
    assert min(log) < max(linear)  # differences between seeds are as large


def test_features_and_slots_are_those_of_the_study():
    results = {x.compared["mechanism"]: x for x in results_of_study("recall_features")}
    accuracy = {name: x.mean("accuracy") for name, x in results.items()}
    size = {name: x.mean("state_bytes") for name, x in results.items()}
    for line in table("features"):
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        result = results[name]
        found = f"{result.mean('accuracy'):.2f} ± {result.spread('accuracy'):.2f}"
        assert cells == [f"{result.mean('state_bytes'):,.0f}", found]
    slots, one, delta = "2 heads, 64 slots x 16", "64 slots x 16", "DeltaNet, 16 x 16"
    good = [x for x in accuracy if x.startswith("Gated DeltaNet") and accuracy[x] >= 0.9]
    assert min(accuracy[slots], accuracy[one], accuracy[delta]) >= 0.9
    assert size[slots] < min(size[name] for name in good) == max(size.values())
    for name in ("Gated DeltaNet, 24 x 32", "Gated DeltaNet, 24 x 40"):
        assert sum(x >= 0.9 for x in results[name].values("accuracy")) == 1
    assert size[delta] < size[one] < size["log"]
    said = {name: f"{100 * x:.0f}%" for name, x in accuracy.items()}
    assert accuracy[slots] > 0.99
    assert "64 slots and values of dimension 16 answer more than 99% of the queries" in STUDY_TEXT
    assert f"log-attention answers {said['log']} with a state of nearly the same size" in STUDY_TEXT
    assert f"one head, with a smaller state, answers {said[one]}." in STUDY_TEXT
    seeds = "{:.0%} and {:.0%}".format(*results[one].values("accuracy"))
    assert f"a little above 90% in the mean of its two seeds ({seeds})" in STUDY_TEXT
    assert f"16 x 16 answers {said[delta]}." in STUDY_TEXT
    shown = table("features")
    assert f"The table shows {len(shown)} of the {len(results)} rows of the report." in STUDY_TEXT
    differences = differences_of(load_study("recall_features"), [*results.values()])
    assert f"Holm's correction for the {len(differences)} comparisons" in STUDY_TEXT
    assert min(adjusted_p_values(differences, "accuracy").values()) > 0.05


def test_slots_are_those_of_the_studies():
    text = (ROOT / "docs/mechanisms.md").read_text().partition("<!-- slots -->\n```\n")[2]
    (layer,) = single_layers(parse_pattern([text.splitlines()[0]]))
    assert (layer.mechanism, dict(layer.options)) == ("log", sweeps.SLOTS)


def test_ablation_figures_are_those_of_the_study():
    results = results_of_study("language_model_parts")
    of = {result.compared["change"]: result for result in results}
    whole = of.pop("baseline: log, decay by head")

    def loss_added(name: str, metric: str = "loss") -> str:
        return f"{of[name].mean(metric) - whole.mean(metric):.3f}"

    assert f"The loss is {loss_added('no convolution')} larger without convolutions" in STUDY_TEXT
    added = loss_added("no decay"), loss_added("no decay", "loss_1024")
    said = "Without decay it is {} larger, hardly more than this threshold, and {} on sequences"
    assert said.format(*added) in STUDY_TEXT
    alone = of["windows of 16 only"]
    assert f"alone reach {alone.mean('loss'):.3f}, and {alone.mean('loss_1024'):.3f}" in STUDY_TEXT
    assert f"unchanged, the model reaches {whole.mean('loss'):.3f}" in STUDY_TEXT
    added = {name: x.mean("loss") - whole.mean("loss") for name, x in of.items()}
    seeds = [x.values("loss") for x in results_by_model("language_model").values()]
    freedom = sum(len(values) - 1 for values in seeds)
    squares = sum((len(values) - 1) * statistics.variance(values) for values in seeds)
    deviation = math.sqrt(squares / freedom)
    least = stats.t.ppf(1 - 0.025 / len(added), freedom) * 2**0.5 * deviation
    said = f"seeds is {deviation:.3f} in the study above, so that differences of {len(added)} "
    assert f"{said}changes are inconclusive below {least:.3f}," in STUDY_TEXT
    paper = "the paper's recurrence, MLP ratio 3"
    large = {name for name, x in added.items() if x > least}
    assert large == {"no convolution", "no decay", paper, "windows of 16 only"}
    fewer = 1 - of[paper].mean("parameters") / whole.mean("parameters")
    said = f"with {fewer:.0%} fewer parameters, is worse by {loss_added(paper)}."
    assert said in STUDY_TEXT


def test_shakespeare_figures_are_those_of_the_study():
    results = results_of_study("shakespeare")
    losses = {result.compared["mechanism"]: result.mean("loss") for result in results}
    assert len(losses) == 19
    assert {x for x in losses if x.startswith("log, ")} == {
        "log, linear values",
        "log, decay by head",
        "log, decay by feature",
    }
    assert "sixteen causal mechanisms, and three variants of log-attention" in STUDY_TEXT
    best = sorted(losses, key=lambda name: losses[name])[:2]
    assert sorted(best) == ["log, decay by feature", "log, decay by head"]
    said = f"has the smallest loss, {losses[best[0]]:.3f}; softmax attention reaches "
    assert f"{said}{losses['softmax']:.3f}" in STUDY_TEXT
    spread = max(losses.values()) - min(losses.values())
    assert f"within {np.ceil(1e3 * spread) / 1e3:.3f} nats" in STUDY_TEXT


def test_capacity_of_recall_is_that_of_the_study():
    results = {x.compared["mechanism"]: x for x in results_of_study("recall_capacity")}
    shown, pairs = [], (8, 16, 32, 64)
    for line in table("capacity"):
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
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
    full = "softmax", "softmax, one key/value head", "MLA", "FoX", "hybrid: softmax, then log"
    assert all(at[64][x] > 0.999 for x in full)
    constant = {name: x for name, x in at[64].items() if name not in full}
    best = sorted(constant, key=lambda name: -constant[name])[:5]
    window, taylor, _, large, delta = best
    tokens = attention.mechanism("log_window").short_options(256)["window_size"]
    assert f"a window of {tokens} tokens merged with log-attention has" in STUDY_TEXT
    assert best == ["window merged with log", "Taylor", "Mamba-2", "log, 256 slots", "DeltaNet"]
    said = "pairs, {:.2f}, but in {:.0f} kB; Taylor attention has {:.2f} in {:.0f} kB, a tenth of "
    said += "the bytes of all keys and values, log-attention with 256 slots {:.2f} in {:.0f} kB, "
    said += "and DeltaNet {:.2f} in {:.0f} kB."
    chosen = (
        x for name in (window, taylor, large, delta) for x in (at[64][name], size[name] / 1e3)
    )
    assert said.format(*chosen) in STUDY_TEXT
    assert 0.095 < size[taylor] / size["softmax"] < 0.105
    found = difference("recall_capacity", taylor, delta, "accuracy_64_pairs")
    said = f"by {found.mean:.2f} (95% confidence interval {interval(found)}, not corrected"
    assert f"of 64 pairs than DeltaNet, {said}" in STUDY_TEXT
    by_adamw = {tuple(x.compared.values()): x for x in results_of_study("recall")}
    before = f"{100 * by_adamw[taylor, '64'].mean('accuracy'):.0f}%"
    assert f"with 800 updates by AdamW and two learning rates, it answers {before}" in STUDY_TEXT
    slots = "log, 144 slots"
    assert all(
        of["DeltaNet"] > of[slots] and of["mLSTM"] > of["log, 64 slots"] for of in at.values()
    )
    rivals = "Gated DeltaNet", "Kimi Delta Attention"
    assert all(0.9 < size[slots] / size[name] < 1.1 for name in ("DeltaNet", *rivals))
    gains = [f"{at[64][slots] - at[64][name]:.2f}" for name in rivals]
    assert f"by {gains[0]} and {gains[1]}" in STUDY_TEXT
    assert all(at[number][slots] < at[number][name] for number in (8, 16) for name in rivals)
    frontier = {
        name
        for name in constant
        if not any(size[x] < size[name] and at[64][x] >= at[64][name] for x in constant)
    }
    assert {name for name in frontier if name.startswith("log")} == {slots}
    said = f"DeltaNet has {at[64]['DeltaNet'] - at[64][slots]:.2f} more in "
    assert f"{said}{size['DeltaNet'] / size[slots] - 1:.0%} more bytes" in STUDY_TEXT
    assert size["linear"] == size["log"]
    found = difference("recall_capacity", "linear", "log", "accuracy_64_pairs")
    said = f"{at[64]['linear']:.2f} against {at[64]['log']:.2f} at 64 pairs (difference "
    said += f"{interval(found)}); decay by head does not help "
    assert f"{said}({at[64]['log, decay by head']:.2f})" in STUDY_TEXT
    pairs_of = [(x, slots) for x in ("DeltaNet", taylor, *rivals)] + [("mLSTM", "log, 64 slots")]
    pairs_of.append((taylor, large))
    for pair in pairs_of:
        found = difference("recall_capacity", *pair, "accuracy_64_pairs")
        assert found.verdict == "no difference"
    names = taylor, "DeltaNet", slots, "log"
    of = [f"{at[64][name]:.0%} in {size[name] / 1000:.0f} kB" for name in names]
    said = "Taylor attention answers {} of 64 pairs in {}, DeltaNet {}, log-attention with 144 "
    said += "[slots](docs/mechanisms.md#slots) {}, without slots {}."
    assert said.format(*of[0].split(" in "), *of[1:]) in README_TEXT
    rates = [*load_study("recall_capacity").axes["learning_rate"]]
    assert not {rates[0], rates[-1]} & {x.tuned["learning_rate"] for x in results.values()}


def test_copying_figures_are_those_of_the_study():
    results = {tuple(x.compared.values()): x for x in results_of_study("copying")}
    lines = table("copying")
    assert 3 * len(lines) == len(results)
    lengths = {"copying": (20, 30, 60), "selective copying": (64, 256), "induction": (256, 1024)}
    accuracy = {}
    for line in lines:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
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
    assert best == ["softmax", "log, slots", "Mamba-2"]
    said = "slots reaches {:.2f} at 60 letters, Mamba-2 {:.2f} with seven times the bytes, "
    said = said.format(*(at_60[name] for name in best[1:]))
    said += f"Performer {at_60['Performer']:.2f}; two seeds do not separate them"
    assert said in STUDY_TEXT
    said = "softmax attention copies with an accuracy of {:.2f}, log-attention {:.2f}."
    assert said.format(at_60["softmax"], at_60["log"]) in README_TEXT
    study = replace(load_study(ROOT / "configs/studies/copying.py"), baseline="log, slots")
    near = differences_of(study, [*results.values()])
    verdicts = {tuple(x.compared.values()): x.verdict for x in near if x.metric == "accuracy_60"}
    for name in ("Mamba-2", "Performer"):
        assert verdicts["copying", name] == "no difference"
    parameters = [x.mean("parameters") for x in results.values()]
    assert (
        "are not: {:,.0f} to {:,.0f}".format(*(round(f(parameters), -3) for f in (min, max)))
        in STUDY_TEXT
    )
    slots, mamba = (results["copying", name].mean("state_bytes") for name in best[1:])
    assert 6 < mamba / slots < 7.5
    selective = {name: x for (name, *at), x in accuracy.items() if at == ["selective copying", 64]}
    rules = "DeltaNet", "Gated DeltaNet", "Kimi Delta Attention"
    longer = {name: accuracy[name, "selective copying", 256] for name in selective}
    assert min(of[name] for name in rules for of in (selective, longer)) > 0.99
    assert max(x for name, x in longer.items() if name not in rules) < 0.9
    assert f"softmax attention reaches {selective['softmax']:.2f}" in STUDY_TEXT
    assert {f"{selective[x]:.2f}" for x in ("log, slots", "log, decay by feature")} == {"0.99"}
    longest = {
        name for (name, *at), x in accuracy.items() if at == ["induction", 1024] and x > 0.98
    }
    logs = "log", "log, linear values", "log, slots"
    others = "softmax", "Performer", "linear", "additive", "DeltaNet"
    assert longest == {*others, *logs}
    short = {at[1]: x.values("accuracy_64") for at, x in results.items() if at[0] == "induction"}
    assert {name for name, x in short.items() if max(x) < 0.99} == {"sliding window"}
    failing = {name for name, x in short.items() if min(x) < 0.99 < max(x)}
    assert failing == {"FoX", "Gated DeltaNet", "recurrent memory"}
    names = "Gated DeltaNet", "recurrent memory", "FoX"
    said = "the second seed of Gated DeltaNet answers {:.0%}, that of the recurrent memory {:.0%} "
    said += "and that of FoX {:.0%};"
    assert said.format(*(short[name][1] for name in names)) in STUDY_TEXT
    chosen = [x.tuned["learning_rate"] for at, x in results.items() if at[0] == "induction"]
    assert sum(x in ("0.01", "0.03") for x in chosen) == len(chosen) - 1
    seeds = results["copying", "MLA"].values("accuracy_60")
    said = "one seed of MLA has {:.2f} at 60 letters, the other {:.2f}."
    assert said.format(*sorted(seeds, reverse=True)) in STUDY_TEXT
    at_small_rate = study.restricted("learning_rate", ["0.003"])
    for x in results_of(at_small_rate, ROOT / "benchmarks/results/studies/copying"):
        if x.compared["mechanism"] in failing - {"FoX"} and x.compared["task"] == "induction":
            assert min(x.values("accuracy_64")) == 1
            assert len(x.records) == 2
    lines = (ROOT / "benchmarks/results/studies/copying/results.jsonl").read_text().splitlines()
    (failed,) = (x for x in map(json.loads, lines) if "failed" in x)
    assert failed["labels"].items() >= {
        ("task", "copying"),
        ("mechanism", "Gated DeltaNet"),
        ("learning_rate", "0.003"),
    }
    (skipped,) = re.findall(r"(\d+) consecutive updates", failed["failed"])
    said = "the run of Gated DeltaNet with a learning rate of 0.003 ended early, after "
    assert f"{said}{skipped} consecutive updates were skipped" in STUDY_TEXT
    largest = [*study.axes["learning_rate"]][-1]
    number = sum(x.tuned["learning_rate"] == largest for x in results.values())
    assert f"{number} of the {len(results)} rows is the largest that was tried" in STUDY_TEXT
    assert min(results["copying", name].mean("accuracy_20") for name in ("FoX", "MLA")) > 0.997
    assert max(at_60["FoX"], at_60["MLA"]) < 0.5
    assert max(x for name, x in at_60.items() if name != "softmax") < 0.64
    assert min(results["selective copying", "Mamba-2"].values("accuracy_64")) < 0.6


def test_state_tracking_figures_are_those_of_the_study():
    results = {tuple(x.compared.values()): x for x in results_of_study("state_tracking")}
    groups = "parity", "modulo 5", "permutations"
    metrics = "accuracy", "accuracy_128", "accuracy_256"
    found = {
        name: {(x, y): results[name, x].mean(y) for x in groups for y in metrics}
        for name in {name for name, _ in results}
    }
    lines = table("state tracking")
    assert len(lines) == len(found)
    for line in lines:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        of = found[name]
        assert cells == [f"{of[x, y]:.2f}" for x in groups for y in metrics[:2]]
    rules = "DeltaNet", "Gated DeltaNet", "Kimi Delta Attention"
    negative = [f"{name}, negative eigenvalues" for name in rules]
    for name in found.keys() - set(negative):
        assert found[name]["parity", "accuracy_128"] < (0.61 if "Delta" in name else 0.57)
        for inverting in negative:
            best = found[inverting]["permutations", "accuracy"]
            assert best > found[name]["permutations", "accuracy"]
    assert all(found[name]["parity", "accuracy"] > 0.9999 for name in negative)
    longer = f"{100 * found[negative[1]]['parity', 'accuracy_256']:.0f}%"
    assert f"and Gated DeltaNet that of 256 bits with {longer} accuracy" in STUDY_TEXT
    said = "Parity of 128 bits: Gated DeltaNet with negative eigenvalues has {:.2f}, log-attention "
    said += "{:.2f}."
    of_bits = (found[name]["parity", "accuracy_128"] for name in (negative[1], "log"))
    assert said.format(*of_bits) in README_TEXT
    seeds = results[negative[0], "parity"].values("accuracy_128")
    assert f"one of two seeds of DeltaNet has {min(seeds):.2f}." in STUDY_TEXT
    assert max(seeds) > 0.99
    assert all(of["permutations", "accuracy_128"] < 0.3 for of in found.values())
    assert all(of["modulo 5", "accuracy_256"] < 0.33 for of in found.values())
    sums = {name: of["modulo 5", "accuracy"] for name, of in found.items()}
    assert sums["log"] == max(sums.values())
    assert f"the highest mean at the trained length, {sums['log']:.2f}, and linear" in STUDY_TEXT
    assert min(sums["linear"], sums["GLA"]) > sums["log"] - 0.05
    seeds = results[negative[-1], "modulo 5"].values("accuracy")
    said = "Attention with negative eigenvalues has {:.2f} with one seed and {:.2f} with the other."
    assert said.format(*seeds) in STUDY_TEXT
    rates = [*load_study(ROOT / "configs/studies/state_tracking.py").axes["learning_rate"]]
    extreme = [x for x in results.values() if x.tuned["learning_rate"] in (rates[0], rates[-1])]
    assert len(extreme) == 9
    assert f"of nine of the {len(results)} rows is the smallest or the largest" in STUDY_TEXT
    assert (
        f"differ by up to {2 * max(x.spread('accuracy') for x in results.values()):.2f}"
        in STUDY_TEXT
    )
