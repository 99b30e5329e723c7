"""What users call to go on with fewer ranks, or with more: wiring of planning, re-packing and parking."""

from __future__ import annotations

import atexit
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ds_dynmo import partitioners
from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.balancing.trigger import memory_model
from ds_dynmo.engine.elastic import parking
from ds_dynmo.engine.elastic.planning import Planner
from ds_dynmo.engine.elastic.release import policy_for
from ds_dynmo.engine.elastic.release.launch import Launch, write_launch
from ds_dynmo.engine.elastic.release.messenger import Messenger
from ds_dynmo.engine.elastic.repacking import Repacker, RepackResult
from ds_dynmo.engine.model_api import ModelApiEngine
from ds_dynmo.engine.profiling import layer_sizes
from ds_dynmo.errors import ConfigError, MigrationError, PartitionError, ReleasedError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners import Packing
from ds_dynmo.plan import Profile, RebalanceReport, RepackReport, check_partition


@dataclass(frozen=True)
class RankFacts:
    """What ranks tell each other for a decision.

    Attributes:
        memory_limit: bytes, the least of all ranks'.
        parameters: trainable ones of each layer, where there is no profile yet.
    """

    memory_limit: int | None
    parameters: Sequence[float]


class Stateful(Protocol):
    """Anything that a rank which comes back has to be told about."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class ElasticEngine(ModelApiEngine):
    """An engine whose ranks can be given back and taken again.

    Attributes:
        released: True on a rank whose accelerator was handed back.
    """

    _layer_groups: LayerGroups
    _profile: Profile | None
    _cost_model: Any
    _reporter: Any
    _tracer: Any

    def __init__(self, *args: Any, dynmo: DynMoConfig | None, **kwargs: Any) -> None:
        super().__init__(*args, dynmo=dynmo, **kwargs)
        self.released = False
        self._repacker: Repacker | None = None
        self._tidies_up = False
        if dynmo is not None:
            self._comm.enter("initialize")
            self._repacker = Repacker(self)
            self._policy = policy_for(dynmo.repack)
            self._messenger = Messenger(
                self._policy,
                self._warn,
                self._inform,
                attempts=dynmo.repack.release_attempts,
                ended=self._repacker.have_exited,
                patience_seconds=dynmo.timeout_seconds,
                delay_seconds=dynmo.repack.release_delay_seconds,
            )

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
        if self._profile is None and num_stages is None and partition is None:
            self._train_until_profiled()
        began = time.perf_counter()
        self._comm.enter("repack")
        self._admit()
        facts = self._gather_facts(profiled=self._profile is not None)
        new, verdict = self._agreed(lambda: self._new_partition(num_stages, partition, facts))
        return self._repack(new, "by hand", verdict, time.perf_counter() - began)

    @property
    def repacks(self) -> list[RepackReport]:
        """Every re-packing so far; of those by hand also the ones that found nothing better."""
        return [] if self.dynmo is None else self._reporter.repacks

    @property
    def micro_batches_taken(self) -> int:
        """How many micro-batches of this rank's data were trained on: where a script's own data goes on.

        ``global_steps`` times the launch's ``micro_batches``, whatever number of replicas shares a batch now.
        """
        if self._repacker is None:
            return int(self.global_steps * self.micro_batches)
        return self._repacker.data.taken

    def wait_for_recall(self) -> bool:
        """On a released rank, or one that joined: wait until it is called, True, or until the job has ended, False.

        True at once on a rank that was not released, False at once where released ranks are not parked.
        """
        if not self.released:
            return True
        assert self._repacker is not None
        if not (self._policy.parks or self._repacker.joined):
            return False
        world = self._repacker.world
        call = parking.await_call(world.store, world.launch_rank, self.dynmo.timeout_seconds)
        if call is None:
            return False
        self._repacker.answer(call)
        return True

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
        assert self._repacker is not None
        self._comm.enter("join")
        self._repacker.join(job)
        self._reporter.mute()
        if self._tracer is not None:
            self._tracer.mute()

    def most_stages(self) -> int:
        """How many stages :meth:`repack` can go on with now: at work, parked or joined. Collective."""
        self._require_enabled("most_stages")
        assert self._repacker is not None
        self._comm.enter("most_stages")
        self._admit()
        return self._most_stages

    def dismiss_parked(self) -> None:
        """Tell parked ranks that the job has ended: their ``wait_for_recall`` gives False.

        Rank 0 does so too when its process ends.
        """
        if self._repacker is not None and not self.released:
            self._repacker.dismiss()

    def share_state(self, name: str, holder: Stateful) -> None:
        """Let re-packings carry on ``holder``, whose ``state_dict()`` is the same on every rank; it may be collective.

        After each, all ranks load it, those that came back too, as when a job is resumed. Every rank calls this alike.
        """
        self._require_block("share_state")
        assert self._repacker is not None
        self._repacker.states[name] = holder

    # -- wiring ---------------------------------------------------------------------------------------

    @property
    def _most_stages(self) -> int:
        """As many as there are ranks for, and layers, or groups of them that stay together."""
        assert self._repacker is not None
        return min(self._repacker.most_stages, self._layer_groups.num_groups)

    def _announce(self) -> None:
        assert self._repacker is not None
        self._repacker.announce()

    @property
    def _first_micro_batch(self) -> int:
        """The number of this rank's first micro-batch in a batch."""
        return 0 if self._repacker is None else self._repacker.data.first_of_batch

    def _evaluate_part(self, data_iter: Any, evaluate: Callable[[], Any]) -> Any:
        assert self._repacker is not None
        return self._repacker.data.evaluate_part(data_iter, evaluate)

    def _admit(self) -> None:
        """Ranks that have joined can be called from now on. Collective."""
        assert self._repacker is not None
        arrived = self._repacker.admit()
        if arrived:
            self._inform(f"DynMo: ranks {list(arrived)} have joined and can be called")
            if self._repacker.world.launch_rank == 0:
                self._tidy_up_at_exit()

    def _catch_up(self, data_iter: Any) -> None:
        assert self._repacker is not None
        self._repacker.data.before_batch(data_iter)

    def _gather_facts(self, *, profiled: bool) -> RankFacts:
        """All that has to be gathered for a decision. Collective."""
        if profiled:
            return RankFacts(self._memory_limit_bytes(), ())
        parameters = layer_sizes.per_layer(self._layers, layer_sizes.trainable_parameters)
        return RankFacts(None, self._comm.max_over_world(parameters).tolist())

    def _new_partition(
        self, num_stages: int | None, partition: Sequence[int] | None, facts: RankFacts
    ) -> tuple[tuple[int, ...], str]:
        assert self._repacker is not None
        num_layers, most = self._layers.num_layers, self._most_stages
        count = num_stages if partition is None or num_stages is not None else len(partition) - 1
        if count is not None and not 1 <= count <= most:
            problem = self._layer_groups.shortage(count)
            why = f": {problem}" if problem is not None else ""
            raise PartitionError(f"repack: {count} stages, there are 1 to {most} to go on with{why}")
        if partition is not None:
            assert count is not None
            explicit = check_partition(partition, num_layers, count)
            self._layer_groups.check(explicit)
            return explicit, "explicit"
        if facts.parameters:
            assert count is not None
            spread = partitioners.balanced_groups(facts.parameters, count, self._layer_groups)
            return tuple(spread), "by parameters: there is no profile yet"
        planner = self._planner(facts.memory_limit, smoothed=False)
        if count is not None:
            return planner.onto(count).partition, "explicit"
        return self._best(planner).partition, f"best by planner {self.dynmo.repack.planner}"

    def _best(self, planner: Planner) -> Packing:
        """As the planner says; ranks that joined since the last decision are taken if that makes training faster.

        What they make of its throughput is then what counts as that of its start: else they would be released next.
        """
        assert self._repacker is not None
        if self._repacker.joining_ranks:
            present = self._predicted(tuple(self.partition))
            assert present is not None
            fastest = planner.fastest(present)
            if len(fastest.partition) > len(self.partition):
                return fastest
        return planner.best()

    def _agreed(self, decide: Callable[[], tuple[tuple[int, ...], str]]) -> tuple[tuple[int, ...], str]:
        """What ``decide`` gives, the same partition on every rank. Collective.

        Raises:
            PartitionError: where ``decide`` does.
            MigrationError: elsewhere, if it fails on one rank or ranks differ. Nothing has moved.
        """
        failure: Exception | None = None
        new, verdict = None, ""
        try:
            new, verdict = decide()
        except Exception as error:  # whatever a balancer of the user's raises: the others have to hear of it
            failure = error
        try:
            self._comm.agree_on(new, self.partition)
        except MigrationError as error:
            if isinstance(failure, PartitionError):
                raise failure from None
            raise error from failure
        assert new is not None
        return new, verdict

    def _repack_if_better(self, reason: str) -> bool:
        """At a decision: re-pack if the planner finds another number of stages better; False if it does not."""
        began = time.perf_counter()
        assert self._repacker is not None
        self._comm.enter("repack")
        self._admit()
        limit = self._memory_limit_bytes()
        new, _ = self._agreed(lambda: (self._best(self._planner(limit, smoothed=True)).partition, ""))
        if len(new) == len(self.partition):
            self._repacker.joining_ranks = False
            return False
        self._repack(new, reason, f"best by planner {self.dynmo.repack.planner}", time.perf_counter() - began)
        return True

    def _planner(self, memory_limit: int | None, *, smoothed: bool) -> Planner:
        assert self._profile is not None and self._repacker is not None
        whole = self._of_whole_batch(self._profile)
        return Planner(  # of one pipeline alone: what further replicas add comes on top
            given=self._cost_model.decision_input(whole, tuple(self.partition), smoothed=smoothed),
            config=self.dynmo,
            memory=memory_model(whole, memory_limit, self.module.activation_checkpoint_interval),
            most=self._most_stages,
            first_seconds=self._cost_model.first_seconds,
            groups=self._layer_groups,
        )

    def _repack(self, new: tuple[int, ...], reason: str, verdict: str, decide_seconds: float) -> RepackReport:
        assert self._repacker is not None
        old, step = tuple(self.partition), self.global_steps
        before, after = self._predicted(old), self._predicted(new)
        self._reporter.profiled(self._profile)  # afterwards it is of other stages
        if self._policy.restarts and len(new) < len(old):
            done, saved = self._stop_for_restart(new)
            verdict = f"{verdict}; {saved}"
        elif len(new) == len(old):
            moved = self._go_to(new, reason="explicit")
            done = RepackResult((), (), moved.layers_moved, moved.bytes_moved, moved.migrate_seconds)
        else:
            done = self._resize(new)
        self._repacker.joining_ranks = False
        if self._profile is not None:
            after = self._predicted(new)  # by as many copies as there are now
        report = RepackReport(
            step=step,
            reason=reason,
            old_partition=old,
            new_partition=new,
            released_ranks=done.released_ranks,
            recalled_ranks=done.recalled_ranks,
            iteration_seconds_before=before,
            iteration_seconds_after=after,
            layers_moved=done.layers_moved,
            bytes_moved=done.bytes_moved,
            decide_seconds=decide_seconds,
            migrate_seconds=done.migrate_seconds,
            world_seconds=done.world_seconds,
            verdict=verdict,
            copies=self._repacker.world.replica_multiplier,
        )
        self._reporter.repacked(report, self.global_samples)
        return report

    def _resize(self, new: tuple[int, ...]) -> RepackResult:
        """Go on with another number of stages."""
        repacker, wanted = self._repacker, len(new) - 1
        assert repacker is not None
        if wanted > len(repacker.world.stages):
            return repacker.grow(new, self._first_seconds_with(new) if repacker.joining_ranks else None)
        replica_multiplier = (
            repacker.replica_multiplier_for(wanted) if self.dynmo.repack.freed_ranks == "replicas" else 1
        )
        if repacker.world.replica_multiplier > 1:
            done = repacker.merge_replicas(new, park=self._policy.parks, replica_multiplier=replica_multiplier)
        else:
            done = repacker.shrink(new, park=self._policy.parks, replica_multiplier=replica_multiplier)
        if repacker.world.launch_rank == 0 and done.released_ranks:
            self._tidy_up_at_exit()
            self._messenger.release(*repacker.gone_and_staying())
        return done

    def _stop_for_restart(self, new: tuple[int, ...]) -> tuple[RepackResult, str]:
        """Save, say how to go on, and release every rank; what was done, and a clause for the verdict."""
        assert self._repacker is not None
        began = time.perf_counter()
        folder, tag = str(self.dynmo.repack.checkpoint), f"global_step{self.global_steps}"
        states = {name: holder.state_dict() for name, holder in self._repacker.states.items()}
        self.save_checkpoint(folder, tag=tag)
        ranks = self.world_size * (len(new) - 1) // self.num_stages
        launch = Launch(len(new) - 1, ranks, tag, new, self.global_steps, states)

        def write() -> None:
            if self.global_rank == 0:
                write_launch(folder, launch)

        self._comm.gather_or_fail("writing how to go on", write)
        self.released = True
        everyone = self._repacker.world.launch_ranks(self._repacker.world.stages)
        done = RepackResult(released_ranks=everyone, migrate_seconds=time.perf_counter() - began)
        return done, f"saved as {tag}, launch {ranks} ranks in {len(new) - 1} stages"

    def _tidy_up_at_exit(self) -> None:
        if not self._tidies_up and self._repacker is not None:
            self._tidies_up = True
            atexit.register(_tidy_up, self._repacker, self._messenger)

    def _predicted(self, partition: tuple[int, ...]) -> float | None:
        if self._profile is None:
            return None
        pipeline = self._cost_model.decision_input(self._profile, tuple(self.partition), smoothed=False).pipeline
        return float(pipeline.on(len(partition) - 1).iteration_seconds(partition))

    def _first_seconds_with(self, new: tuple[int, ...]) -> float | None:
        """What counts as an iteration at the start of the run, where ranks that joined are taken onto ``new``."""
        known = self._cost_model.first_seconds
        if known is None or self._profile is None:
            return None
        given = self._cost_model.decision_input(
            self._of_whole_batch(self._profile), tuple(self.partition), smoothed=False
        )
        return min(known, float(given.pipeline.on(len(new) - 1).iteration_seconds(new)))

    def _of_whole_batch(self, profile: Profile) -> Profile:
        """As if one pipeline had all micro-batches, which copies of it share."""
        replica_multiplier = 1 if self._repacker is None else self._repacker.world.replica_multiplier
        return replace(profile, micro_batches=profile.micro_batches * replica_multiplier)

    def _warn(self, message: str) -> None:
        self._reporter.warn(message)

    def _inform(self, message: str) -> None:
        self._reporter.inform(message)

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

    @abstractmethod
    def _go_to(self, new: tuple[int, ...], *, reason: str) -> RebalanceReport: ...

    @abstractmethod
    def _memory_limit_bytes(self) -> int | None: ...

    @abstractmethod
    def _train_until_profiled(self) -> float: ...


def _tidy_up(repacker: Repacker, messenger: Messenger) -> None:
    """Parked ranks would otherwise wait until they lose the store; and a release that was begun is finished."""
    try:
        repacker.dismiss()
    finally:
        messenger.finish()
