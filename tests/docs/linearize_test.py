"""Figures of docs/linearize.md are those of the committed records."""

import json
from functools import partial

import numpy as np
import pytest

from heinsen_jax.models import LanguageModel
from heinsen_jax.study import load_study
from heinsen_jax.study.linearization import MAIN, MERGED, TRAINED_FURTHER
from heinsen_jax.study.results import RESULTS_FILE
from tests.conftest import ROOT
from tests.docs.pages import PAGES_TEXT, read_record, results_of_study, size_in_words, table
from tests.study.linearization_test import COMPARED

ROWS = {(x["model"], x["context"], x["rows"]): x for x in read_record("linearized_serving")["rows"]}
CONTEXTS = 1024, 16_384, 65_536
LONGEST = {"linearize_shakespeare": "loss_1024", "linearize_python": "loss_2048"}


def speed(model: str, context: int, rows: int = 1) -> str:
    row = ROWS[model, context, rows]
    return f"{rows / row['seconds_per_token']:,.0f}"


def seconds(model: str, context: int, rows: int = 1) -> str:
    found = ROWS[model, context, rows]["first_token_seconds"]
    return f"{found:.2g}" if found < 100 else f"{found:.0f}"


def test_speeds_of_linearized_models_are_those_of_the_record():
    models = list(dict.fromkeys(model for model, *_ in ROWS))
    shown = [
        "| "
        + " | ".join(
            [
                model,
                *(speed(model, context) for context in CONTEXTS),
                speed(model, 16_384, 8),
                *(seconds(model, context) for context in CONTEXTS),
                size_in_words(ROWS[model, 65_536, 1]["state_bytes"]),
            ]
        )
        + " |"
        for model in models
    ]
    assert table("linearized serving") == shown


def test_savings_of_linearized_models_are_those_of_the_record():
    teacher, log, window, hybrid = (
        ROWS[name, 65_536, 1]
        for name in ("teacher", "log, Hedgehog", MERGED, f"{MERGED}, 1 of 4 softmax")
    )
    text = PAGES_TEXT
    faster = [teacher["seconds_per_token"] / x["seconds_per_token"] for x in (log, window, hybrid)]
    assert f"alone generates {faster[0]:.0f} times as many tokens per second" in text
    assert f"window of 16 {faster[1]:.0f} times as many" in text
    assert f"the model generates {faster[2]:.1f} times as many" in text
    first = [teacher["first_token_seconds"] / x["first_token_seconds"] for x in (log, window)]
    assert "come {:.0f} and {:.0f} times as fast".format(*first) in text
    added = [x["peak_bytes"] / 1e6 for x in (teacher, window)]
    said = "adds {:.0f} MB to the process with the teacher, and at most {:.0f} MB"
    assert said.format(*added) in text
    slower = ROWS[MERGED, 1024, 1]["seconds_per_token"]
    assert 1 < slower / ROWS["teacher", 1024, 1]["seconds_per_token"] < 1.1


def study_tables(name: str) -> tuple[list[str], list[str]]:
    """The rows on a study: the mechanisms with all fractions of the tokens, and the other models,
    without those that have no results. Losses at the longest length are those after the largest
    fraction of the table."""
    study, longest, compared = load_study(name), LONGEST[name], COMPARED[name]
    length = int(longest.partition("_")[2])
    results = {(x.compared["model"], x.compared["tokens"]): x for x in results_of_study(name)}
    models = {runs[0].labels["model"]: runs[0].config.model for runs in study.groups()}
    tables: tuple[list[str], list[str]] = ([], [])
    for model, config in models.items():
        is_main = model in MAIN
        cells, fractions = [model], [*study.axes["tokens"]] if is_main else compared
        for tokens in fractions:
            found = results.get((model, tokens))
            cells.append(f"{found.mean('loss'):.3f}" if found else "")
        found = results.get((model, fractions[-1]))
        cells.append(f"{found.mean(longest):.3f}" if found else "")
        if not any(cells[1:]):
            continue
        cells.append(size_in_words(LanguageModel.abstract(config).state_size(length)))
        tables[not is_main].append(f"| {' | '.join(cells)} |")
    return tables


@pytest.mark.parametrize("name", LONGEST)
def test_losses_of_linearized_models_are_those_of_the_study(name):
    mechanisms, others = study_tables(name)
    assert table(name) == mechanisms
    assert table(f"{name}, others") == others


