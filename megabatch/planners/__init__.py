"""Splits of an update's samples into microbatches: planners to choose from, and those that calls run by."""

from megabatch.planners.built_in import Auto, Rows, SameBits, Shapes, Tokens

__all__ = ["Auto", "Rows", "SameBits", "Shapes", "Tokens"]
