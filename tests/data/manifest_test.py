"""Manifests of prepared data."""

import pytest

from heinsen_jax.data.manifest import Shard, Split, numpy_dtype, token_dtype


@pytest.mark.parametrize(("vocab_size", "name"), [(257, "uint16"), (65_536, "uint16")])
def test_ids_of_small_vocabularies_have_two_bytes(vocab_size, name):
    assert token_dtype(vocab_size) == name
    assert numpy_dtype(name).itemsize == 2


def test_ids_of_larger_vocabularies_have_four():
    assert token_dtype(65_537) == "uint32"


def test_a_split_has_the_totals_of_its_shards():
    sizes = (3, 5, 1), (10, 20, 2)
    shards = tuple(
        Shard(file=f"{n}.bin", tokens=a, bytes=b, documents=c, sha256="")
        for n, (a, b, c) in enumerate(sizes)
    )
    split = Split.of(shards)
    assert (split.tokens, split.bytes, split.documents) == (13, 25, 3)
