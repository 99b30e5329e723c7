"""Finish a checkpoint in a thread while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.engine.save.writing import UnfinishedCheckpoint
from ds_dynmo.errors import CheckpointError

_ENDING = "the end of a save in the background"


class BackgroundSave:
    """A checkpoint that a thread of each rank finishes. Construction is collective.

    Python waits for the thread when the process ends.

    Args:
        saved: called by the thread with the bytes of all files, on rank 0, once the checkpoint has its name.
        failed: called by the thread with the error, on the rank that has one.
    """

    def __init__(
        self,
        unfinished: UnfinishedCheckpoint,
        comm: Communicator,
        saved: Callable[[int], None],
        failed: Callable[[str], None],
    ) -> None:
        self._comm = comm
        self._path, self._error = unfinished.path, ""
        self._posted: Any = None
        arguments = (unfinished, comm.store_agreement(), saved, failed)
        self._thread = threading.Thread(target=self._finish, args=arguments, name="ds_dynmo save")
        self._thread.start()

    def _finish(self, unfinished: UnfinishedCheckpoint, agreement: Any, saved: Any, failed: Any) -> None:
        try:
            num_bytes = unfinished.finish(agreement)
            if unfinished.here.rank == 0:
                saved(num_bytes)
        except BaseException as error:  # raised by the main thread
            self._error = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            failed(self._error)
        finally:
            agreement.close()

    def _under_way(self) -> torch.Tensor:
        return torch.tensor([int(self._thread.is_alive())], device="cpu")

    def is_over(self) -> bool:
        """Return whether the save is over on every rank, without a wait for it. Collective, once a batch.

        Ranks exchange this beside the batch, so the answer is that of the batch before.
        """
        posted, self._posted = self._posted, None
        if posted is not None and not self._comm.read_max(posted).item():
            return True
        self._posted = self._comm.post_max(self._under_way())
        return False

    def is_over_now(self) -> bool:
        """Return whether the save is over on every rank. Collective."""
        self._comm.enter(_ENDING)
        return not self._comm.max_over_world(self._under_way()).item()

    def wait(self) -> None:
        """Wait until the save is over. Collective.

        Raises:
            CheckpointError: on every rank, with the first error by rank.
        """
        if self._posted is not None:
            self._comm.read_max(self._posted)
        self._thread.join()
        self._comm.enter(_ENDING)
        if self._comm.max_over_world(torch.tensor([int(bool(self._error))], device="cpu")).item():
            errors = [error for error in self._comm.gather_objects(self._error) if error]
            raise CheckpointError(f"{self._path}: {errors[0]}")
