"""A small run."""

from tests.training.conftest import corpus, small  # noqa: F401
