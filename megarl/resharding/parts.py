"""What each of a plan's members needs of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from megarl.resharding.plan import Bucket, Hop, Link, Padding, Plan


@dataclass
class _Part:
    buckets: list[Bucket] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    """Of a bucket in the plan -> of the same in this part."""
    padding: list[Padding] = field(default_factory=list)
    order: list[Hop] = field(default_factory=list)

    def add(self, number: int, bucket: Bucket) -> None:
        self.numbers[number] = len(self.buckets)
        self.buckets.append(bucket)


def parts(plan: Plan, groups: Sequence[Collection[str]]) -> list[Plan]:
    """For each group of holders the plan as far as it concerns them: all holders, but only the links of which they are
    an end."""
    group_of = {name: group for group, names in enumerate(groups) for name in names}
    groups_of = [group_of.get(name) for name in plan.holders]

    def concerned(link: Link) -> set[int]:
        return {groups_of[link.source], groups_of[link.destination]} - {None}

    found = [_Part() for _ in groups]
    for number, bucket in enumerate(plan.buckets):
        of_groups: dict[int, tuple[list[Link], list[Link]]] = defaultdict(lambda: ([], []))
        for kind, links in enumerate((bucket.links, bucket.onward)):
            for link in links:
                for group in concerned(link):
                    of_groups[group][kind].append(link)
        for group, (links, onward) in of_groups.items():
            found[group].add(number, replace(bucket, links=tuple(links), onward=tuple(onward)))
    for hop in plan.order:
        for group in concerned(hop.link):
            found[group].order.append(Hop(found[group].numbers[hop.bucket], hop.link))
    for holders, places in plan.padding:
        for group in {groups_of[holder] for holder in holders} - {None}:
            own = tuple(holder for holder in holders if groups_of[holder] == group)
            found[group].padding.append(Padding(own, places))
    return [replace(plan, buckets=tuple(p.buckets), padding=tuple(p.padding), order=tuple(p.order)) for p in found]
