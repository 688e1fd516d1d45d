"""A hundred wrong Hydra overrides of `examples/train.py`: each is a sentence, and exit code 2.

They are composed and checked here as rank 0 does before any rank trains; a sample of them goes
through torchrun.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from examples import failures, train
from examples.models import GPTConfig
from examples.settings import Settings
from fxzero import Config
from tests.tiers import exhaustive

ROOT = Path(__file__).resolve().parents[1]
SMALL = "data.max_bytes=200000"


@pytest.fixture(autouse=True, scope="module")
def _hydra() -> Iterator[None]:
    with initialize_config_module("examples.conf", version_base="1.3"):
        yield


def composed(*overrides: str) -> Settings:
    """What rank 0 of two would train by."""
    settings = Settings.of(compose("train", overrides=list(overrides)))
    train.check(settings, 2)
    return settings


WRONG: list[tuple[str, str]] = [
    # names
    ("fxzero.prefech.distance=2", "fxzero has no setting 'prefech': did you mean 'prefetch'?"),
    ("fxzero.prefetch.distanse=2", "fxzero.prefetch has no setting 'distanse': did you mean"),
    ("fxzero.strickt=true", "did you mean 'strict'?"),
    ("fxzero.bucket.cap_byte=1", "did you mean 'cap_bytes'?"),
    ("fxzero.lower_region.backend=eager", "did you mean 'lower_regions'?"),
    ("fxzero.prefetch.distance.x=2", "fxzero.prefetch.distance"),
    ("+fxzero.prefech.distance=2", "fxzero has no setting 'prefech': did you mean 'prefetch'?"),
    ("+fxzero.bucket.cap=2", "fxzero.bucket has no setting 'cap': did you mean 'cap_bytes'?"),
    ("++fxzero.debug=true", "fxzero has no setting 'debug'"),
    ("model.num_layer=6", "model has no setting 'num_layer': did you mean 'num_layers'?"),
    ("model.layers=6", "model has no setting 'layers'"),
    ("+model.num_layer=6", "unexpected keyword argument 'num_layer'"),
    ("optimizer.learning_rate=1", "optimizer has no setting 'learning_rate'"),
    ("+optimizer.learning_rate=1", "unexpected keyword argument 'learning_rate'"),
    ("trainer.batchsize=8", "did you mean 'batch_size'?"),
    ("trainer.step_s=8", "trainer has no setting 'step_s': did you mean"),
    ("+trainer.epochs=3", "Key 'epochs' not in 'TrainerSettings'"),
    ("data.file=x.txt", "data has no setting 'file'"),
    ("precision.dtype=float16", "precision has no setting 'dtype'"),
    ("zeros=3", "there is no setting 'zeros': did you mean 'zero'?"),
    ("stage=3", "there is no setting 'stage'"),
    ("+stage=3", "Key 'stage' not in 'Settings'"),
    ("optimiser=sgd", "did you mean 'optimizer'?"),
    ("modle=gpt_lite", "did you mean 'model'?"),
    ("trainer.seed.x=1", "trainer.seed"),
    # groups
    ("model=gpt_nanno", "model=gpt_nanno: did you mean 'gpt_nano'? Known: gpt_bench"),
    ("model=mistral", "model=mistral: Known: gpt_bench, gpt_lite, gpt_nano, gpt_tiny"),
    ("optimizer=adam", "optimizer=adam: did you mean 'adamw'?"),
    ("precision=fp8", "precision=fp8: did you mean"),
    ("precision=bfloat16", "Known: bf16, fp16, fp32"),
    ("data=shakespeare", "Known: stdlib, text"),
    ("trainer=fast", "Known: default"),
    ("fxzero=eager", "Known: default"),
    ("model=3", "A group is chosen by a name"),
    ("model=null", "A group is chosen by a name"),
    ("trainer=null", "A group is chosen by a name"),
    ("~optimizer", "optimizer"),
    ("~trainer.steps", "trainer.steps"),
    ("~zero", "zero"),
    ("~data", "data"),
    # grammar
    ("trainer.steps", "'trainer.steps'"),
    ("trainer.steps==3", "'trainer.steps==3'"),
    ("trainer.steps=[1", "'trainer.steps=[1' is no setting=value"),
    ("a b=3", "a b=3"),
    ("zero=3 model=gpt_lite", "'zero=3 model=gpt_lite'"),
    ("trainer.steps=${nope}", "Interpolation key 'nope' not found"),
    ("trainer.steps=${oc.env:FXZERO_NOPE}", "FXZERO_NOPE"),
    ("--zero=3", "--zero"),
    # types
    ("zero=three", "zero: Value 'three'"),
    ("zero=1.5", "zero: Value '1.5'"),
    ("zero=true", "zero: Value 'True'"),
    ("zero=null", "zero"),
    ("zero=[0,1]", "zero"),
    ("trainer.steps=ten", "trainer.steps: Value 'ten'"),
    ("trainer.steps=1e3", "trainer.steps: Value '1000.0'"),
    ("trainer.steps=null", "trainer.steps"),
    ("trainer.compile=maybe", "trainer.compile: Value 'maybe'"),
    ("trainer.compile=2", "trainer.compile"),
    ("trainer.wandb=perhaps", "trainer.wandb: Value 'perhaps'"),
    ("ranks=two", "ranks: Value 'two'"),
    ("ranks=0", "ranks=0 must be 1 or more, or null"),
    ("trainer.step=lazy", "trainer.step: Invalid value 'lazy', expected one of [compiled, eager]"),
    ("trainer.clip_grad_norm=big", "trainer.clip_grad_norm: Value 'big'"),
    ("trainer.min_lr_ratio=low", "trainer.min_lr_ratio: Value 'low'"),
    ("data.max_bytes=8MB", "data.max_bytes: Value '8MB'"),
    ("data.val_fraction=10%", "data.val_fraction: Value '10%'"),
    ("precision.param_dtype=int8", "precision.param_dtype: Invalid value 'int8'"),
    ("precision.reduce_dtype=torch.float32", "expected one of [float32, bfloat16, float16]"),
    ("fxzero.strict=yes", "fxzero.strict='yes' must be true or false"),
    ("fxzero.strict=1", "fxzero.strict=1 must be true or false"),
    ("fxzero.prefetch.distance=two", "fxzero.prefetch.distance='two' must be a whole number"),
    ("fxzero.prefetch.distance=1.0", "fxzero.prefetch.distance=1.0 must be a whole number"),
    ("fxzero.prefetch=3", "fxzero.prefetch"),
    ("fxzero.bucket=null", "fxzero.bucket takes a mapping of settings, not None"),
    ("fxzero.lower_kernels.force=[swiglu]", "must be text"),
    ("fxzero.lower_regions.backend=inductr", "did you mean 'inductor'?"),
    ("fxzero.cost.cluster=dgx", "cost.cluster='dgx'"),
    ("fxzero.cost.cluster=7", "fxzero.cost.cluster=7 must be text"),
    ("fxzero=[]", "fxzero"),
    # ranges
    ("zero=4", "zero=4: ZeRO has the stages 0, 1, 2 and 3"),
    ("zero=-1", "zero=-1: ZeRO has the stages"),
    ("trainer.steps=-1", "trainer.steps=-1 must be 0 or more"),
    ("trainer.batch_size=0", "trainer.batch_size=0 must be 1 or more"),
    ("trainer.batch_size=15", "trainer.batch_size=15 rows cannot be shared evenly by 2 ranks"),
    ("mesh=pipeline3", "Known: flat, pipeline2, pipeline4, replicate2"),
    ("mesh=pipeline4", "need a multiple of 4 ranks, and there are 2"),
    ("mesh.pipeline=0", "mesh.pipeline=0 must be 1 or more"),
    ("schedule=1f1b", "and mesh.pipeline=1: add mesh=pipeline2"),
    ("trainer.micro_batches=0", "trainer.micro_batches=0 must be 1 or more"),
    ("trainer.micro_batches=3", "trainer.micro_batches=3 does not divide the 8 rows of each rank"),
    ("trainer.warmup_steps=-5", "must be 0 or more"),
    ("trainer.log_every=0", "trainer.log_every=0 must be 1 or more"),
    ("trainer.val_every=0", "must be 1 or more"),
    ("trainer.seed=-1", "trainer.seed=-1 must be 0 or more"),
    ("trainer.seed=99999999999999999999", "trainer.seed=99999999999999999999"),
    ("trainer.threads=0", "trainer.threads=0 must be from 1 to 4096"),
    ("trainer.min_lr_ratio=2", "must be from 0 to 1"),
    ("trainer.min_lr_ratio=nan", "must be from 0 to 1"),
    ("trainer.clip_grad_norm=0", "trainer.clip_grad_norm=0.0 must be positive"),
    ("trainer.clip_grad_norm=inf", "trainer.clip_grad_norm=inf must be positive"),
    ("trainer.compile=false", "trainer.compile=false wants trainer.step=eager"),
    ("data.val_fraction=1", "lies between 0 and 1"),
    ("data.max_bytes=0", "data.max_bytes=0 must be 1 or more"),
    ("data.max_bytes=100", "a row needs block_size + 1 = 129 bytes"),
    ("data=text", "has missing mandatory value: path"),
    ("data.path=nowhere.txt", "data.path=nowhere.txt: no such file"),
    ("data.path=tests", "data.path=tests: no such file"),
    ("model.hidden=130", "hidden=130 cannot be split among num_heads=4"),
    ("model.num_layers=0", "num_layers=0 must be a whole number"),
    ("model.num_layers=2.5", "num_layers=2.5 must be a whole number"),
    ("model.num_layers=many", "num_layers='many' must be a whole number"),
    ("model.dropout=1.5", "dropout=1.5 must be a number from 0 to below 1"),
    ("model.bias=no_thanks", "bias='no_thanks' must be true or false"),
    ("model.vocab_size=100", "model.vocab_size=100: the text is read as bytes"),
    ("model._target_=examples.models.gpt_nanno", "model: "),
    ("model._target_=torch.nn.Identity", "made a Identity; this trains a GPT"),
    ("model._target_=null", "model._target_ must name what makes it"),
    ("optimizer._target_=torch.optim.Adamm", "optimizer: "),
    ("optimizer.lr=-1", "optimizer: ValueError: Invalid learning rate: -1"),
    ("optimizer.lr=fast", "optimizer: "),
    ("optimizer.lr=nan", "optimizer.lr=nan must be a finite number"),
    ("optimizer.lr=inf", "optimizer.lr=inf must be a finite number"),
    ("optimizer.betas=[0.9]", "optimizer.betas=[0.9] must be two numbers"),
    ("optimizer.betas=[0.9,1.5]", "Invalid beta parameter at index 1: 1.5"),
    ("optimizer.weight_decay=-1", "Invalid weight_decay value: -1"),
    ("fxzero.prefetch.distance=-1", "prefetch.distance=-1 must be 0 or more"),
    ("fxzero.bucket.cap_bytes=0", "bucket.cap_bytes=0 must be positive"),
    ("fxzero.recompute.max_nodes=-1", "recompute.max_nodes=-1 must be 0 or more"),
    ("fxzero.lower_kernels.force=swiglo", "did you mean 'swiglu'?"),
    ("fxzero.lower_kernels.table=nowhere.json", "lower_kernels.table='nowhere.json' cannot be"),
]


def test_there_are_a_hundred() -> None:
    """All of them different."""
    assert len({override for override, _ in WRONG}) >= 100


@pytest.mark.parametrize(("override", "message"), WRONG, ids=lambda value: value[:50])
def test_wrong_overrides(override: str, message: str) -> None:
    """A sentence that names the setting and the way out, before anything trains."""
    small = () if override.startswith(("data", "~data")) else (SMALL,)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of Hydra's, OmegaConf's or ours
        composed(*small, override)
    said = failures.sentence(caught.value)
    assert message in said
    assert "Traceback" not in said
    assert "hydra.cc" not in said
    assert said.count("\n") <= 1
    assert failures.exit_code(caught.value) == failures.WRONG_USE


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("fxzero.strict=true", "trainer.compile=false", "trainer.step=eager"), "have no effect"),
        (("precision=fp16", "trainer.step=eager"), "precision=fp16 scales the loss"),
        (("fxzero.bucket.cap_bytes=1", "fxzero.bucket.min_bytes=2"), "no bucket can be both"),
        (("optimizer=sgd", "optimizer.betas=[1,2]"), "optimizer has no setting 'betas'"),
        (("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"), "Nesterov"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other(overrides: Sequence[str], message: str) -> None:
    """Two good ones can be wrong together."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        composed(SMALL, *overrides)
    assert message in failures.sentence(caught.value)
    assert failures.exit_code(caught.value) == failures.WRONG_USE


