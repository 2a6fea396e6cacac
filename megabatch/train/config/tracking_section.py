"""Where else a run's numbers go."""

from typing import Literal

from megabatch.train.config.section import Section


class TrackingConfig(Section):
    """Where else a run's numbers go. What else a tracker takes it reads itself: WANDB_MODE, MLFLOW_TRACKING_URI, ..."""

    trackers: list[Literal["wandb", "mlflow"]] = []
    """Weights & Biases, MLflow: they are told what TensorBoard is told. A resumed run goes on in its run there; a
    tracker that fails is left out, and the run goes on."""
    project: str = "megabatch"
    """wandb's project, mlflow's experiment."""
    name: str | None = None
    """The run's name there; None: that of run.folder."""
