"""Init: `megabatch init`, from three answers to a recipe that runs."""
