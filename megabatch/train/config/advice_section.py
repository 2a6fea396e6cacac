"""What a run measures for whoever chooses its settings."""

from megabatch.train.config.section import Count, Section


class AdviceConfig(Section):
    """What is measured on the way, to choose the size of updates by."""

    every: Count | None = None
    """Measure the gradient's noise once in so many updates, which is then made in two calls: 20, say. The metrics have
    noise_scale_samples, up to how many samples an update's gradients agree, and the run's end says it. None: never."""
