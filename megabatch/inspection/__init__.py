"""Facts that models, graphs of losses, meshes, errors, trees of tensors and random generators state of themselves."""
