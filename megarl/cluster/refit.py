"""The refit: writes the actor's weights into the engines. It passes through three levels: Refit in the driver calls
EngineGroup's actors, each actor calls its Engine, and the engine calls vLLM's workers (RefitExtension). The workers
write the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from megarl.cluster.groups.engines import EngineGroup, Generation
from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.session import Session
from megarl.cluster.sync_verifier import SyncVerifier
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.metrics import Metric
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.plan import Plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import ordered
from megarl.resharding.transports.cuda_memory import CudaMemory
from megarl.resharding.transports.hybrid import HybridTransport, RemoteRendezvous
from megarl.resharding.transports.p2p import Rendezvous
from megarl.resharding.transports.shared_memory import SharedMemory
from megarl.resharding.transports.transport import Channel
from megarl.resharding.verification import Checksum, Region, regions


class Refit:
    """Refits the engines. It makes a new plan when an engine is lost or rejoins, and all engines then receive all
    weights again. It connects once per plan, or before each refit if the weights' addresses change."""

    def __init__(
        self, session: Session, config: Config, trainers: TrainerGroup, engines: EngineGroup, export_plan: Plan
    ):
        """export_plan: the plan that each trainer uses to compute checksums of its elements."""
        self._session, self._config = session, config
        self._trainers, self._engines = trainers, engines
        self._export_plan = export_plan
        self._quantizes = config.rollout.quantization is not None
        verify = config.rollout.verify_refit
        self._verifier = (
            None if verify == "off" else SyncVerifier(self._checksums, verify, config.actor.frozen_patterns)
        )
        self._connected: Collection[Generation] = ()
        self._planned: tuple[Plan, CompactPlan] | None = None
        self._rendezvous: Rendezvous | None = None
        """Rendezvous for the plan's senders and receivers; None if the plan sends nothing."""
        self.weights: dict[str, Any] = {}
        """Digests of the weights in the latest refit (see SyncVerifier.summarize) and number of engines that received
        the weights, as JSON values."""
        self._parameters_move = "parameters" in config.actor.offload
        self._connections = 0
        self._version: int | None = None
        """Weight version of the latest refit."""

    def run(self, version: int, rate: float = 0.0) -> dict[str, Metric]:
        """Write the weights into every engine in place, label them `version`, and return metrics. `rate` is the mean
        learning rate of the updates since the last refit; 0 without updates. Raise RunFailure if a call failed, the
        weights did not arrive (see SyncVerifier), or the last engine is lost."""
        self._engines.rejoin_restarted("refit")
        if self._quantizes or self._config.actor.adapters is not None:
            self._trainers.prepare_refit().result()
        # A refit that is repeated after the loss of a rank must not count the preceding updates a second time.
        rate = 0.0 if version == self._version else rate
        expected = None if self._verifier is None else self._verifier.expect(regions(self._engines.holders), rate)
        self._version = version
        while True:
            if self._connected != self._engines.generations:
                self._planned = None
            if self._planned is None or (self._reads_on_gpu and self._parameters_move):
                self._connect()
                if not self._connected:  # an engine was lost: plan without it
                    continue
            sending = {} if self._rendezvous is None else self._trainers.send.start()
            calls = sending | self._engines.start_refit(version, expected)
            answers = self._session.submit(calls, "refit", "refit", may_fail=self._engines.may_fail).result()
            if not answers.lost:
                break
            self._engines.drop(answers.lost, "refit")
        values = self._session.trace.add("refit", answers)
        workers = [worker for name in self._engines.names for worker in values[name]]
        self.weights = {"version": version, "num_engines": len(self._engines.names)}
        if self._verifier is not None and expected is not None:
            found = [
                {place: value for worker in values[name] for place, value in worker.checksums.items()}
                for name in self._engines.names
            ]
            self.weights |= self._verifier.summarize(expected, found)
        sent = {"refit/sent_gb": Metric(sum(values[name] for name in sending) / 1e9)} if sending else {}
        return sent | {
            "refit/gb": Metric(sum(worker.num_bytes for worker in workers) / 1e9),
            "refit/staging_mib": Metric(max(worker.staging_bytes for worker in workers) / 2**20),
            "engines/alive": Metric(len(self._engines.names)),
        }

    def disconnect(self) -> None:
        """Make the engines release the memory of dead trainers. The next refit connects to the new trainers."""
        self._connected, self._planned = (), None
        self._engines.disconnect().result()

    def differing(self) -> dict[str, list[str] | None]:
        """Compare the engines' weights with the trainer's. Return, by engine name, one line for each region that
        differs, or None for an engine that cannot be compared. The actor's weights must be on its devices."""
        if self._engines.by_loader:
            return dict.fromkeys(self._engines.names)
        return self._engines.differing(self._checksums(regions(self._engines.holders))).result()

    @property
    def transport(self) -> str:
        """Name of the plan's transport. Unless all weights are sent, engines read the weights of trainers on their own
        node directly."""
        if self._config.sends_weights:
            return "p2p"
        return device.memory_transport() + ("" if self._rendezvous is None else " within nodes, p2p between nodes")

    @property
    def _reads_on_gpu(self) -> bool:
        return not self._config.sends_weights and device.memory_transport() == "cuda_ipc"

    def _checksums(self, wanted: Sequence[Region]) -> Mapping[Region, Checksum]:
        return self._trainers.checksums(wanted, self._compact_export_plan).result()

    @cached_property
    def _sources(self) -> Sequence[Holder]:
        """The holders whose weights the refit sends."""
        return self._engines.sources(self._trainers.holders)

    @cached_property
    def _compact_export_plan(self) -> CompactPlan:
        plan = make_plan(self._sources, [self._engines.whole_model]) if self._quantizes else self._export_plan
        return CompactPlan.of(plan)

    def _connect(self) -> None:
        if self._planned is None:
            self._planned = self._make_plan()
        plan, compact = self._planned
        connected = self._engines.connect(compact, self._channel(plan)).result()
        self._connected = self._engines.generations if connected else ()

    def _channel(self, plan: Plan) -> Channel:
        remote = self._rendezvous
        if remote is not None and not isinstance(remote, RemoteRendezvous):
            return remote
        local: Channel
        if self._reads_on_gpu:
            local = CudaMemory(self._trainers.publish_on_gpu(plan.node_local).result(), self._parameters_move)
        else:
            local = SharedMemory(self._trainers.publish(for_refit=True).result())
        return local if remote is None else HybridTransport(local, remote)

    def _make_plan(self) -> tuple[Plan, CompactPlan]:
        """Return a new plan. If it sends weights, the trainers join its rendezvous."""
        bucket_mib = self._config.rollout.refit_bucket_mib
        plan = make_plan(self._sources, self._engines.holders, None if bucket_mib is None else bucket_mib * 2**20)
        if not self._config.sends_weights and not plan.crosses_nodes:
            self._rendezvous = None
            return plan, CompactPlan.of(plan)
        plan = ordered(plan)
        compact, self._rendezvous = CompactPlan.of(plan), self._new_rendezvous()
        self._trainers.connect(compact, self._rendezvous).result()
        return plan, compact

    def _new_rendezvous(self) -> Rendezvous:
        """Return a new rendezvous. The next plan cannot reuse a rendezvous that a process has left."""
        self._connections += 1
        host, port = self._trainers.store_address
        kind = Rendezvous if self._config.sends_weights else RemoteRendezvous
        return kind(host, port, f"refit.{self._connections}", self._config.rollout.refit_timeout_s)
