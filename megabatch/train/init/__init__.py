"""Init: `megabatch init`, a recipe for data, a model and hardware."""
