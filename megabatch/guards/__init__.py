"""Guards of a call: code of the user's that would make its gradient another one, or that needs a graph of its own."""
