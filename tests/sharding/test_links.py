"""Who speaks to whom in a pipeline, over which process group."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxzero.sharding.pipeline import make_pipeline
from tests.parity.harness import Pools


def groups_made(world: int, schedule: str) -> tuple[int, int, list[tuple[int, int]]]:
    """Job: groups that a pipeline has made, those of them that carry links, and the links."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("pipeline",))
    before = len(dist.distributed_c10d._world.pg_map)
    pipeline = make_pipeline(mesh, schedule, {})
    made = len(dist.distributed_c10d._world.pg_map) - before
    for (a, b), link in pipeline.links.items():
        assert pipeline.place in (a, b)
        assert {a, b} <= link.ranks
        assert pipeline.links[b, a].name == link.name
    names = {link.name for link in pipeline.links.values()}
    return made, len(names), sorted(pipeline.links)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_two_places_speak_over_the_pipelines_own_group(schedule: str, ranks: Pools) -> None:
    for found in ranks(2).run(groups_made, 2, schedule):
        assert found == (0, 1, [(0, 1), (1, 0)])


def test_both_directions_share_a_group_of_gloo(ranks: Pools) -> None:
    """This rank is in those of its neighbours alone; interleaved, the last speaks to the first."""
    for place, (made, groups, links) in enumerate(ranks(4).run(groups_made, 4, "1f1b")):
        neighbours = [n for n in (place - 1, place + 1) if 0 <= n < 4]
        assert made == groups == len(neighbours)
        assert links == sorted([(place, n) for n in neighbours] + [(n, place) for n in neighbours])
    assert [row[1] for row in ranks(4).run(groups_made, 4, "interleaved")] == [2, 2, 2, 2]
