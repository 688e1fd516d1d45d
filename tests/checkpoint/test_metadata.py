"""A ``.metadata`` that is no metadata: read by us, none of it is run."""

from __future__ import annotations

import os
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as of_torch

import fxzero
from fxzero._compat import read_metadata
from fxzero.errors import CheckpointError
from tests.checkpoint.runs import make_run, save_now, unchanged
from tests.checkpoint.test_loading import forged

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def sets_attribute(owner: str, name: str) -> bytes:
    """A pickle that sets an attribute of a class: BUILD with a state for slots."""
    return b"\x80\x04c" + owner.encode() + b"\n(N}\x8c\x04evil\x8c\x03yesstb."


def hostile(marker: Path) -> dict[str, bytes]:
    """Each would leave a marker, or something in this process."""
    code = f"open({str(marker)!r}, 'w')"
    good = of_torch.Metadata({})
    good.planner_data = Calls(os.system, f"touch {marker}")
    deep = of_torch.Metadata({"a": Calls(exec, code)})  # type: ignore[dict-item]
    return {
        "system": pickle.dumps(Calls(os.system, f"touch {marker}")),
        "eval": pickle.dumps(Calls(eval, code)),
        "exec": pickle.dumps(Calls(exec, code)),
        "getattr": pickle.dumps(Calls(getattr, "text", "upper")),
        "getattr of a class": pickle.dumps(Calls(getattr, of_torch.Metadata, "__init__")),
        "no member": pickle.dumps(Calls(getattr, of_torch._MEM_FORMAT_ENCODING, "__subclasses__")),
        "torch.load": pickle.dumps(Calls(torch.load, str(marker))),
        "torch.hub.load": pickle.dumps(Calls(torch.hub.load, "x", "y")),
        "protocol 0": f"cos\nsystem\n(S'touch {marker}'\ntR.".encode(),
        "dotted name": b"\x80\x04\x8c\x05torch\x8c\x08hub.load\x93.",
        "in metadata": pickle.dumps(good),
        "deep in metadata": pickle.dumps(deep),
        "another object": pickle.dumps({"a": 1}),
        "a class": pickle.dumps(of_torch.Metadata),
        "cut short": pickle.dumps(of_torch.Metadata({}))[:-9],
        "no pickle": b"not a pickle",
        "empty": b"",
        "attribute of a class": sets_attribute(
            "torch.distributed.checkpoint.metadata\nMetadata", "evil"
        ),
    }


KINDS = list(hostile(Path("x")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_ours", [True, False])
def test_nothing_in_it_is_run(tmp_path: Path, kind: str, of_ours: bool) -> None:
    """With a manifest that fits, and without any."""
    marker = tmp_path / "marker"
    data = hostile(marker)[kind]
    run = make_run(0)
    if of_ours:
        path = save_now(run, tmp_path / "checkpoints", 1)
        forged(path, metadata=data)
    else:
        path = tmp_path / "theirs"
        dcp.save({"model": run.model.state_dict()}, checkpoint_id=path)
        (path / ".metadata").write_bytes(data)
    other = make_run(1)
    with unchanged(other), pytest.raises(CheckpointError, match=r"\.metadata is no metadata"):
        fxzero.checkpoint.load(other.state, path, leave=["optimizer"])
    assert not marker.exists()
    assert not hasattr(of_torch.Metadata, "evil")


@pytest.fixture(autouse=True)
def _clean() -> Any:
    """What a test has set goes."""
    yield
    if hasattr(of_torch.Metadata, "evil"):
        del of_torch.Metadata.evil


def test_the_markers_are_the_test_of_the_test(tmp_path: Path) -> None:
    """Python's own unpickler does what they say."""
    marker = tmp_path / "marker"
    for kind in ("system", "eval", "exec", "protocol 0", "in metadata", "deep in metadata"):
        data = hostile(marker)[kind]
        pickletools.genops(data)
        pickle.loads(data)
        assert marker.exists(), kind
        marker.unlink()
    pickle.loads(hostile(marker)["attribute of a class"])
    assert hasattr(of_torch.Metadata, "evil")


def test_a_pickle_in_a_file_of_torch_is_not_run(tmp_path: Path) -> None:
    """In the place of a tensor, without a manifest."""
    marker = tmp_path / "marker"
    run = make_run(0)
    path = tmp_path / "theirs"
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    (file,) = path.glob("*.distcp")
    torch.save(Calls(os.system, f"touch {marker}"), file)
    size = file.stat().st_size
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    other = make_run(1)
    with unchanged(other), pytest.raises(CheckpointError, match=str(path)):
        fxzero.checkpoint.load(fxzero.TrainState(other.model), path)
    assert not marker.exists()


def test_a_place_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    """Ours names it in the manifest or not at all."""
    run = make_run(0)
    path = save_now(run, tmp_path / "checkpoints", 1)
    metadata = read_metadata((path / ".metadata").read_bytes())
    (file,) = path.glob("*.distcp")
    (tmp_path / "outside").write_bytes(file.read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../../outside"
    forged(path, metadata=pickle.dumps(metadata))
    other = make_run(1)
    with unchanged(other), pytest.raises(CheckpointError, match="outside"):
        fxzero.checkpoint.load(other.state, path)


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    """Of every dtype, and of objects that are pickled beside tensors."""
    state = {
        str(dtype): torch.zeros(2, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64)
    }
    dcp.save({"model": state, "epoch": 3, "names": ["a"]}, checkpoint_id=tmp_path / "it")
    data = (tmp_path / "it" / ".metadata").read_bytes()
    assert read_metadata(data) == pickle.loads(data)


@pytest.mark.parametrize("protocol", [4, 5])
def test_members_of_enumerations_as_any_python_pickles_them(protocol: int) -> None:
    """As a call of their class, and by Python 3.11.0 to 3.11.3 as an attribute of it."""
    encoding = of_torch._MEM_FORMAT_ENCODING
    for member in encoding:
        for call in (Calls(encoding, member.value), Calls(getattr, encoding, member.name)):
            data = pickle.dumps(of_torch.Metadata({}, planner_data=call), protocol)
            assert read_metadata(data).planner_data is member
