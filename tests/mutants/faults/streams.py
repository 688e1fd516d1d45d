"""What orders a device that is behind the thread that launches: events, and who waits for them."""

from __future__ import annotations

from tests.mutants.fault import Fault

_TESTS = "tests/runtime/test_streams.py"
_A_STEP = f"{_TESTS}::test_nothing_in_a_step_races"

FAULTS = (
    Fault(
        "compute does not wait for the event of a copy",
        "fxzero/runtime/streams.py",
        "        mine.stream.wait_event(event)",
        "        pass",
        f"{_A_STEP}[all_host-more4-rest4]",
    ),
    Fault(
        "a copy does not begin behind what compute has launched",
        "fxzero/runtime/streams.py",
        "        lane.stream.wait_event(event)",
        "        pass",
        f"{_A_STEP}[states_host-more0-rest0]",
    ),
    Fault(
        "the host's lane begins before compute is there",
        "fxzero/runtime/streams.py",
        "    if lane.stream is None:\n        event.synchronize()",
        "    if lane.stream is None:\n        pass",
        f"{_TESTS}::test_the_hosts_lane_begins_behind_compute",
    ),
    Fault(
        "an update reads gradients that are still on their way",
        "fxzero/runtime/streams.py",
        "    if mine is None or mine.stream is None:\n        event.synchronize()",
        "    if mine is None or mine.stream is None:\n        pass",
        f"{_A_STEP}[states_host-more0-rest0]",
    ),
    Fault(
        "a graph returns while copies read what a script may write to",
        "fxzero/runtime/streams.py",
        "    for copy in computing.open.values():\n        host_waits_for(copy)",
        "    pass",
        f"{_A_STEP}[all_host, device-more5-rest5]",
    ),
    Fault(
        "parameters are sent while what brings them back is running",
        "fxzero/runtime/residents.py",
        "            host_waits_for(done)",
        "            done.result()",
        f"{_A_STEP}[states_host, device-more3-rest3]",
    ),
    Fault(
        "what is sent is changed before it has left",
        "fxzero/runtime/residents.py",
        "            self._leaving.synchronize()",
        "            pass",
        f"{_TESTS}::test_what_is_sent_again_waits_until_what_was_sent_has_left",
    ),
    Fault(
        "what was sent is forgotten, and not compared",
        "fxzero/runtime/residents.py",
        "            kept.copy_(param)\n            if now is not None:\n"
        "                mine.copy_(kept, non_blocking=True)",
        "            if now is not None:\n                mine.copy_(param, non_blocking=True)",
        f"{_TESTS}::test_what_a_script_writes_is_what_the_next_step_begins_with[0-None]",
    ),
    Fault(
        "memory of what is sent for the next step is given away",
        "fxzero/runtime/residents.py",
        "                now.streams.outlives(mine, now.stream)",
        "                pass",
        f"{_TESTS}::test_copies_of_residents_outlive_them",
    ),
    Fault(
        "nobody holds numbers that are on their way to the host",
        "fxzero/runtime/copies.py",
        "    _submitted(Lane.HOST, lambda: wait_for(copy.done), copy.tensors)",
        "    done = copy.done\n    _submitted(Lane.HOST, lambda: wait_for(done), copy.tensors)",
        f"{_TESTS}::test_numbers_of_the_device_that_an_update_reads",
    ),
    Fault(
        "a gradient's memory is given away before its copy has landed",
        "fxzero/runtime/copies.py",
        '    """Wait until the device need no longer hold what was copied from it."""\n'
        "    copy.wait()",
        '    """Wait until the device need no longer hold what was copied from it."""\n'
        "    copy.done.result()\n    copy.sources.clear()",
        f"{_TESTS}::test_memory_is_given_away_behind_the_copy_that_reads_it",
    ),
    Fault(
        "a buffer of the disk is filled again before it was copied to the device",
        "fxzero/runtime/disk_streams.py",
        "        if copied is not None:\n            copied.synchronize()",
        "        if copied is not None:\n            pass",
        f"{_A_STEP}[infinity-more7-rest7]",
    ),
    Fault(
        "what a failed step has launched goes on",
        "fxzero/runtime/lanes.py",
        "    streams.rest()",
        "    pass",
        f"{_TESTS}::test_lanes_rest_with_their_streams",
    ),
    Fault(
        "an update on the host reads the GPU's numbers",
        "passes/updates_on_host.py",
        "            update.replace_input_with(number, part)",
        "            pass",
        "tests/passes/test_offload_on_gpu.py::test_numbers_that_an_update_reads_are_on_the_host",
    ),
    Fault(
        "a copy to a GPU stays on the host",
        "passes/parameter_copies.py",
        "device: torch.device = graph.specs[key].device or param.meta",
        "device: torch.device = param.meta",
        "tests/passes/test_offload_on_gpu.py::test_every_copy_goes_where_it_should[all_host-1-0]",
    ),
)
