"""Measures microbatches to choose a limit that fits in memory; loaded only when a limit is "auto"."""
