"""The core: a batch as samples, their microbatches, and the update that adds them up."""
