"""A tiny recipe on a tiny data set, as the tests of the trainer have it."""

from tests.train.conftest import bench, chatty

__all__ = ["bench", "chatty"]
