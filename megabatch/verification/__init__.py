"""Compares the gradient that microbatches give with the one of plain torch, on the user's own model."""
