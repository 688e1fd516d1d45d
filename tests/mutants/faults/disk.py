"""What is on disk: files, pieces on their way, and what somebody else writes to them."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STREAMS = "tests/runtime/test_disk_streams.py"
_STORE = "tests/disk/test_store.py"

FAULTS = (
    Fault(
        "an update on disk is read, and not written",
        "passes/join_copies.py",
        "update.args = (params, grads, state, *others, arrived)",
        "update.args = (params, grads, state, *others)",
        "verify: step with state on disk",
        "is not read",
    ),
    Fault(
        "something runs between a read and its update",
        "passes/join_copies.py",
        "with graph.graph.inserting_before(update), graph.made_for(update):\n        states",
        "with graph.graph.inserting_before(update.prev), graph.made_for(update):\n        states",
        "verify: step with state on disk",
        "something stands between",
    ),
    Fault(
        "a gradient arrives where another one is still to be used",
        "passes/gradient_places.py",
        "copy.launch.update_arg(5, [updates[i] for i in behind])",
        "copy.launch.update_arg(5, [])",
        "verify: step with state on disk, a bucket a layer",
        "has copied what is still to be read",
    ),
    Fault(
        "half of a place is forgotten when it is taken",
        "passes/gradient_places.py",
        "left += [(max(a, end), b, i) for a, b, i in held]",
        "left += []",
        "tests/passes/test_gradient_places.py::test_nothing_is_copied_over_before_it_was_used",
    ),
    Fault(
        "what is brought is another parameter's",
        "fxzero/runtime/disk_streams.py",
        "self.wanted = tuple(bucket.keys.index(key) for key in keys)",
        "self.wanted = tuple(bucket.keys.index(key) for key in reversed(keys))",
        f"{_STREAMS}::test_what_is_on_disk_is_read_from_disk",
    ),
    Fault(
        "an update takes its gradient's beginning for every piece",
        "fxzero/runtime/disk_streams.py",
        "flat_grads[s.tensor][s.begin // size : s.end // size]",
        "flat_grads[s.tensor][: (s.end - s.begin) // size]",
        f"{_STREAMS}::test_what_users_write_is_what_the_next_step_begins_with",
    ),
    Fault(
        "a failed write ends what comes behind it",
        "fxzero/runtime/disk_streams.py",
        "self.place.store.failures.append(error)",
        "raise",
        f"{_STREAMS}::test_writes_that_fail_lose_nothing",
    ),
    Fault(
        "a write that failed is forgotten",
        "fxzero/disk/store.py",
        "self.memory[piece.begin : piece.begin + piece.num_bytes] = buffer",
        "pass",
        f"{_STORE}::test_a_write_that_fails_loses_nothing",
    ),
    Fault(
        "nobody waits for writes to tell of errors",
        "fxzero/step/train_step.py",
        "if arena is not None and arena.store.failures:",
        "if False:",
        f"{_STREAMS}::test_writes_that_fail_lose_nothing",
    ),
    Fault(
        "buffers of a step that failed are not given back",
        "fxzero/runtime/disk_streams.py",
        "            for buffer in list(self._held):\n                self._give(buffer)",
        "            pass",
        f"{_STREAMS}::test_a_changed_bit",
    ),
    Fault(
        "what is read is not compared with what was written",
        "fxzero/disk/store.py",
        "if wanted is not None and zlib.crc32(buffer) != wanted:",
        "if False:",
        f"{_STORE}::test_a_bit_that_has_changed",
    ),
    Fault(
        "a change gives what is around it a new checksum unseen",
        "fxzero/disk/store.py",
        "                self.read(piece, self._buffer)\n                for page",
        "                self._buffer[: piece.num_bytes] = self._mapped_bytes(piece)\n"
        "                for page",
        f"{_STORE}::test_a_change_beside_a_bit_that_has_changed",
    ),
    Fault(
        "what a checkpoint writes over has to be right",
        "fxzero/disk/store.py",
        "or (is_whole and number in self._expected):",
        "or False:",
        f"{_STREAMS}::test_a_checkpoint_is_loaded_over_what_has_changed",
    ),
    Fault(
        "what is loaded in part makes the rest right",
        "fxzero/disk/store.py",
        "is_whole = (last - first) * _PAGE == piece.num_bytes",
        "is_whole = True",
        f"{_STREAMS}::test_a_part_that_is_written_over_does_not_make_the_rest_right",
    ),
    Fault(
        "files of buckets that are no more stay open",
        "fxzero/runtime/disk_arena.py",
        "bucket.place = None",
        "pass",
        f"{_STREAMS}::test_files_of_buckets_that_are_no_more_are_closed",
    ),
    Fault(
        "what somebody has written between two steps is not looked for",
        "fxzero/step/disk_binding.py",
        "arena.store.write_changes()",
        "pass",
        f"{_STREAMS}::test_what_users_write_is_what_the_next_step_begins_with",
    ),
    Fault(
        "the mapping goes on showing what somebody wrote before a step",
        "fxzero/disk/store.py",
        "            self.write(piece, self._buffer)\n            self._forget(piece)\n"
        "        self._expected",
        "            self.write(piece, self._buffer)\n        self._expected",
        f"{_STORE}::test_what_somebody_writes_is_found_and_goes_to_disk[1]",
    ),
    Fault(
        "a state dict is made of what nobody has checked",
        "fxzero/step/train_step.py",
        "check_saves(self.model, self.optimizer)",
        "pass",
        f"{_STREAMS}::test_a_changed_bit",
    ),
    Fault(
        "a file keeps its name",
        "fxzero/disk/scratch.py",
        "_remove_leftovers(folder)\n            self.fd",
        "self.fd",
        "tests/disk/test_scratch.py::test_a_killed_process_leaves_nothing[named]",
    ),
    Fault(
        "what is read past the page cache is not compared with its hash",
        "fxzero/checkpoint/blocks.py",
        "or not self.record.is_block(number, *into):",
        "or (data is None and not self.record.is_block(number, *into)):",
        "tests/checkpoint/test_blocks.py::test_what_was_changed_never_comes_to_memory",
    ),
    Fault(
        "what was read of a broken checkpoint stays beside the one before",
        "fxzero/checkpoint/loading.py",
        "error = None  # it holds this frame",
        "said = []  # it holds this frame",
        "tests/checkpoint/test_loading.py::test_what_was_read_of_one_that_is_broken_is_let_go",
    ),
    Fault(
        "who touches memory ahead takes what was written to it",
        "fxzero/checkpoint/large_pages.py",
        "madvise(address, length, _MADV_POPULATE_WRITE)",
        "madvise(address, length, 4)",
        "tests/checkpoint/test_large_pages.py::test_who_fills_and_who_touches_do_not_meet",
    ),
)
