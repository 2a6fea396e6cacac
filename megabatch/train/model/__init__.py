"""Model: from a recipe to a module that is laid over the ranks, and back to a folder that anyone can load."""
