"""Gradients that arrive where others have been used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxzero.graph import Lane
from fxzero.graph.lanes import aligned
from fxzero.graph.operators import num_bytes
from fxzero.passes.gradient_places import IN_FLIGHT, Places, shared_bytes
from tests.passes.test_offload_disk import DISK, downloads, input_of, on_disk, update_of

SIZES = st.lists(st.integers(1, 40), max_size=12)


@given(SIZES)
def test_nothing_is_copied_over_before_it_was_used(sizes: list[int]) -> None:
    """Byte by byte: whose bytes a bucket takes it waits for, or one before it has."""
    places = Places(sizes)
    owner: dict[int, int] = {}
    done: set[int] = set()
    for number, (begin, behind) in enumerate(zip(places.begins, places.behind, strict=True)):
        assert all(i < number for i in behind)
        done |= set(behind)
        for byte in range(begin, begin + sizes[number]):
            assert byte < places.num_bytes
            assert owner.get(byte, number) in done | {number}
            owner[byte] = number


@given(SIZES)
def test_three_buckets_have_room(sizes: list[int]) -> None:
    """As much as the three largest take; a bucket does not wait for the one before it where they
    fit side by side."""
    places = Places(sizes)
    assert places.num_bytes == shared_bytes(sizes) == sum(sorted(sizes)[-IN_FLIGHT:])
    if len(set(sizes)) == 1:
        assert places.behind == [[i - 3] if i >= 3 else [] for i in range(len(sizes))]


def test_downloads_wait_for_whose_place_they_take() -> None:
    """In the order in which gradients come, and the staging area has room for three."""
    graph = on_disk(6)
    found = downloads(graph)
    size = aligned(num_bytes(found[0].tensors[0]))
    assert [copy.launch.args[3] for copy in found] == [[i % 3 * size] for i in range(6)]
    updates = [update_of(graph, copy.stamp.params) for copy in found]
    assert [copy.launch.args[5] for copy in found] == [[], [], [], *([u] for u in updates[:3])]
    assert num_bytes(input_of(graph, "staging")) == 3 * size


def test_gradients_that_wait_for_the_norm_have_a_place_each() -> None:
    """All of them are there when it is known."""
    graph = on_disk(6, clip_grad_norm=1.0)
    places = [copy.launch.args[3] for copy in downloads(graph)]
    assert len({str(place) for place in places}) == 6
    assert all(not copy.launch.args[5] for copy in downloads(graph))


def test_saved_values_keep_their_places() -> None:
    """They come first, packed; gradients behind them."""
    values = {"offload_activations": {"share": 1.0, "min_bytes": 1}}
    throttle = {"throttle": {"h2d": "1000GB/s", "d2h": "1000GB/s"}}
    cost = {"cost": {"cluster": "dgx2"}}
    graph = on_disk(6, options={**DISK, **values, **throttle, **cost}, zero=0, world_size=1)
    own = [copy for copy in graph.transfers(name=Lane.D2H.value) if not copy.of_parameters]
    grads = [copy for copy in graph.transfers(name=Lane.D2H.value) if copy.of_parameters]
    ends = [
        int(begin) + num_bytes(tensor)
        for copy in own
        for begin, tensor in zip(copy.launch.args[3], copy.tensors, strict=True)  # type: ignore[arg-type]
    ]
    assert all(int(copy.launch.args[3][0]) >= max(ends, default=0) for copy in grads)  # type: ignore[index,arg-type]