@pytest.mark.parametrize("name", ["gpt_nano", "gpt_lite", "gpt_bench", "gpt_tiny"])
def test_every_field_of_a_model_can_be_set(name: str) -> None:
    """Without a plus: its file has all of them."""
    settings = composed(SMALL, f"model={name}", "model.vocab_size=257", "model.num_layers=5")
    assert set(settings.model) == {"_target_", *GPTConfig.__dataclass_fields__}
    assert settings.model["num_layers"] == 5


def test_the_compilers_settings_need_no_plus() -> None:
    """They are Hydra's group `fxzero`, and by default what no options are."""
    assert composed(SMALL).compiler() == Config()
    changed = composed(SMALL, "fxzero.prefetch.distance=2", "fxzero.lower_regions.backend=eager")
    options = {"prefetch": {"distance": 2}, "lower_regions": {"backend": "eager"}}
    assert changed.compiler() == Config.from_options(options)


def test_what_nobody_foresaw_keeps_its_traceback() -> None:
    """A sentence would hide where it came from."""
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    said = failures.sentence(caught.value)
    assert failures.exit_code(caught.value) == failures.FAILED
    assert said.startswith("Traceback")
    assert "test_wrong_overrides.py" in said


def run(*command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the trainer, as a shell does."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.path=nowhere.txt", "data.path=nowhere.txt: no such file"),
        ("fxzero.prefech.distance=2", "did you mean 'prefetch'?"),
        ("--nope", "Hydra knows no such option: --hydra-help"),
    ],
)
def test_under_torchrun_the_sentence_stands_last_and_once(override: str, message: str) -> None:
    """In torchrun's own table, which has one failure, that of rank 0."""
    result = run(*TORCHRUN, "examples/train.py", override)
    assert result.returncode != 0
    output = result.stdout + result.stderr
    assert output.count(message) == 1
    *_, last, line = result.stderr.strip().splitlines()
    assert message in last
    assert set(line) == {"="}
    # On a busy machine torchrun may end rank 1 before it has ended by itself.
    ended = re.findall(r"rank      : 1 .*\n *exitcode  : (-?\d+)", output)
    assert set(ended) <= {"-15"}, output
    assert "Traceback" not in result.stdout
    # What comes before torchrun's own log, table and traceback (some 35 lines, by its version)
    # and before the banner about OMP_NUM_THREADS is ours.
    ours = [line for line in output.splitlines() if not line.startswith(("*", "Setting OMP"))]
    ends = [number for number, line in enumerate(ours) if "torch/distributed/elastic" in line]
    assert ends[0] < 15, output


