"""Access to torch internals without a stability promise: one function for each, with its source.

The source is torch 2.13. Where torch 2.11 to 2.15 differ, the function says how. `check_torch` runs here, before any of
these files, and `check_feature` where a feature is used: they name what another version lacks.
"""

from megabatch.torch_private.versions import check_torch

check_torch()
