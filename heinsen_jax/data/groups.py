"""Finite groups as tables of products."""

import itertools
from functools import cache
from typing import NamedTuple


class Group(NamedTuple):
    """A finite group, whose elements are numbered from 0, the identity.

    Attributes:
      products: `products[a][b]` is the product ab.
      generators: elements whose products are all elements.
    """

    products: tuple[tuple[int, ...], ...]
    generators: tuple[int, ...]


@cache
def cyclic_group(order: int) -> Group:
    """The numbers below `order`, with addition."""
    numbers = range(order)
    return Group(tuple(tuple((a + b) % order for b in numbers) for a in numbers), (1,))


@cache
def symmetric_group(items: int) -> Group:
    """The permutations of items, in lexicographic order, with (ab)(i) = a(b(i)).

    Generators are the transposition of the first two items and the cycle of all.
    """
    elements = [*itertools.permutations(range(items))]
    number = {element: place for place, element in enumerate(elements)}
    products = (tuple(number[tuple(a[i] for i in b)] for b in elements) for a in elements)
    swap, cycle = (1, 0, *range(2, items)), (*range(1, items), 0)
    return Group(tuple(products), (number[swap], number[cycle]))
