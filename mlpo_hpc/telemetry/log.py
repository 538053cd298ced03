"""One logger; what concerns the whole job is said by rank 0 alone."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("mlpo_hpc")


def start() -> None:
    """Show our messages on standard error unless the program configured logging itself."""
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("mlpo_hpc: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def say(message: str, *values: object) -> None:
    """Log a fact about the job, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        logger.info(message, *values)


def warn(message: str, *values: object) -> None:
    """Log a warning about the job, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(message, *values)
