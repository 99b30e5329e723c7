"""Log lines as DeepSpeed's."""

from __future__ import annotations

import logging

from deepspeed.utils.logging import LoggerFactory, warning_once

__all__ = ["logger_named", "warning_once"]


def logger_named(name: str) -> logging.Logger:
    """Make a logger that writes lines in DeepSpeed's form under ``name``."""
    logger: logging.Logger = LoggerFactory.create_logger(name=name, level=logging.INFO)
    return logger
