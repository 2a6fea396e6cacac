"""Tracking: a run's numbers at Weights & Biases and MLflow, in threads for which the run never waits."""
