"""The tables that come with fxzero."""

from __future__ import annotations

from importlib import resources

import pytest

from fxzero.cost.kernel_table import read_table, table_for
from fxzero.kernels.patterns import KERNELS
from fxzero.passes.lower_kernels import UPDATE

FILES = [*(resources.files("fxzero.kernels") / "tables").iterdir()]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_a_table_is_found_by_the_name_of_its_device(file: object) -> None:
    table = read_table(str(file))
    assert table_for(table.device) == table
    own = {
        *KERNELS,
        UPDATE,
        "add_rms_norm",
    }  # the last is for whoever calls it: no pattern finds it
    assert {row.kernel for row in table.rows} <= own
    assert all(row.kernel_us > 0 and row.compiler_us > 0 for row in table.rows)


def test_a_device_that_nobody_has_measured_has_none() -> None:
    assert table_for("some other device") is None
