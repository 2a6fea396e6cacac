"""Doctor: `megabatch doctor`, what there is to train with, and whether it works."""
