"""Checkpoints: what a run writes to go on from, and how it is read again."""
