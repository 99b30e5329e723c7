"""The errors of ds_dynmo, and words of messages."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    *("CheckpointError", "ConfigError", "MigrationError", "PackingError", "PartitionError", "RankLostError"),
    *("ReleasedError", "ScheduleError", "counted", "noted", "reason_of"),
]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read: the message names the file.

    Raised on every rank. The engine and earlier checkpoints are unchanged unless the message says otherwise.
    """


class ConfigError(ValueError):
    """A setting, model or optimizer that ds_dynmo cannot work with.

    Raised before a process group is created or an optimizer touched: nothing has changed.
    """


class PackingError(ConfigError):
    """A model in which documents packed into one sequence would attend to each other; padded ones do not."""


class PartitionError(ValueError):
    """Invalid boundaries, negative or non-finite layer costs, or a memory limit that no partition meets.

    Training state is untouched.
    """


class MigrationError(RuntimeError):
    """A rebalance could not be carried out.

    Attributes:
        harmless: whether nothing has moved, every rank raised this error, and training can continue. Otherwise resume
            the job from its last checkpoint; the message says so.
    """

    def __init__(self, message: str, *, harmless: bool = False) -> None:
        super().__init__(message)
        self.harmless = harmless


def raise_unless_harmless(error: Exception) -> None:
    """Raise ``error`` again if layers may have moved, so that training cannot continue."""
    if isinstance(error, MigrationError) and not error.harmless:
        raise error


class RankLostError(RuntimeError):
    """A rank has died, was stopped, or cannot be reached: the message says which, and what it did.

    Training cannot continue: resume the job from its last checkpoint. The first rank on each host has logged the
    message already, so a process that ends by this error prints no traceback.
    """


class ReleasedError(RuntimeError):
    """This rank was released by a re-packing: it has no layers and no peers. ``engine.released`` says so too."""


class ScheduleError(ValueError):
    """An order of passes that no pipeline can run, invalid costs of passes, or too little memory for any order.

    Raised before the batch: nothing has run.
    """


@contextmanager
def noted(place: str) -> Iterator[None]:
    """Add to any exception inside at which place it arose: the layer, and what of it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"at {place}")
        raise


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    >>> counted(1, "stage"), counted(0, "stage")
    ('1 stage', '0 stages')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def reason_of(error: Exception) -> str:
    """Return why something failed. The text of an OSError repeats the path, which a message begins with.

    >>> reason_of(FileNotFoundError(2, "No such file or directory", "a.json"))
    'No such file or directory'
    """
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
