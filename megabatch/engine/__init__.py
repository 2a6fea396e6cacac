"""One call, step by step: prepare it, run its microbatches, add up the update."""
