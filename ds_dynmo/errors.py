"""The errors that users of ds_dynmo may want to catch."""

__all__ = ["CheckpointError", "ConfigError", "MigrationError", "PartitionError"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read: the message names the file.

    Raised on every rank. The engine, and the checkpoints that were there, are as they were, unless the message
    says otherwise.
    """


class ConfigError(ValueError):
    """A setting, model or optimizer that ds_dynmo cannot work with.

    Raised before a process group is created or an optimizer touched: nothing has changed.
    """


class PartitionError(ValueError):
    """Boundaries that are no partition, layer costs that are no costs, or a memory limit that no partition meets.

    Training state is untouched.
    """


class MigrationError(RuntimeError):
    """A rebalance could not be carried out.

    The message says whether layers had begun to move. If they had not, training can go on; if they
    had, the job has to be resumed from its last checkpoint.
    """
