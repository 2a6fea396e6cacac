"""Callbacks: what a run does beside its updates."""
