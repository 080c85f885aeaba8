"""Replacement of the ranks that train models, while engines, environments, rewards and the queue keep running.

When a rank dies, all ranks of the trained models are replaced, because the survivors' collectives have failed and their
process groups cannot be repaired. The new ranks restore the old ranks' state from shared memory on their nodes. Steps
since that copy are trained again on the same samples, and the interrupted part of the step runs again. If a node
without other processes is lost, a spare node takes its place, and its ranks fetch their state from copies on another
node. Such copies are kept while there is a spare node. After each step, a spare node also replaces a node that should
leave the run before it fails.

Copies are made in the background, so engines may already have the weights of a step whose copies are incomplete. If a
rank is lost at that point, the step is trained again. On CPU, the resulting weights are bit-identical. On GPUs, they
may differ from the engines' weights by rounding errors until the next refit. The recorded log-probs of the rollouts
account for this difference.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megarl.cluster.departures import Departures
from megarl.cluster.failure import LostRanks
from megarl.cluster.groups.trainers import PARTS, TrainerGroup
from megarl.cluster.nodes.gathering import accept_connections
from megarl.cluster.pending import Pending, join
from megarl.cluster.session import Session
from megarl.cluster.supervision.interrupts import interrupts
from megarl.config.model_schema import Role
from megarl.core.checkpoint import Checkpoint
from megarl.core.errors import RunFailure
from megarl.core.metrics import Metric
from megarl.core.partners import keepers

MAX_REPLACEMENTS = 4
"""Maximum number of replacements per step. After that, another loss ends the attempt, because the step itself is the
likely cause."""


class Recovery:
    """Replaces lost ranks of a run's trained models.

    The state after the latest copied step is in shared memory on the ranks' nodes. Until the first copy is complete,
    the state is in the model folders and in the checkpoint that the run resumed from. A copy is complete when all ranks
    of all models have finished theirs. Until then, each rank also keeps its previous copy."""

    def __init__(
        self,
        session: Session,
        groups: Mapping[Role, TrainerGroup],
        sharing: Mapping[Role, Collection[Role]],
        checkpoint: Checkpoint | None,
        every_steps: int = 1,
    ):
        """For `groups` and `sharing`, see TrainedModels. checkpoint: the checkpoint that the run resumed from.
        every_steps: number of steps between copies."""
        self._session, self._groups, self._sharing, self._checkpoint = session, groups, sharing, checkpoint
        self._every_steps = every_steps
        self._copied: int | None = None
        """Latest step whose copies are complete."""
        self._copying: int | None = None
        """Step whose copies are being made."""
        self._kept: Collection[Role] = ()
        """Roles whose copies are also being delivered to keepers."""
        self._repeats: dict[int, Callable[[], object]] = {}
        """Function that repeats the training of each step after the latest copy, by step."""
        self._num_replaced = self._num_unreported = 0
        """Number of replacements since the last step was trained, and since the last call of `take_metrics`."""
        self._seconds = 0.0
        """Duration of the unreported replacements."""
        self._fits: bool | None = None
        """Whether copies fit into shared memory; None: not checked yet."""
        self._kept_copies_fit: bool | None = None
        """Whether two copies of each rank's state fit, one of them on another node; None: not checked yet."""
        self._lacks_copy = False
        """Whether a copy failed because shared memory was full, and no later one has succeeded."""
        self._delivered: dict[Role, int] = {}
        """The latest step whose copies are on the keepers' nodes, by role."""
        self._departures = Departures()
        self._blocked = set[int]()
        """Nodes that should have left at the end of the latest step, but that no spare node could replace."""
        self._printed = set[str]()
        """Lines about nodes that could not be replaced."""
        self.disconnect: list[Callable[[], None]] = []
        """Callbacks that free the old ranks' GPU memory by making other processes close their mappings of it."""

    def attempts(self) -> Iterator[AbstractContextManager[None]]:
        """Yield contexts for attempts at a task until one of them completes. If ranks are lost in an attempt, they are
        replaced, their state after the last step is restored, and the next attempt starts. The task must not change any
        other state before it completes."""
        is_done = False

        @contextmanager
        def attempt() -> Iterator[None]:
            nonlocal is_done
            try:
                yield
                is_done = True
            except LostRanks as loss:
                self._require_copies(loss)
                self._replace(str(loss))

        while not is_done:
            yield attempt()

    def fits(self) -> bool:
        """Return whether copies take at most half of the free shared memory on every node. If not, ranks are never
        replaced. Once there are spare nodes, also check the additional copies for keepers. Each check runs once, and
        prints a note if it fails."""
        if self._fits is None:
            self._fits = self._has_room(
                lambda _: (), "the loss of a rank ends the attempt. Fix: enlarge /dev/shm until twice that size is free"
            )
        if self._fits and self._kept_copies_fit is None and self._session.members.spare_nodes():
            self._kept_copies_fit = self._has_room(
                lambda group: keepers(group.nodes),
                "the loss of a node ends the attempt. Fix: enlarge /dev/shm until twice that size is free",
            )
        return self._fits

    def keepers(self, group: TrainerGroup) -> Sequence[int]:
        """Return the rank that keeps a copy of each rank's state on another node. The list is empty if no spare
        node could use the copies, or if they do not fit."""
        return keepers(group.nodes) if self._kept_copies_fit and self._session.members.spare_nodes() else ()

    def _has_room(self, keepers_of: Callable[[TrainerGroup], Sequence[int]], consequence: str) -> bool:
        """Return whether the ranks' own copies and those that keepers hold for them take at most half of the free
        shared memory on every node. If not, print a note."""
        needed: Counter[int] = Counter()
        free: dict[int, int] = {}
        for group in self._groups.values():
            sizes = group.copy_room().result()
            for node, (num_bytes, node_free) in zip(group.nodes, sizes, strict=True):
                needed[node] += num_bytes
                free[node] = node_free
            for rank, keeper in enumerate(keepers_of(group)):
                needed[group.nodes[keeper]] += sizes[rank][0]
        lacking = [node for node in needed if 2 * needed[node] > free[node]]
        for node in lacking[:1]:
            print(
                f"recovery: copies of the trained models' state need {needed[node] / 2**30:.2f} GiB of shared memory "
                f"on node number {node}, more than half of its free {free[node] / 2**30:.2f} GiB, so {consequence}",
                flush=True,
            )
        return not lacking

    def is_due(self, step: int) -> bool:
        """Return whether to copy the state after `step`: at the configured interval, before a node leaves, and until
        there is a first copy. Without a copy, new ranks would load the checkpoint that the run resumed from, but
        checkpoint.keep may have removed it."""
        is_first = self._copied is None and self._copying is None
        return is_first or step % self._every_steps == 0 or bool(self._leaving().keys() - self._blocked)

    def note_copying(self, step: int, kept: Collection[Role], problem: str = "") -> None:
        """Record that all ranks are copying their state after `step`, or that shared memory was full (`problem`). kept:
        the roles whose copies are also being delivered to keepers."""
        if problem:
            self._note_lacking(step, problem)
        else:
            self._copying, self._kept = step, kept

    def note_trained(self, step: int, repeat: Callable[[], object]) -> None:
        """Record that the training of `step` is complete. `repeat` trains it again from the state before it."""
        self._num_replaced = 0
        if not self._lacks_copy or self._copying is not None:
            self._repeats[step] = repeat

    def finish_copying(self, waits: bool = True) -> None:
        """Record that the copies in progress are complete. If they are not, wait for them or, unless `waits`, do
        nothing. If shared memory was full, the loss of a rank ends the attempt until a later copy succeeds."""
        if self._copying is None:
            return
        results = join([group.finish_copies(waits) for group in self._groups.values()]).result()
        finished = [result for result in results if result is not None]
        if len(finished) < len(results):
            return
        copied, delivered = (next(filter(None, problems), "") for problems in zip(*finished, strict=True))
        step, self._copying = self._copying, None
        if copied:
            self._note_lacking(step, copied)
            return
        self._note_copied(step)
        if delivered:
            # No further copies are delivered, because every attempt would take time.
            self._kept_copies_fit = False
            print(
                f"recovery: no copies on other nodes, so the loss of a node ends the attempt. {delivered}", flush=True
            )
        else:
            self._delivered |= dict.fromkeys(self._kept, step)

    def _note_copied(self, step: int) -> None:
        if self._lacks_copy:
            print(f"recovery: copied the state after step {step}; lost ranks can be replaced again", flush=True)
        self._copied, self._lacks_copy = step, False
        self._repeats = {number: repeat for number, repeat in self._repeats.items() if number > step}

    def _note_lacking(self, step: int, problem: str) -> None:
        if not self._lacks_copy:
            print(f"recovery: no copy after step {step}, so the loss of a rank ends the attempt. {problem}", flush=True)
        self._lacks_copy = True
        self._repeats.clear()

    def replace_leaving_node(self) -> None:
        """Replace a node that should leave the run before it fails, if a spare node can take its place: on request,
        because its devices have new errors, or because they are slow. Call this after `copy_state`. A node leaves only
        when the state after the latest step is copied, so that no work is repeated. Replaces at most one node, because
        keepers on a second one would be lost with it."""
        has_state = self._copied is not None or self._repeats
        if len(self._session.members) == 1 or not has_state or self._lacks_copy or interrupts.is_signaled:
            return
        name = self._session.members.name
        self._blocked.clear()
        for number, reason in self._leaving().items():
            if obstacle := self._obstacle(number):
                self._blocked.add(number)
                self._print_once(f"recovery: node {name(number)} should leave the run: {reason}. {obstacle}")
            elif self._is_kept(number):
                self._session.members.dismiss(number)
                self._replace(f"node {name(number)} leaves the run: {reason}", task="move")
                break

    def _leaving(self) -> dict[int, str]:
        """Return the nodes that should leave the run, and why."""
        members = self._session.members
        return {} if len(members) == 1 else self._departures.reasons() | members.leave_requests()

    def _is_kept(self, number: int) -> bool:
        """Wait for the copies in progress. Return whether keepers hold the latest state of all ranks on this node."""
        for attempt in self.attempts():
            with attempt:
                self.finish_copying()
        is_copied = not self._repeats and not self._lacks_copy
        return is_copied and all(self._delivered.get(role) == self._copied for role in self._roles_on(number))

    def observe_devices(self) -> None:
        """Examine the devices, one model at a time, because models may share them. Call this after a step's training
        and before its copies begin, because they would slow down the speed probe."""
        if len(self._session.members) == 1 or interrupts.is_signaled:
            return
        nodes, states = {}, []
        for group in self._groups.values():
            nodes |= dict(zip(group.actors, group.nodes, strict=True))
            states += group.examine_device().result()
        self._departures.observe(nodes, states)

    def _roles_on(self, number: int) -> list[Role]:
        return [role for role, group in self._groups.items() if number in group.nodes]

    def _alone_on(self, number: int) -> list[Role]:
        """Return the roles whose ranks are all on this node, so that no other node keeps their copies."""
        return [role for role in self._roles_on(number) if not keepers(self._groups[role].nodes)]

    def _obstacle(self, number: int) -> str:
        """Return why no spare node can replace this node now, with a remedy, or "" if one can."""
        alone = [f"all ranks of the {role}" for role in self._alone_on(number)]
        if others := self._session.not_replaceable([number]) or alone:
            return (
                f"The run continues, because no spare node can take over {', '.join(others)}. Fix: end the run, and "
                "resume it on other nodes with resume=auto"
            )
        spares = self._session.members.spare_nodes()
        if not spares or not accept_connections(spares[:1]):
            folder = self._session.logs.parents[1]
            return f"The run continues, because it has no spare node. Fix: run megarl join {folder} on another node"
        if self._kept_copies_fit is False:
            return "The run continues, because copies on other nodes do not fit. Fix: enlarge /dev/shm"
        return ""

    def _print_once(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            print(line, flush=True)

    def take_metrics(self) -> dict[str, Metric]:
        """Return metrics of the replacements since the last call, if there were any, and the slowest node's slowdown
        if it was measured."""
        metrics = {}
        if self._departures.slowdown is not None:
            metrics["cluster/slowest_node"] = Metric(self._departures.slowdown)
        if self._num_unreported:
            metrics |= {"recovery/replacements": Metric(self._num_unreported), "time/recovery": Metric(self._seconds)}
        self._num_unreported, self._seconds = 0, 0.0
        return metrics

    def _require_copies(self, loss: LostRanks) -> None:
        """Raise the loss if there is no copy to restore, or if the run has received a termination signal."""
        has_none = self._lacks_copy and self._copying is None
        if self._fits is False or has_none or interrupts.is_signaled:
            raise loss

    def _replace(self, cause: str, task: str = "recover") -> None:
        """Replace all ranks, and replace them again if more ranks are lost in the meantime. Raise RunFailure if ranks
        cannot be replaced, or if the step has lost ranks too often. `task` names the replacement in the trace."""
        begin = time.time()
        while True:
            self._num_replaced += 1
            self._num_unreported += 1
            if self._num_replaced > MAX_REPLACEMENTS:
                raise RunFailure(
                    f"a rank was lost again after {MAX_REPLACEMENTS} replacements in this step. Last cause: {cause}"
                )
            print(f"recovery: replacing all ranks of the trained models. Cause: {cause}", flush=True)
            try:
                self._restart(cause)
                end = time.time()
                self._seconds += end - begin
                self._session.trace.record(task, begin, end)
                restored = "initial state" if self._copied is None else f"state after step {self._copied}"
                print(f"recovery: replaced the ranks in {end - begin:.1f} s and restored their {restored}", flush=True)
                begin = end
                self._repeat_steps()
                return
            except LostRanks as further:
                self._require_copies(further)
                cause = str(further)

    def _repeat_steps(self) -> None:
        """Train the steps since the restored copy again."""
        for step, repeat in self._repeats.items():
            begin = time.time()
            repeat()
            self._session.trace.record(f"repeat step {step}", begin, time.time())
            print(f"recovery: trained step {step} again in {time.time() - begin:.1f} s", flush=True)

    def _restart(self, cause: str) -> None:
        self._delivered.clear()
        for group in self._groups.values():
            group.kill()
        self._settle_copying(cause)
        for disconnect in self.disconnect:
            disconnect()
        for number in self._session.replace_lost_nodes():
            self._departures.forget(number)
        restored: list[Pending[Any]] = []
        for role, group in self._groups.items():
            group.launch()
            restored.append(group.start().then(lambda _, group=group: self._restore(group)))
            if self._sharing[role] and group.offloads:  # free the devices before the next model loads its state
                join(restored).result()
                group.offload(PARTS).result()
        join(restored).result()

    def _settle_copying(self, cause: str) -> None:
        """Use the copies that were in progress if all ranks have completed theirs; otherwise, use the previous ones."""
        step, self._copying = self._copying, None
        if step is not None and all(group.holds_copies(step) for group in self._groups.values()):
            self._note_copied(step)
        if self._lacks_copy:
            raise RunFailure(
                f"{cause}. Shared memory was full, so there is no copy of the ranks' state. Fix: enlarge /dev/shm, and "
                "resume with resume=auto"
            )
        self._require_other_copies(cause)

    def _require_other_copies(self, cause: str) -> None:
        """Raise RunFailure if a lost node held all copies of a model, because new ranks could not restore their
        state."""
        for number in () if self._copied is None else self._session.members.lost():
            if alone := self._alone_on(number):
                raise RunFailure(
                    f"{cause}. All ranks of the {', '.join(alone)} were on node {self._session.members.name(number)}, "
                    "so no other node has a copy of their state. Fix: resume from the newest checkpoint with "
                    "resume=auto"
                )

    def _restore(self, group: TrainerGroup) -> Pending[Any]:
        if self._copied is not None:
            return group.restore_state(self._copied, self.keepers(group))
        discarded = group.discard_copies()
        checkpoint = self._checkpoint
        return discarded if checkpoint is None else discarded.then(lambda _: group.load_checkpoint(checkpoint))
