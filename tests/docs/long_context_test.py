"""Losses on longer contexts in the README and docs are those of the committed studies."""

import json
import statistics
from itertools import product

import numpy as np
from scipy import stats

from heinsen_jax.models import LanguageModel
from heinsen_jax.study import adjusted_p_values, differences_of, load_study
from tests.docs.pages import (
    README,
    README_TEXT,
    ROOT,
    STUDY_TEXT,
    difference,
    interval,
    read_record,
    results_by_model,
    results_of_study,
    size_in_words,
    table,
)


def test_longer_contexts_are_those_of_the_study():
    study = load_study(ROOT / "configs/studies/long_context.py")
    results = results_by_model("long_context")
    found = differences_of(study, [*results.values()])
    verdicts = {(x.compared["model"], x.metric): x.verdict for x in found}
    for line, (name, x) in zip(table("long context"), results.items(), strict=True):
        assert 1_050_000 < x.mean("parameters") < 1_070_000
        cells = [name, f"{x.mean('state_bytes') / 1000:,.0f}"]
        cells += [f"{x.mean(metric):.2f}" for metric in ("loss_32", "loss_128")]
        cells += [f"{x.mean(y):.3f} ± {x.spread(y):.3f}" for y in ("loss", "loss_2048")]
        cells += [verdicts.get((name, metric), "") for metric in ("loss", "loss_2048")]
        assert line == f"| {' | '.join(cells)} |"
    for metric in ("loss", "loss_2048"):
        p_values = adjusted_p_values(found, metric)
        assert len(p_values) == len(results) - 1
        no_difference = {name for (name,), p in p_values.items() if p > 0.05}
        assert no_difference == {"log, slots", "log, time constants up to 64"}
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


