"""Compare what the first and the last stage of a pipeline read, and refuse stand-ins that would be trained.

The first stage uses the inputs of a micro-batch, and the stage that computes the loss the labels. Each reads whole
micro-batches for itself. The first stage compares them, half by half, in the first batch, in each profiled one, and in
the first one after the loss has come to another stage (a chain that becomes a V, a re-packing to one stage):

    first stage      last stage      means
    inputs labels    inputs labels   the same: either may compute the loss
    inputs labels    noise  labels   one half the same: they are in step
    inputs zeros     zeros  labels   nothing can be said: each was given what it uses, and a blank for the rest
    inputs labels    others others   they are not in step: a warning

Labels that the stage without the loss read in place of those that were trained are *stand-ins*. If the loss comes to
that stage, and it still reads the same, the program does not know: the batch is refused before anything is trained.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ds_dynmo.engine.comm.posted import Posted
from ds_dynmo.engine.run.readings import HalfDigest, MicroBatchDigest, Reading, no_reading
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import ConfigError

_logger = logging.getLogger("DynMo")
ASK = (
    "Ask engine.is_first_stage() and engine.is_last_stage() each time that a micro-batch is read, or give whole "
    "micro-batches on every rank"
)


@dataclass
class _Known:
    """What is known of the data of training, or of evaluations. Of stand-ins the first stage knows.

    Attributes:
        loss_on_first: whether the first stage computed the loss of the latest recorded batch, as of all since; None:
            there was none.
        stand_in: what the stage without the loss read as the labels of each micro-batch; None: the right ones, or
            changing ones.
        stand_ins_change: whether it read changing ones that are not those that were trained.
        warned: of what.
    """

    loss_on_first: bool | None = None
    stand_in: HalfDigest | None = None
    stand_ins_change: bool = False
    warned: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Comparison:
    """A comparison that is under way.

    Attributes:
        what: the batch, for messages.
        mine: what this rank has read.
        of_last: will have what the last stage has read.
    """

    known: _Known
    what: str
    mine: Reading
    of_last: Posted


class DataCheck:
    """One rank's part in comparing the data of the stages."""

    def __init__(self, stage: StageContext) -> None:
        self._stage = stage
        self._known = {training: _Known() for training in (True, False)}
        self._posted: _Comparison | None = None

    @contextmanager
    def batch(self, micro_batches: int, *, training: bool, profiled: bool, load: Callable[[], None]) -> Iterator[None]:
        """Compare the data of the batch inside, if that is due. Then collective over the pipeline.

        No stage waits for the others, but where batches do not overlap.

        Args:
            training: else it is an evaluation.
            load: reads the first micro-batch ahead.

        Raises:
            ConfigError: the loss has come to a stage that reads stand-ins; in training on every rank.
        """
        stage, known = self._stage, self._known[training]
        on_first = stage.placement.owners[-1] == 0
        changed = known.loss_on_first not in (None, on_first)
        if known.loss_on_first is not None and not changed and not profiled:
            yield
            self._compare()
            return
        what = f"batch {stage.counters.steps + 1}" if training else "an evaluation"
        with stage.readings.recorded() as seen:
            if changed:
                self._compare()
                check = partial(self._check_new_reader, known, what, seen, load)
                if training:
                    stage.comm.enter(what)
                    stage.comm.everywhere(f"the data of {what}", check, error=ConfigError)
                else:  # a single pipeline may evaluate
                    check()
            yield
        known.loss_on_first = on_first
        self._compare()
        here = stage.comm.here
        if here.num_stages > 1:
            mine = self._reading(seen)
            numbers = mine.to_bytes(micro_batches) if here.stage == here.num_stages - 1 else no_reading(micro_batches)
            self._posted = _Comparison(known, what, mine, stage.comm.post_to_first_stage(numbers))
            if not (training and stage.schedule.may_choose_schedule):  # else batches overlap
                self._compare()

    def _reading(self, seen: Sequence[MicroBatchDigest]) -> Reading:
        return Reading(self._stage.comm.here.rank, socket.gethostname(), tuple(seen))

    def _check_new_reader(
        self, known: _Known, what: str, seen: Sequence[MicroBatchDigest], load: Callable[[], None]
    ) -> None:
        """Refuse stand-ins of the stage that the loss has come to. Collective over the pipeline.

        Raises:
            ConfigError: on the first stage.
        """
        here, reader = self._stage.comm.here, self._stage.placement.owners[-1]
        if here.stage in (0, here.num_stages - 1):  # both: an iterator may wait for that of the other
            load()
        if not (readings := self._stage.comm.gather_on_first_stage(self._reading(seen))):
            return
        new, until_now = readings[reader], "as layers have moved; until now it has read"
        if not new.micro_batches:  # its data ended
            return
        labels = new.micro_batches[0].labels
        if known.stand_in is not None and labels.digest == known.stand_in.digest:
            raise ConfigError(
                f"{new.name} computes the loss from {what} on, {until_now} {labels.shown} as labels, which were not "
                f"those that were trained, and reads the same again. {ASK}. Nothing of this batch was trained"
            )
        if known.stand_ins_change:
            self._warn(
                known,
                "other labels",
                f"{new.name} computes the loss from {what} on, {until_now} other labels than were trained. If it reads "
                f"what it did, training goes on with other data than where layers stay. {ASK}",
            )

    def _compare(self) -> None:
        """Compare what both stages have read, on the first one, if that was posted; the last has done that batch."""
        posted, self._posted = self._posted, None
        if posted is None:
            return
        posted.of_last.wait()
        if self._stage.comm.here.stage > 0:
            return
        known, what, first, last = posted.known, posted.what, posted.mine, Reading.from_bytes(posted.of_last.tensor)
        pairs = [*zip(first.micro_batches, last.micro_batches)]
        if not pairs:  # the last stage has no data, as it needs none
            return
        apart = next((number for number, pair in enumerate(pairs) if _are_apart(*pair)), None)
        if apart is not None and not known.loss_on_first:
            one, other = pairs[apart]
            self._warn(
                known,
                "apart",
                f"{what}: the first stage and the last read other data. As micro-batch {apart} {first.name} has inputs "
                f"{one.inputs.shown} and labels {one.labels.shown}, {last.name} has inputs {other.inputs.shown} and "
                f"labels {other.labels.shown}: inputs train with labels of other samples, unless one of these stands "
                "in for what its stage does not use. Let all ranks of a pipeline read one order: seed samplers by the "
                "replica, not by the rank",
            )
        reader, beside = (first, last) if known.loss_on_first else (last, first)
        labels = [(used.labels, unused.labels) for used, unused in zip(reader.micro_batches, beside.micro_batches)]
        if all(used.is_blank and not unused.is_blank for used, unused in labels):
            self._warn(
                known,
                "blank",
                f"{what}: {reader.name} computes the loss, and reads {labels[0][0].shown} as labels; {beside.name}, "
                f"which does not, reads {labels[0][1].shown}. {ASK}",
            )
        differ = any(used.digest != unused.digest for used, unused in labels)
        is_one = len({unused.digest for _, unused in labels}) == 1
        known.stand_in = labels[0][1] if differ and is_one else None
        known.stand_ins_change = differ and not is_one

    def _warn(self, known: _Known, kind: str, text: str) -> None:
        """Warn once of each kind; tensor-parallel slices read the same."""
        if kind not in known.warned and self._stage.comm.here.tp_rank == 0:
            _logger.warning(text)
        known.warned.add(kind)


def _are_apart(first: MicroBatchDigest, last: MicroBatchDigest) -> bool:
    """Return whether two stages have read different micro-batches: no half is the same, and one has values on both."""
    halves = [*zip(first, last)]
    return all(one.digest != other.digest for one, other in halves) and any(
        not (one.is_blank or other.is_blank) for one, other in halves
    )
