"""What users call to go on with fewer ranks, or with more."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.balancing.policy import CostModel
from ds_dynmo.engine.checkpoint.progress import counters_of, restore_counters
from ds_dynmo.engine.deepspeed_adapter.counters import set_shared_counters, shared_counters
from ds_dynmo.engine.elastic.interfaces import Stateful
from ds_dynmo.engine.elastic.repacker import Repacker
from ds_dynmo.engine.migration.migrate import MigrationContext
from ds_dynmo.engine.model_api import ModelApiEngine
from ds_dynmo.errors import ConfigError, ReleasedError
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MigrationPlan, Profile, RebalanceReport, RepackReport

_COUNTED = (  # of our engine, alike on every rank
    "_profile",
    "_trainable",
    "_tied_trainable",
    "_prefix",
)


class ElasticEngine(ModelApiEngine):
    """An engine whose ranks can be given back and taken again.

    Attributes:
        released: True on a rank whose accelerator was handed back.
        repacker: with a "dynmo" block alone.
    """

    repacker: Repacker
    _reporter: Any

    def __init__(self, *args: Any, dynmo: DynMoConfig | None, **kwargs: Any) -> None:
        super().__init__(*args, dynmo=dynmo, **kwargs)
        self.released = False

    def repack(self, num_stages: int | None = None, *, partition: Sequence[int] | None = None) -> RepackReport:
        """Go on with fewer ranks, or take parked ones back. Collective over the ranks at work, between two batches.

        Layers, optimizer state and master weights move as in a rebalance. All replicas give up the same stages; the
        first and the last stage keep their ranks as long as there are two. Ranks that go are released as
        ``dynmo.repack.release`` says; afterwards ``released`` is True on them.

        Args:
            num_stages: how many to go on with; None: as many as ``dynmo.repack`` finds best.
            partition: exactly the boundaries to go to. Without, and before the first profile, layers are spread by
                parameters.

        Raises:
            PartitionError: more stages than there are or than layers, fewer than 1, a partition that cuts what
                ``keep_together`` keeps together, or no partition fits in memory. Nothing has changed.
            MigrationError: see its message; nothing has changed unless it says that layers had begun to move.
            ConfigError: the configuration has no "dynmo" block, or one that is switched off.
            ReleasedError: this rank was released.
        """
        self._require_enabled("repack")
        return self.repacker.repack(num_stages, partition=partition)

    @property
    def repacks(self) -> list[RepackReport]:
        """Every re-packing so far; of those by hand also the ones that found nothing better."""
        return [] if self.dynmo is None else self._reporter.repacks

    @property
    def micro_batches_taken(self) -> int:
        """How many micro-batches of this rank's data were trained on: where a script's own data goes on.

        ``global_steps`` times the launch's ``micro_batches``, whatever number of replicas shares a batch now.
        """
        return int(self.global_steps * self.micro_batches) if self.dynmo is None else self.repacker.data.taken

    def wait_for_recall(self) -> bool:
        """On a released rank, or one that joined: wait until it is called, True, or until the job has ended, False.

        True at once on a rank that was not released, False at once where released ranks are not parked.
        """
        return not self.released or self.repacker.wait_for_recall()

    def join(self, job: Any) -> None:
        """Offer the ranks of this launch to a job that runs already, as stages that it can call like parked ones.

        Collective over this launch. Run the job's script with its arguments, in a launch of its own of any number of
        stages that holds the model, with as many replicas as the job; call this before the training loop and
        :meth:`wait_for_recall` next. ``released`` is True until the job calls: by ``repack``, or because throughput
        asks for it. A rank reads on where the job is in ``training_data``; data that the script makes itself has to
        begin at :attr:`micro_batches_taken`, as after a checkpoint was loaded. Both are configured with
        ``dynmo.repack.accept_joins``, and prove to each other that they know the secret in DS_DYNMO_JOIN_SECRET.

        Args:
            job: "HOST:PORT", the job's MASTER_ADDR and MASTER_PORT; or the ``torch.distributed.Store`` of its launch.

        Raises:
            ConfigError: no job is there, or one that does not know the secret or differs in its model, configuration,
                replicas or versions (says in which), or this engine has no "dynmo" block, one that is switched off,
                or one without ``accept_joins``. Nothing has changed.
            MigrationError: a rank of this launch failed.
        """
        self._require_enabled("join")
        self.repacker.join(job)

    def most_stages(self) -> int:
        """How many stages :meth:`repack` can go on with now: at work, parked or joined. Collective."""
        self._require_enabled("most_stages")
        return self.repacker.most_stages()

    def dismiss_parked(self) -> None:
        """Tell parked ranks that the job has ended: their ``wait_for_recall`` gives False.

        Rank 0 does so too when its process ends.
        """
        if self.dynmo is not None:
            self.repacker.dismiss_parked()

    def share_state(self, name: str, holder: Stateful) -> None:
        """Let re-packings carry on ``holder``, whose ``state_dict()`` is the same on every rank; it may be collective.

        After each, all ranks load it, those that came back too, as when a job is resumed. Every rank calls this alike.
        """
        self._require_block("share_state")
        self.repacker.share_state(name, holder)

    # -- wiring ---------------------------------------------------------------------------------------

    def _build_repacker(self) -> Repacker:
        """Collective; the engine is complete but for it."""
        return Repacker(
            self,
            self._comm,
            _Balancer(self),
            _Migrator(self),
            self._reporter,
            initial_model=lambda: self._origin,
            progress=_Progress(self),
            accumulate=self._accumulate,
            groups=self._layer_groups,
            can_copy_replicas=not self._replicas_would_differ,
            on_join=self._mute,
        )

    def _accumulate(self, micro_batches: int) -> None:
        if self._wrapper is not None:
            self._wrapper.accumulate(micro_batches)

    def _mute(self) -> None:
        """Another rank reports from now on."""
        self._reporter.mute()
        if self._tracer is not None:
            self._tracer.mute()

    def _require_enabled(self, what: str) -> None:
        self._require_block(what)
        if not self.dynmo.enabled:
            raise ConfigError(f"dynmo.enabled = false: engine.{what} would move layers; set it to true")

    def _require_block(self, what: str) -> None:
        super()._require_block(what)
        if self.released:
            raise ReleasedError(
                f"engine.{what}: this rank was released after step {self.global_steps}. Leave the training loop where "
                "engine.released is True, or wait to be taken back by engine.wait_for_recall()"
            )

    @property
    @abstractmethod
    def partition(self) -> list[int]: ...


class _Balancer:
    """What the repacker needs of profiles and decisions."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.cost_model: CostModel = engine._cost_model
        self.memory_limit_bytes, self.train_until_profiled = engine._memory_limit_bytes, engine._train_until_profiled

    @property
    def profile(self) -> Profile | None:
        profile: Profile | None = self._engine.profile
        return profile

    def forget_profile(self) -> None:
        self._engine._profile = None

    def stages_changed(self, placement: Placement) -> None:
        """What was learnt of the stages is of others now; what was learnt of the layers holds."""
        engine, profile = self._engine, self.profile
        self.cost_model.stages_changed()
        engine._move_seconds = 0.0
        if profile is not None:
            engine._profile = replace(profile, placement=placement, micro_batches=engine.micro_batches)
        engine._layers_moved()
        engine._controller.decided(moved=True)


class _Migrator:
    """What the repacker needs to move layers."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def context(self) -> MigrationContext:
        context: MigrationContext = self._engine._migration_context()
        return context

    def check_room(self, plan: MigrationPlan) -> None:
        self._engine._check_room(plan)

    def move_to(self, partition: tuple[int, ...]) -> RebalanceReport:
        report: RebalanceReport = self._engine._go_to(partition, reason="explicit")
        return report


class _Progress:
    """What every rank counts alike."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        attributes = {name: getattr(self._engine, name) for name in _COUNTED}
        deepspeeds = shared_counters(self._engine)
        return {"deepspeed": deepspeeds, "attributes": attributes, "counters": counters_of(self._engine)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_shared_counters(self._engine, state["deepspeed"])
        for name, value in state["attributes"].items():
            setattr(self._engine, name, value)
        restore_counters(self._engine, state["counters"], same_partition=True)
