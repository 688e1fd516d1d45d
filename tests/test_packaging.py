"""What a wheel holds, and that fxzero is one thing installed, editable, and in a bare checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"fxzero": "fxzero", "passes": "fxzero/passes", "kernels": "fxzero/kernels"}
FOLDERS |= {"conf": "fxzero/conf"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which an earlier build has left a module that is gone since."""
    copy = tmp_path_factory.mktemp("tree") / "checkout"
    copy.mkdir()
    for name in (*FOLDERS, "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for stale in ("build/lib/fxzero/gone.py", "build/lib/fxzero/passes/gone.py"):
        (copy / stale).parent.mkdir(parents=True, exist_ok=True)
        (copy / stale).write_text("raise AssertionError\n")
    sources = "fxzero/__init__.py\nfxzero/gone.py\nconf/train.yaml\n"
    (copy / "fxzero.egg-info").mkdir()
    (copy / "fxzero.egg-info" / "SOURCES.txt").write_text(sources)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """The wheel of it, as pip builds it."""
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return tree / "dist" / built.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_a_wheel_holds_what_the_tree_holds(tree: Path, wheel: Path) -> None:
    """Every module and data file, and nothing of an earlier build."""
    packed = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {
        f"{inside}/{path.relative_to(tree / folder).as_posix()}"
        for folder, inside in FOLDERS.items()
        for path in (tree / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".json", ".html", ".css", ".js")
        or path.name == "py.typed"
    }
    assert packed == expected


def test_every_package_of_the_tree_is_named() -> None:
    """A new folder must be added to pyproject.toml, or the wheel would lack it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join((inside, *path.parent.relative_to(ROOT / folder).parts)).replace("/", ".")
        for folder, inside in FOLDERS.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(settings["packages"]) == found


def test_what_is_installed_names_nothing_that_it_lacks(installed: Path) -> None:
    """No setting of the wheel points at the examples, which stay in the checkout."""
    for path in (installed / "fxzero" / "conf").rglob("*.yaml"):
        assert "examples.models" not in path.read_text(), path


WITHOUT_EDITABLE = """
import importlib.metadata, sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in f"{f!r}{f.__module__}".lower()]
"""
WITHOUT_METADATA = """
importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints(())
"""
SHOW = """
import fxzero, fxzero.passes, fxzero.kernels, fxzero.conf
from fxzero.cost import load_cluster
load_cluster("laptop")
for module in (fxzero, fxzero.passes, fxzero.kernels, fxzero.conf):
    print(module.__file__)
"""
COMPILE = """
import torch
model = torch.compile(torch.nn.Linear(2, 2), backend="fxzero",
                      options={"lower_regions": {"backend": "eager"}})
