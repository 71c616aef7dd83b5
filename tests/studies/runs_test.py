"""Runs of a study: the content that they began with, and their costs."""

from dataclasses import replace

import pytest

from heinsen_jax.errors import UserError
from studies.runs import check_content, costs
from tests.studies.small import BASE


@pytest.mark.parametrize("now", [{"data": "2"}, {}, {"data": "2", "teacher": "3"}])
def test_results_with_other_data_are_refused(now):
    with pytest.raises(UserError, match="a run: the data have changed since"):
        check_content({"data": "1"}, now, "a run")


def test_results_with_the_same_data_are_used():
    check_content({"data": "1", "teacher": "3"}, {"data": "1", "teacher": "3"}, "a run")
    check_content({}, {"data": "1"}, "a run")  # earlier versions recorded none


def test_tokens_are_those_of_all_stages():
    longer = replace(BASE, training=replace(BASE.training, steps=10))
    one, both = costs(BASE), costs(longer, BASE)
    assert one["tokens"] == 4 * 16 * 8
    assert both["tokens"] == 14 * 16 * 8
    assert both["parameters"] == one["parameters"]
    assert both["flops"] == one["flops"] / one["tokens"] * both["tokens"]