def test_prose_on_linearized_models_of_shakespeare_is_of_the_study():
    study = load_study("linearize_shakespeare")
    results = {tuple(x.compared.values()): x for x in results_of_study("linearize_shakespeare")}
    text, more = PAGES_TEXT, COMPARED["linearize_shakespeare"][-1]

    def loss(model: str, tokens: str, metric: str = "loss") -> str:
        return f"{results[model, tokens].mean(metric):.3f}"

    window, log, decay = "window of 16", "log, Hedgehog", "log, Hedgehog, decay"
    assert f"{loss(window, '1%')} alone and {loss(MERGED, '1%')} merged" in text
    best = min(x.mean("loss_1024") for x in results.values())
    assert best == results[window, "100%"].mean("loss_1024")
    assert f"the smallest loss at 1,024 of all models, {best:.3f}" in text
    model = study.run({x: next(iter(y)) for x, y in study.axes.items()}).config.model
    reach = 1 + model.num_layers * (16 - 1 + 2 * (model.convolution - 1))
    assert f"convolutions of {model.convolution} characters, it reaches {reach} characters" in text
    assert reach > study.base.data.sequence_length
    assert f"from {loss(decay, '1%')} with 1% to {loss(decay, '100%')} with 100%" in text
    without = [loss(x, more) for x in (log, "Taylor", "linear, elu + 1")]
    assert f"{', '.join(without[:2])} and {without[2]} with 30%" in text
    for name in (log, window):
        kept = [loss(name + x, more) for x in ("", ", 1 of 4 softmax", ", 1 of 2 softmax")]
        assert "from {} to {} and {}".format(*kept) in text
    assert loss(f"{window}, 1 of 2 softmax", more) == loss(TRAINED_FURTHER, more)
    models = TRAINED_FURTHER, MERGED, f"{MERGED}, decay"
    longer = [loss(x, "100%", "loss_1024") for x in models]
    said = "has a loss of {}, and a window merged with log-attention one of {}, with decay {}"
    assert said.format(*longer) in text


def test_stage_2_alone_is_better_at_the_same_learning_rate():
    study = load_study("linearize_shakespeare")
    rate = study.base.optimizer.learning_rate / 4
    path = ROOT / "benchmarks/results/studies/linearize_shakespeare" / RESULTS_FILE
    losses = {
        (x["model"], x["tokens"]): row["metrics"]["loss"]
        for row in map(json.loads, path.read_text().splitlines())
        if (x := row["labels"])["learning_rate"] == f"{rate:g}" and x["seed"] == "11"
    }
    few = COMPARED["linearize_shakespeare"]
    alone, both, merged_alone, merged = (
        [losses[model + rest, tokens] for tokens in few]
        for model in ("log, Hedgehog", MERGED)
        for rest in (", stage 2 only", "")
    )
    assert all(np.array(alone) < both)
    assert all(np.array(merged_alone) < merged)
    log = "a loss of {:.3f} with 3% and {:.3f} with 30%, both stages {:.3f} and {:.3f}"
    assert log.format(*alone, *both) in PAGES_TEXT
    window = "a merged window {:.3f} and {:.3f}, both stages {:.3f} and {:.3f}"
    assert window.format(*merged_alone, *merged) in PAGES_TEXT


def test_prose_on_linearized_models_of_python_is_of_the_study():
    results = {tuple(x.compared.values()): x for x in results_of_study("linearize_python")}

    def after(tokens: str, *models: str, metric: str = "loss") -> list[float]:
        return [results[model, tokens].mean(metric) for model in models]

    def check(said: str, *losses: float) -> None:
        assert said.format(*(f"{x:.3f}" for x in losses)) in PAGES_TEXT

    log, decayed, merged_decayed = "log, Hedgehog", "log, Hedgehog, decay", f"{MERGED}, decay"
    longer, shorter = "window of 64", "window of 16"
    at_2048 = partial(after, "100%", metric="loss_2048")
    pair = longer, TRAINED_FURTHER
    said = "its loss is {}, that of the teacher {}; at 2,048, {} and {}."
    check(said, *after("100%", *pair), *at_2048(*pair))
    both = f"{longer} merged with log"
    check("does not help: {}, and {} at 2,048.", *after("100%", both), *at_2048(both))
    check("length, where {} becomes {}; at 2,048 only", *after("100%", shorter, MERGED))
    check("{} alone, {} merged and {} with decay.", *at_2048(shorter, MERGED, merged_decayed))
    check("raises the loss of log-attention from {} to {};", *after("10%", log, decayed))
    said = "lowers it from {} to {}, and at 2,048 from {} to {}, below the merged windows of 16."
    check(said, *after("100%", log, decayed), *at_2048(log, decayed))
    assert at_2048(decayed) < min(at_2048(MERGED), at_2048(merged_decayed))

    without_window = "Taylor", log, decayed, "linear, elu + 1", "Gated DeltaNet"
    taylor, _, _, linear, delta = without_window
    losses = after("10%", *without_window)
    assert losses == sorted(losses)
    said = "{}, followed by log-attention ({}; with decay {}), linear attention ({}) and"
    check(f"{said} Gated DeltaNet ({{}}).", *losses)
    said = "{} and {}, with an eighth of its state; Gated DeltaNet has {} and linear attention {}."
    check(said, *after("100%", decayed, taylor, delta, linear))
    states = [results[x, "100%"].records[0]["state_bytes"] for x in (taylor, decayed)]
    assert 7.5 < states[0] / states[1] < 8.5
    closest, teacher = min(after("100%", *without_window)), *after("100%", TRAINED_FURTHER)
    assert f"the closest, has a loss {closest - teacher:.2f} higher." in PAGES_TEXT
    for model in (log, MERGED):
        kept = after("10%", *(model + x for x in ("", ", 1 of 4 softmax", ", 1 of 2 softmax")))
        check("from {} to {} and {}", *kept)
    check("teacher trained further has {}.", *after("10%", TRAINED_FURTHER))
    said = "log-attention {} and the merged window {}."
    check(said, *after("10%", *(f"{x}, stage 2 only" for x in (log, MERGED))))
