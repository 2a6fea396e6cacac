"""Facts that models and graphs of losses state about themselves."""
