"""Weights in blocks of columns: the right ones, few at a time, each gradient in its place."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "every block is gathered of the first columns",
        "passes/shard_params.py",
        "columns = (source, 1, spec.block.start, spec.block.stop)",
        "columns = (source, 1, 0, spec.block.stop - spec.block.start)",
        "verify: step of weights in blocks",
        "is to gather columns",
    ),
    Fault(
        "the shards of all blocks of a gradient are put in one place",
        "passes/shard_grads.py",
        "args = (total, part, 1, block.start)",
        "args = (total, part, 1, 0)",
        "verify: step of weights in blocks",
        "from column 0 on",
    ),
    Fault(
        "of a weight that two read the second one's gradient is kept alone",
        "passes/shard_grads.py",
        "_fxzero.add_block_ if block.start in seen else _fxzero.put_block_",
        "_fxzero.put_block_",
        "verify: step of weights in blocks",
        "put over the columns",
    ),
    Fault(
        "a block is multiplied by the first columns",
        "passes/column_blocks.py",
        "(node, dim, start, stop)",
        "(node, dim, 0, stop - start)",
        "tests/passes/test_tile_linear.py::test_nothing_changes_in_meaning[small-2-operators]",
    ),
    Fault(
        "three blocks of a weight are on the device",
        "fxzero/schedule/inventory.py",
        "zip(gathers, gathers[2:], strict=False)",
        "zip(gathers, gathers[3:], strict=False)",
        "tests/passes/test_tile_linear.py"
        "::test_no_more_than_two_blocks_and_one_gradient[far ahead-loop]",
    ),
    Fault(
        "the full gradients of two blocks are there",
        "fxzero/schedule/problem.py",
        "(*unit.reads, *self.joined_before.get(u, ()))",
        "unit.reads",
        "tests/passes/test_tile_linear.py"
        "::test_no_more_than_two_blocks_and_one_gradient[far ahead-loop]",
    ),
)