model(torch.ones(1, 2)).sum().backward()
"""


def files(code: str, folder: Path, *search: Path) -> list[Path]:
    """Where modules come from, for a Python that runs in a folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, search))}
    shown = subprocess.run(
        [sys.executable, "-c", WITHOUT_EDITABLE + code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert shown.returncode == 0, shown.stderr
    return [Path(line) for line in shown.stdout.splitlines()]


def test_an_installed_wheel_is_complete(installed: Path, tmp_path: Path) -> None:
    """Away from every checkout."""
    found = files(SHOW, tmp_path, installed)
    assert found == [
        installed / "fxzero" / name / "__init__.py" for name in ("", "passes", "kernels", "conf")
    ]


@pytest.mark.exhaustive
def test_a_checkout_beside_an_installed_wheel_is_its_own(tree: Path, installed: Path) -> None:
    """Its `fxzero/` comes first, and takes its passes from beside it, not from the wheel."""
    assert files(SHOW, tree, installed) == [tree / name / "__init__.py" for name in FOLDERS]


@pytest.mark.exhaustive
def test_a_checkout_that_was_never_installed_compiles(tree: Path) -> None:
    """Also by the backend's name, which no metadata announces there."""
    found = files(WITHOUT_METADATA + SHOW + COMPILE, tree)
    assert found == [tree / name / "__init__.py" for name in FOLDERS]


@pytest.mark.exhaustive
def test_another_checkouts_editable_install_is_not_mixed_in(tree: Path) -> None:
    """The finder of this environment's own install, if it is one, maps to another folder."""
    code = SHOW.replace("import fxzero,", "import sys; sys.path.insert(0, '.'); import fxzero,", 1)
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=True
    )
    lines = [Path(line).resolve() for line in shown.stdout.splitlines()]
    assert lines == [tree / name / "__init__.py" for name in FOLDERS]


@pytest.mark.exhaustive
def test_hydra_finds_the_compilers_group_in_a_wheel(installed: Path, tmp_path: Path) -> None:
    """An application of one's own, with fxzero's settings in it."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        "defaults: [{fxzero: default}, _self_]\nhydra: {searchpath: [pkg://fxzero.conf]}\nlr: 1\n"
    )
    code = f"""
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from fxzero import Config
with initialize_config_dir({str(tmp_path / "conf")!r}, version_base="1.3"):
    cfg = compose("mine", overrides=["fxzero.prefetch.distance=2"])
assert Config.from_options(OmegaConf.to_container(cfg.fxzero)).prefetch.distance == 2
"""
    assert files(code, tmp_path, installed) == []


MODEL = """
import torch, fxzero
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
plain = [p.detach().clone() for p in model.parameters()]
def moved():
    return all(not torch.equal(a, b) for a, b in zip(plain, model.parameters(), strict=True))
"""
EAGER = 'options={"lower_regions": {"backend": "eager"}}'
EXTRAS = {
    "cli": """
from fxzero.cli import main
import sys
sys.argv = ["fxzero", "estimate", "--params", "1e9"]
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
sys.stdout.flush()
""",
    "deepspeed": f"""
{MODEL}
made = fxzero.from_deepspeed({{
    "train_batch_size": 2, "zero_optimization": {{"stage": 2}},
    "optimizer": {{"type": "AdamW", "params": {{"lr": 0.1}}}},
}}, world_size=1, deepspeed_version="0.19.8")
engine = made.engine(model)
loss = engine(torch.ones(2, 4)).sum()
engine.backward(loss)
engine.step()
assert moved()
""",
    "hf": f"""
{MODEL}
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from fxzero.integrations.transformers import FxZeroPlugin, FxZeroTrainer
model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8,
    num_hidden_layers=1, num_attention_heads=1, tie_word_embeddings=False))
plain = [p.detach().clone() for p in model.parameters()]
rows = [{{"input_ids": torch.arange(8), "labels": torch.arange(8)}}] * 2
args = TrainingArguments("out", max_steps=1, use_cpu=True, report_to=[], save_strategy="no",
    learning_rate=0.1, per_device_train_batch_size=2, disable_tqdm=True)
FxZeroTrainer(model, args, train_dataset=rows, fxzero=FxZeroPlugin(zero=3, {EAGER})).train()
assert moved()
""",
    "accelerate": f"""
{MODEL}
from fxzero.integrations.accelerate import FxZeroAccelerator, FxZeroPlugin
accelerator = FxZeroAccelerator(cpu=True, fxzero=FxZeroPlugin(zero=3, {EAGER}))
prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(prepared(torch.ones(2, 4)).sum())
optimizer.step()
assert moved()
""",
    "lightning": f"""
{MODEL}
import lightning
from fxzero.integrations.lightning import FxZeroStrategy
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch):
        return self.model(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
lightning.Trainer(strategy=FxZeroStrategy(zero=3, {EAGER}), accelerator="cpu", devices=1,
    max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False).fit(Module(), torch.utils.data.DataLoader(torch.ones(2, 4), 2))
assert moved()
""",
}
"""By extra, something that it is for. What else it needs is here: `pip` picks it."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("extra", EXTRAS)
def test_what_an_extra_is_for_runs_from_a_wheel(
    installed: Path, tmp_path: Path, extra: str
) -> None:
    """Away from every checkout; fxzero's own warnings are errors."""
    code = "import sys, contextlib\nwith contextlib.redirect_stdout(sys.stderr):\n"
    own = "import warnings, fxzero\nwarnings.simplefilter('error', fxzero.FxZeroWarning)\n"
    body = "\n".join(f"    {line}" for line in (own + EXTRAS[extra]).splitlines())
    shown = "print(__import__('fxzero').__file__)"
    assert files(f"{code}{body}\n{shown}", tmp_path, installed) == [
        installed / "fxzero" / "__init__.py"
    ]


def test_a_source_distribution_makes_the_same_wheel(
    tree: Path, wheel: Path, tmp_path: Path
) -> None:
    """What it lacked, a wheel that is built of it would lack."""
    code = "from setuptools.build_meta import build_sdist; print(build_sdist('sdist'))"
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    archive = tree / "sdist" / built.stdout.strip().splitlines()[-1]
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('again'))"
    (source,) = tmp_path.iterdir()
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    again = source / "again" / built.stdout.strip().splitlines()[-1]
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()
