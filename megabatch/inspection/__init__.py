"""Facts that models, graphs of losses, meshes and errors state about themselves."""
