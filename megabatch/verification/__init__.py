"""Comparison of the accumulated gradient with that of plain torch, on the user's own model."""
