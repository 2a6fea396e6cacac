"""The trainer: `megabatch train recipes/stdlib.toml`. It imports the library; the library never imports it."""
