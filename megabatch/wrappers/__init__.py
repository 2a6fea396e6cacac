"""One class per wrapper: who sums the gradients, and when; and the checks of what each wrapper cannot do exactly."""