def test_prose_on_longer_contexts_is_of_the_study():
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
    first, after_windows = "softmax, then 3 log", "3 windows of 64, then softmax"
    cached = fox, alibi, three, two
    constant = log, slots, alternating, *recurrent

    def span(values: dict[str, float], names: tuple[str, ...], less: float = 0) -> str:
        of = [values[name] - less for name in names]
        return f"{min(of):.2f} to {max(of):.2f}"

    said = "FoX, ALiBi and hybrids of log-attention before softmax attention gain "
    said += f"{span(gain, cached)} nats, softmax "
    said += f"attention before log-attention {gain[first]:.2f}, after windows "
    said += f"{gain[after_windows]:.2f}, log-attention with decay {gain[log]:.2f}, and Gated "
    said += f"DeltaNet, Mamba-2 and GLA {span(gain, recurrent)}."
    assert said in STUDY_TEXT
    assert f"a window of 64 gains {late[window]:.2f}, since" in STUDY_TEXT
    most = max(late[name] for name in constant)
    assert f"states of constant size gain no more than {most:.2f}." in STUDY_TEXT
    assert min(late[name] for name in cached) > 2 * most
    assert max(x for name, x in late.items() if name not in cached) <= most
    assert max(late[rotary], late[merged]) < 0
    assert min(loss[x] for x in (*constant, window, merged)) == loss[alternating]
    less = {x: f"{loss[x] - loss[alternating]:.2f} less than" for x in (log, window, rotary)}
    said = f"have the smallest loss, {loss[alternating]:.3f} at 512 tokens: {less[log]} "
    on_windows, on_rotary = (
        interval(difference("long_context", x, alternating, "loss")) for x in (window, rotary)
    )
    said += f"log-attention alone, {less[window]} windows alone (95% confidence interval "
    said += f"{on_windows}), which need more bytes, and {less[rotary]} softmax attention with "
    assert f"{said}rotary positions ({on_rotary})." in STUDY_TEXT
    assert size[alternating] < size[window]
    said = f"Mamba-2 and GLA, by {span(loss, recurrent, loss[log])}; the states of the first two"
    assert said in STUDY_TEXT
    assert size["GLA"] < size[log] < min(size[name] for name in recurrent[:2])
    assert f"better than log-attention, by {loss[log] - loss[window]:.2f}." in STUDY_TEXT
    assert abs(loss[window] - loss[merged]) < results[window].spread("loss")
    said = f"worse by {longest[merged] - longest[window]:.2f} at 2048, in "
    assert f"{said}{size[merged] / size[window]:.1f} times the bytes" in STUDY_TEXT
    more = size[slots] / size[log] - 1
    said = f"Slots show no difference at 512 and 2048 tokens, with a state {more:.0%} larger, and "
    assert f"{said}are worse at 32." in STUDY_TEXT
    assert difference("long_context", slots, log, "loss_32").verdict == "worse"
    said = f"reaches {loss[three]:.3f}, ALiBi in all layers {loss[alibi]:.3f}, and FoX "
    low, middle, high = sorted(results[fox].values("loss"))
    said += f"{loss[fox]:.3f}; two of FoX's three seeds reach {low:.2f} and {middle:.2f}, the third"
    assert f"{said} {high:.2f}. Softmax attention in every second layer has the " in STUDY_TEXT
    assert f"smallest loss, {loss[two]:.3f}." in STUDY_TEXT
    assert min(loss.values()) == loss[two]
    in_last = difference("long_context", first, three, "loss")
    said = f"reaches {loss[first]:.3f}, {in_last.mean:.2f} more than in the last (95% confidence "
    assert f"{said}interval {interval(in_last)})." in STUDY_TEXT
    on_alternating = difference("long_context", first, alternating, "loss")
    assert on_alternating.verdict == "no difference"
    assert f"windows, which needs {size[alternating] / size[first]:.0%} of its" in STUDY_TEXT
    shorter, large, mamba = "log, time constants up to 64", "Mamba-2, state of 128", "Mamba-2"
    said = f"With time constants up to 64, log-attention reaches {loss[shorter]:.3f}, which does "
    assert f"{said}not differ significantly from {loss[log]:.3f}." in STUDY_TEXT
    said = f"reaches {loss[large]:.3f} with {size[large] / size[mamba]:.1f} times the bytes."
    assert said in STUDY_TEXT
    assert loss[large] > loss[mamba]


def test_both_kinds_of_hybrids_have_smaller_losses_with_log_attention():
    results = results_by_model("long_context")
    gated, windows = "alternating Gated DeltaNet and window of 64", "3 windows of 64, then softmax"
    for name, baseline, said in (
        (gated, "alternating log and window of 64", "with log-attention (95% confidence interval "),
        (windows, "3 log, then softmax", "after three layers of log-attention ("),
    ):
        found = difference("long_context", name, baseline, "loss")
        said = f"{results[name].mean('loss'):.3f}, {found.mean:.2f} more than {said}"
        assert f"{said}{interval(found)})" in STUDY_TEXT
        on_windows = difference("long_context", name, "window of 64, rotary", "loss")
        assert on_windows.verdict == "no difference"