@pytest.mark.slow
def test_alone_there_is_nothing_but_the_sentence(tmp_path: Path) -> None:
    """And exit code 2."""
    folder = f"hydra.run.dir={tmp_path}"
    result = run("examples/train.py", folder, "model.num_layer=2")
    assert result.returncode == 2
    assert result.stderr == (
        "model.num_layer: model has no setting 'num_layer': did you mean 'num_layers'? Known: "
        "_target_, bias, block_size, dropout, hidden, num_heads, num_layers, vocab_size\n"
    )


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("option", ["--cfg=job", "--help"])
def test_every_setting_is_shown(option: str) -> None:
    """And the exit code is 0."""
    shown = run("examples/train.py", option)
    assert shown.returncode == 0, shown.stderr
    for name in ("min_logits_bytes", "num_layers", "weight_decay", "sample_length"):
        assert f"{name}:" in shown.stdout


def test_a_config_that_there_is_not() -> None:
    """Hydra's own options can be wrong too."""
    with pytest.raises(Exception, match="nope") as caught:
        compose("nope")
    said = failures.sentence(caught.value)
    assert "nope" in said
    assert "provider=" not in said
    assert failures.exit_code(caught.value) == failures.WRONG_USE


@pytest.mark.slow
@pytest.mark.parametrize("regions", ["eager", *exhaustive("inductor")])
def test_a_tiny_run(tmp_path: Path, regions: str) -> None:
    """It says what it compiles, trains, samples from a whole copy, and leaves its settings."""
    result = run(
        *(*TORCHRUN, "examples/train.py", f"hydra.run.dir={tmp_path}", SMALL, "trainer.steps=2"),
        *("model=gpt_tiny", "model.num_layers=2", "model.hidden=16", "trainer.val_batches=1"),
        *("trainer.sample_length=5", "trainer.micro_batches=2", "model.vocab_size=256"),
        f"fxzero.lower_regions.backend={regions}",
    )
    assert result.returncode == 0, result.stderr
    compiled = ["regions in"] if regions == "inductor" else []
    for said in ("compiling the step", *compiled, "the first step is done", "final loss: train"):
        assert said in result.stdout
    kept = OmegaConf.load(tmp_path / "config.yaml")
    assert kept.fxzero.prefetch.keep is True
    assert (tmp_path / "sample.txt").stat().st_size >= 5
