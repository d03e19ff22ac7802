"""Process groups: the table of collectives, a single rank, a launcher's ranks, a slow link, private groups."""

from stretto.groups.answering import answering, answers
from stretto.groups.collective_group import SoloGroup
from stretto.groups.connections import Connection, listens_at
from stretto.groups.deaths import announce_death, deaths
from stretto.groups.launcher import (
    announce_rank,
    is_hosted_by_agent,
    join_launched_group,
    launched_per_node,
    launched_rank,
    local_device,
    meeting_point,
    own_machine,
    own_rank,
    told_place,
)
from stretto.groups.leavable import MEET_SECONDS, Leavable, LeavableGroup, await_left, part_store
from stretto.groups.meshes import drop_default, meshes_over
from stretto.groups.private import (
    connections_of,
    host_group,
    part_of,
    private_group,
    ranks_of,
    release,
    retire,
)
from stretto.groups.throttled import ThrottledGroup, ThrottledLeavable, register_throttled
from stretto.groups.wrapped import may_wait_again, orders_streams
from stretto.link import Link

__all__ = [
    "MEET_SECONDS",
    "Connection",
    "Leavable",
    "LeavableGroup",
    "Link",
    "SoloGroup",
    "ThrottledGroup",
    "ThrottledLeavable",
    "announce_death",
    "announce_rank",
    "answering",
    "answers",
    "await_left",
    "connections_of",
    "deaths",
    "drop_default",
    "host_group",
    "is_hosted_by_agent",
    "join_launched_group",
    "launched_per_node",
    "launched_rank",
    "listens_at",
    "local_device",
    "may_wait_again",
    "meeting_point",
    "meshes_over",
    "orders_streams",
    "own_machine",
    "own_rank",
    "part_of",
    "part_store",
    "private_group",
    "ranks_of",
    "register_throttled",
    "release",
    "retire",
    "told_place",
]