def test_losses_at_equal_budgets_are_those_of_the_results():
    results = results_of_study("long_context_updates")
    mean = {(x.compared["model"], int(x.compared["updates"])): x.mean("loss") for x in results}
    record = read_record("equal_budgets")
    numbers, models = record["budgets"], record["models"]

    def at(model: str, updates: int, budget: str) -> float:
        return statistics.mean(models[model]["loss"][str(updates)][budget])

    for line, (name, row) in zip(table("equal budgets"), models.items(), strict=True):
        cells = [name, *(f"{mean[name, x]:.2f}" for x in (150, 300, 600))]
        cells.append(f"{row['seconds_per_update']:.2f}")
        for losses in (row["loss"][str(x)] for x in numbers):
            cells += [
                "" if None in x else f"{statistics.mean(x):.2f}"
                for x in (losses["flops"], losses["time"])
            ]
        assert line == f"| {' | '.join(cells)} |"
    rotary, fox, log, gated = "softmax, rotary", "FoX", "log, decay by head", "Gated DeltaNet"
    of_three_seeds = results_by_model("long_context")
    said = f"for FoX {mean[fox, 600]:.2f} instead of {of_three_seeds[fox].mean('loss'):.2f}."
    assert said in STUDY_TEXT
    for name in models:
        assert abs(mean[name, 600] - of_three_seeds[name].mean("loss")) < 0.01 or name == fox
    gains = {name: mean[name, 150] - mean[name, 600] for name in models}
    to_all = {name for name in models if "softmax" in name or name == fox}
    assert min(gains[x] for x in to_all) > max(gains[x] for x in models if x not in to_all)
    gain = {x: f"{gains[x]:.2f}" for x in (rotary, fox, log, gated)}
    said = f"positions gains {gain[rotary]} nats, FoX {gain[fox]}, log-attention {gain[log]} and "
    assert f"{said}Gated DeltaNet {gain[gated]}." in STUDY_TEXT
    for updates, name in product((300, 600), (rotary, fox)):
        losses = (models[x]["loss"][str(updates)]["time"] for x in (log, name))
        assert stats.ttest_ind(*losses, equal_var=False).pvalue > 0.05
    ahead = [at(x, 300, "time") - at(log, 300, "time") for x in (rotary, fox)]
    behind = [at(log, 600, "time") - at(x, 600, "time") for x in (rotary, fox)]
    said = "softmax attention, by {:.2f} and {:.2f}; with that of 600, it is larger by {:.2f} and "
    said += "{:.2f}; with two seeds, the 95%"
    assert said.format(*ahead, *behind) in STUDY_TEXT
    windows = [
        at("window of 64, rotary", *budget) - at("alternating log and window of 64", *budget)
        for budget in product((300, 600), ("flops", "time"))
    ]
    said = "larger than that of windows that alternate with log-attention, by "
    assert f"{said}{min(windows):.2f} to {max(windows):.2f}." in STUDY_TEXT
    for updates, best in ((300, "window of 64"), (600, "softmax")):
        for budget in ("flops", "time"):
            trained = [x for x in models if None not in models[x]["loss"][str(updates)][budget]]
            smallest, second = sorted(trained, key=lambda x: at(x, updates, budget))[:2]
            assert smallest == f"alternating log and {best}"
            losses = (models[x]["loss"][str(updates)][budget] for x in (smallest, second))
            assert stats.ttest_ind(*losses, equal_var=False).pvalue > 0.05


def test_losses_by_position_are_those_of_the_study():
    results = results_by_model("long_context")
    loss = {
        name: [x.mean(f"loss_2048_at_{end}") for end in (32, 128, 256, 512, 1024, 2048)]
        for name, x in results.items()
    }
    window = loss.pop("window of 64, rotary")
    less = {name: np.subtract(values, window) for name, values in loss.items()}
    first, *lines = table("positions")
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
    assert (np.diff(less["softmax, then 3 log"][2:]) > -0.02).all()


def test_the_table_on_longer_contexts_is_of_the_study():
    study, results = load_study("long_context"), results_by_model("long_context")
    models = {
        runs[0].labels["model"]: LanguageModel.abstract(runs[0].config.model)
        for runs in study.groups()
    }
    rows = README.partition("| | loss at 512 |")[2].partition("\n\n")[0]
    lines = rows.splitlines()[2:]
    assert len(lines) == 8
    spreads = []
    for line in lines:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        x = results[name]
        losses = (f"{x.mean(metric):.3f}" for metric in ("loss", "loss_2048"))
        sizes = (size_in_words(models[name].state_size(y)) for y in (1024, 32_768, 1_048_576))
        assert cells == [*losses, *sizes]
        spreads += [x.spread(metric) for metric in ("loss", "loss_2048")]
    assert f"three seeds (± at most {max(spreads):.2f})" in README_TEXT
