"""Plan: `megabatch plan`, what fits and what it costs, before there is a GPU."""
