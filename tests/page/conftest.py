"""The trainer's tiny recipe."""

from tests.train.conftest import bench

__all__ = ["bench"]
