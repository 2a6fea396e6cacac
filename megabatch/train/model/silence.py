"""Quiet: transformers and bitsandbytes without their warnings, and their errors as one line."""

import contextlib
import warnings
from collections.abc import Generator
from logging import CRITICAL, getLogger

from transformers.utils import logging


@contextlib.contextmanager
def quiet() -> Generator[None, None, None]:
    """Surrounds transformers' work, whose warnings and bars would stand beside the one line that says what is wrong."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loud = getLogger("bitsandbytes")  # as it is imported: of kernels that it does without
    level = loud.level
    loud.setLevel(CRITICAL)
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(verbosity)
        loud.setLevel(level)
        if bars:
            logging.enable_progress_bar()
