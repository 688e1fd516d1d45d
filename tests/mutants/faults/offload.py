"""What is on the host: copies between the two pools, updates there, and who waits for whom."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "compute reads a parameter of the host, and not its copy",
        "passes/offload_states.py",
        "for reader in readers_of(param):\n                if reader is launch:",
        "for reader in readers_of(param)[1:]:\n                if reader is launch:",
        "verify: step with state on the host",
        "which is in the host's memory",
    ),
    Fault(
        "two gradients arrive at one place",
        "passes/offload_states.py",
        "offsets.append(offset)",
        "offsets.append(0)",
        "verify: step with state on the host",
        "has copied what is still to be read",
    ),
    Fault(
        "a copy's record has the bytes of masters that it casts",
        "passes/offload_states.py",
        "full_bytes=num_elements * dtype.itemsize",
        "full_bytes=num_elements * 4",
        "verify: step with state on the host, in 16 bits",
        "and its record says",
    ),
    Fault(
        "what was copied is taken for another parameter",
        "fxzero/graph/launch.py",
        "stamp.but(params=key)) for i, key in enumerate(keys)]",
        "stamp.but(params=key)) for i, key in enumerate(keys[::-1])]",
        "verify: step with state on the host",
        "is taken for",
    ),
    Fault(
        "an update on the host does not wait for its gradient",
        "passes/offload_states.py",
        "update.update_arg(1, parts)",
        "update.update_arg(1, grads)",
        "tests/passes/test_offload_states.py"
        "::test_a_gradient_goes_down_and_is_what_the_host_updates_by[one process]",
    ),
    Fault(
        "an update on the host is joined by nobody",
        "passes/offload_states.py",
        "graph.call(copies.join_updates, (found,),",
        "graph.call(copies.join_updates, (found[1:],),",
        "verify: step with state on the host, a bucket a layer",
        "is joined 0 times",
    ),
    Fault(
        "a parameter that is updated on the host does not live there",
        "passes/offload_states.py",
        "return [*params_of(update), *(node for part in state for node in part)]",
        "return [node for part in state for node in part]",
        "tests/passes/test_offload_states.py::test_what_lives_on_the_host",
    ),
    Fault(
        "the next step's copy starts before the last reader of this one's",
        "passes/join_copies.py",
        "after = max(update, *(end_of_run(reader) for reader in readers(*copy.parts)))",
        "after = update",
        "verify: step with state on the host, of one process",
        "has begun to copy over",
    ),
    Fault(
        "any number of gradients is on its way to the host",
        "passes/join_copies.py",
        "later = [copy.launch for copy in downloads[IN_FLIGHT:]]",
        "later = [copy.launch for copy in downloads[len(downloads) :]]",
        "tests/passes/test_join_copies.py"
        "::test_two_copies_from_the_device_are_on_their_way_at_most",
    ),
    Fault(
        "a run of compute is taken apart by the wait for a copy",
        "passes/join_copies.py",
        "min(begin.get(user, user) for part",
        "min(user for part",
        "tests/passes/test_join_copies.py::test_a_run_that_reads_a_copy_in_its_middle_stays_whole",
    ),
    Fault(
        "the host's lane does not wait for what arrives",
        "fxzero/runtime/copies.py",
        "_submitted(Lane.HOST, copy.done.result, copy.tensors)",
        "_submitted(Lane.HOST, copy.done.done, copy.tensors)",
        "tests/runtime/test_lanes.py::test_the_hosts_lane_waits_for_what_arrives",
    ),
    Fault(
        "landing does not wait for the copy",
        "fxzero/runtime/copies.py",
        '"""Wait until all is there, and let go of what it was copied from."""\n'
        "        self.done.result()",
        '"""Wait until all is there, and let go of what it was copied from."""\n'
        "        self.done.done()",
        "tests/runtime/test_lanes.py"
        "::test_landing_waits_for_the_copy_and_lets_go_of_what_was_copied",
    ),
    Fault(
        "an error of an update on the host is lost",
        "fxzero/runtime/copies.py",
        "    for update in updates:\n        update.result()",
        "    for update in updates:\n        update.exception()",
        "tests/runtime/test_lanes.py::test_a_join_waits_for_all_updates_and_tells_of_errors",
    ),
    Fault(
        "a lane computes on one core",
        "fxzero/runtime/lanes.py",
        "if torch.get_num_threads() != num_threads:",
        "if num_threads == 0:",
        "tests/runtime/test_lanes.py::test_a_lane_uses_as_many_cores_as_who_asked",
    ),
    Fault(
        "a copy that is no more what the parameter is, is taken",
        "fxzero/runtime/residents.py",
        "if not is_same(mine, now):",
        "if mine.numel() != now.numel():",
        "tests/runtime/test_residents.py::test_parameters_that_change_between_two_steps"
        "[through_data-1-None]",
    ),
    Fault(
        "copies are compared by their values and not by their bits",
        "fxzero/runtime/residents.py",
        "if not is_same(mine, now):",
        "if not torch.equal(mine, now):",
        "tests/runtime/test_residents.py::test_bits_are_compared",
    ),
    Fault(
        "parameters are copied while they are updated",
        "fxzero/runtime/residents.py",
        "            update.result()\n",
        "            update.done()\n",
        "tests/runtime/test_residents.py::test_it_is_copied_when_the_update_is_over",
    ),
    Fault(
        "every tensor's home is the same",
        "fxzero/runtime/arena.py",
        "begin = offsets[home]",
        "begin = 0",
        "tests/runtime/test_arena.py::test_every_tensor_has_a_place_of_its_own",
    ),
    Fault(
        "a tensor comes home without its values",
        "fxzero/runtime/arena.py",
        "        own.copy_(tensor)\n        tensor.data = own",
        "        tensor.data = own",
        "tests/runtime/test_arena.py::test_a_tensor_that_comes_home_is_the_same",
    ),
    Fault(
        "what an arena has no room for is forgotten where it grows",
        "fxzero/runtime/arena.py",
        "HostArena({**known, **homes}, most)",
        "HostArena(homes, most)",
        "tests/runtime/test_arena.py::test_one_that_has_none_is_replaced",
    ),
    Fault(
        "every tensor of the arena is saved with all of it",
        "fxzero/runtime/arena.py",
        "self._tensors[home] = tensor.set_(own.untyped_storage(), 0, layout.shape, layout.stride)",
        "self._tensors[home] = layout.at(self.memory, begin)",
        "tests/runtime/test_arena.py::test_a_tensor_of_it_is_saved_without_the_rest",
    ),
    Fault(
        "a tensor that was given other memory stays there",
        "fxzero/step/binding.py",
        "away = [(i, home) for i, home in self.homes if not arena.bring_home(home, values[i])]",
        "away: list[tuple[int, Home]] = []",
        "tests/runtime/test_residents.py::test_parameters_that_change_between_two_steps"
        "[by_other_memory-1-None]",
    ),
    Fault(
        "compute stands still for what another lane waits for",
        "fxzero/schedule/engine.py",
        "issued_us = host_us if task.by_event else ready",
        "issued_us = ready",
        "tests/schedule/test_lanes_in_time.py::test_a_task_by_event_does_not_hold_up_compute",
    ),
    Fault(
        "what the host holds counts for the device",
        "fxzero/schedule/storage.py",
        "pool = stamp_of(node).pool",
        "pool = Pool.DEVICE",
        "tests/schedule/test_lanes_in_time.py::test_optimizer_state_leaves_the_device",
    ),
    Fault(
        "a parameter is copied once for all that read it",
        "passes/offload_params.py",
        "segment = stamp_of(reader).segment",
        "segment = stamp_of(part).segment",
        "tests/passes/test_offload_params.py"
        "::test_a_copy_is_read_in_its_own_segment_alone[{'zero': 0, 'world_size': 1}]",
    ),
    Fault(
        "a copy for a gather that does not happen is made",
        "passes/join_copies.py",
        "if any(part.users for part in copy.parts):",
        "if copy.parts:",
        "tests/passes/test_offload_params.py::test_a_gather_that_does_not_happen_has_no_copy",
    ),
    Fault(
        "one copy more than asked for is in flight",
        "passes/join_copies.py",
        "zip(ordered, ordered[in_flight:], strict=False)",
        "zip(ordered, ordered[in_flight + 1 :], strict=False)",
        "tests/passes/test_offload_params.py::test_a_layer_at_a_time",
    ),
    Fault(
        "a copy starts in any micro-step before its own",
        "passes/join_copies.py",
        "bounds = (timeline.running_at(until_us), earliest.get(copy.stamp.segment))",
        "bounds = (timeline.running_at(until_us),)",
        "tests/passes/test_offload_activations.py"
        "::test_a_copy_starts_no_earlier_than_the_phase_before_its_own",
    ),
    Fault(
        "a value's place on the host is another's before backward has read it",
        "passes/offload_activations.py",
        "held.append((offset, offset + size, saved.first_read))",
        "held.append((offset, offset + size, saved.last_read))",
        "tests/passes/test_offload_activations.py"
        "::test_two_values_that_are_there_together_are_not_in_one_place",
    ),
    Fault(
        "a value goes that has the time to get down and not up again",
        "passes/offload_activations.py",
        "until_us -= timeline.copy_us(record_of(saved.node, Lane.H2D))",
        "until_us -= 0.0",
        "tests/passes/test_offload_activations.py::test_time_is_for_both_ways",
    ),
    Fault(
        "backward reads a value that went to the host, and not what came back",
        "passes/offload_activations.py",
        "for reader, view in saved.readers:\n",
        "for reader, view in saved.readers[1:]:\n",
        "tests/passes/test_offload_activations.py::test_backward_reads_what_has_come_back",
    ),
    Fault(
        "a view that nobody reads keeps the memory of what has gone",
        "passes/offload_activations.py",
        "while view is not node and not view.users:",
        "while view is node and not view.users:",
        "tests/passes/test_offload_activations.py::test_a_view_that_only_backward_read_is_gone",
    ),
    Fault(
        "a value is on the device until it comes back",
        "passes/join_copies.py",
        "            end = min(end, there)",
        "            end = max(end, there)",
        "tests/passes/test_offload_activations.py"
        "::test_a_value_is_let_go_of_when_its_copy_should_be_there",
    ),
    Fault(
        "what begins at a border of the timeline does not run there",
        "fxzero/schedule/copy_times.py",
        "place = bisect_right(self._starts, us)",
        "place = bisect_left(self._starts, us)",
        "tests/passes/test_offload_activations.py"
        "::test_what_runs_at_some_time_and_what_is_next[10.0-relu-relu]",
    ),
)
