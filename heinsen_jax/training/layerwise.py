"""The layers of a model beside the layers of its teacher."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx
from jax import lax

from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.models.blocks import Block

Carry = TypeVar("Carry")
Visit = Callable[[Block, Block, bool, Carry, Any], tuple[Carry, Any]]


def replaced_layers(model: LanguageModelConfig, teacher: LanguageModelConfig) -> list[bool]:
    """Whether each layer has another mechanism, or other options, than the teacher's; for the
    shortest common period of both layer patterns."""
    ours, theirs = (_mechanisms(config) for config in (model, teacher))
    period = range(math.lcm(len(ours), len(theirs)))
    return [ours[i % len(ours)] != theirs[i % len(theirs)] for i in period]


def through_layers(
    model: LanguageModel,
    teacher: LanguageModel,
    visit: Visit[Carry],
    carry: Carry,
    each: jax.Array | None = None,
) -> tuple[Carry, list[Any]]:
    """Visit all layers of a model and of its teacher side by side, in one loop over the repeats of
    their layer patterns.

    Args:
      model: the model.
      teacher: the teacher, with as many layers.
      visit: function of both blocks, whether the layer is replaced, the carry, and the layer's
        element of `each`; it returns the carry and a result.
      carry: the first carry.
      each: an element for each layer, `[num_layers, ...]`.

    Returns:
      The last carry, and the results of each place of the shortest common period of both patterns,
      stacked by repeat.
    """
    replaced = replaced_layers(model.config, teacher.config)
    period = len(replaced)
    ours, theirs = (_stacks(x, period) for x in (model, teacher))

    def through_period(carry: Carry, elements: Any) -> tuple[Carry, list[Any]]:
        results = []
        for place, is_replaced in enumerate(replaced):
            first, second, given = elements[place]
            pair = nnx.merge(ours[place].graph, first), nnx.merge(theirs[place].graph, second)
            carry, result = visit(*pair, is_replaced, carry, given)
            results.append(result)
        return carry, results

    given = [None if each is None else each[place::period] for place in range(period)]
    parameters = [x.parameters for x in ours], [x.parameters for x in theirs]
    return lax.scan(through_period, carry, [*zip(*parameters, given, strict=True)])


class _Stack(NamedTuple):
    """Blocks of equal mechanism: their graph, and their parameters, stacked."""

    graph: nnx.GraphDef[Block]
    parameters: nnx.State


def _stacks(model: LanguageModel, period: int) -> list[_Stack]:
    """The blocks at each place of a period, which is a multiple of the layer pattern."""
    pattern, stacks = len(model.blocks), []
    for place in range(period):
        graph, parameters = nnx.split(model.blocks[place % pattern])
        every = slice(place // pattern, None, period // pattern)
        stacks.append(_Stack(graph, jax.tree.map(lambda x, every=every: x[every], parameters)))
    return stacks


def _mechanisms(model: LanguageModelConfig) -> list[tuple[str, dict[str, Any]]]:
    """The mechanism of each layer of the pattern, with the options that change its result;
    low-rank additions are 0 at first."""
    pairs = zip(model.layer_pattern, model.mechanisms(), strict=True)
    return [
        (name, {k: v for k, v in vars(config).items() if k not in ("implementation", "lora_rank")})
        for name, config in pairs
    ]
