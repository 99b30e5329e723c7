"""Runs for test_shm_operator.py; every function runs on a rank."""

from __future__ import annotations

import logging

import deepspeed
from deepspeed.comm import comm
from deepspeed.utils import logger

from tests.distributed.workloads import Case, build


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def warnings(loaded: bool, engines: int) -> tuple[bool, list[str]]:
    """Was the operator loaded, and what is said of it when engines are made; ``loaded``: by a program of a user's."""
    is_there = comm.cdb.shm_comm_op is not None
    if loaded:
        comm.cdb.shm_comm_op = object()  # compiling the real one takes 40 s: nothing of it is called
    messages = _Messages()
    logger.addHandler(messages)
    for _ in range(engines):
        build(Case(stages=deepspeed.comm.get_world_size()))
    return is_there, [message for message in messages.found if "deepspeed_shm_comm" in message]
