"""Checkpoints: what a run writes to resume from, and how it is read again."""
