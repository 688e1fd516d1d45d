"""Ninety wrong command lines: each ends with exit code 2 and a sentence that names the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_cli import assert_sentence, call

NET = "tests.targets:tensor_input"
BATCHED = "tests.targets:dict_batches"
STEP = (BATCHED, "--step")


def options(text: str) -> tuple[str, ...]:
    """A good target with these settings."""
    return (NET, "--options", text)


NO_ANSWER: list[tuple[tuple[str, ...], str]] = [
    # no such option, or no value
    ((), "Missing argument"),
    ((NET, "extra"), "unexpected extra argument"),
    ((NET, "--nope"), "No such option: --nope"),
    ((NET, "--world", "4"), "No such option: --world"),
    ((NET, "--world-size"), "requires an argument"),
    ((NET, "--zero"), "requires an argument"),
    ((NET, "--zero", "4"), "Invalid value for '--zero'"),
    ((NET, "--zero", "-1"), "Invalid value for '--zero'"),
    ((NET, "--zero", "three"), "Invalid value for '--zero'"),
    ((NET, "--zero", "1.5"), "Invalid value for '--zero'"),
    ((NET, "--zero", ""), "Invalid value for '--zero'"),
    ((NET, "--world-size", "0"), "Invalid value for '--world-size'"),
    ((NET, "--world-size", "-8"), "Invalid value for '--world-size'"),
    ((NET, "--world-size", "1e3"), "Invalid value for '--world-size'"),
    ((NET, "--world-size", "99999999999999999999"), "Invalid value for '--world-size'"),
    ((NET, "--rank", "-1"), "Invalid value for '--rank'"),
    ((NET, "--rank", "8"), "rank 8 is not in a world of 8 ranks"),
    ((NET, "--rank", "2", "--world-size", "2"), "rank 2 is not in a world of 2 ranks"),
    ((BATCHED, "--batch-size", "0"), "Invalid value for '--batch-size'"),
    ((BATCHED, "--batch-size", "two"), "Invalid value for '--batch-size'"),
    ((NET, "--param-dtype", "fp16"), "Invalid value for '--param-dtype'"),
    ((NET, "--param-dtype", "int8"), "Invalid value for '--param-dtype'"),
    ((NET, "--param-dtype", "FLOAT16"), "Invalid value for '--param-dtype'"),
    ((NET, "--reduce-dtype", "torch.bfloat16"), "Invalid value for '--reduce-dtype'"),
    ((NET, "--step", "yes"), "unexpected extra argument"),
    ((NET, "--no-step"), "No such option"),
    ((*STEP, "--micro-batches", "0"), "Invalid value for '--micro-batches'"),
    ((*STEP, "--micro-batches", "1000000"), "Invalid value for '--micro-batches'"),
    # what contradicts itself or has no effect
    ((NET, "--micro-batches", "2"), "--micro-batches has a meaning only with --step"),
    ((*STEP, "--inference"), "--inference has a meaning only with no --step"),
    ((NET, "--inference", "--reduce-dtype", "float32"), "--reduce-dtype has a meaning only with"),
    ((NET, "--batch-size", "4"), "batch_size=4 has no effect: the factory makes its own inputs"),
    ((*STEP, "--micro-batches", "4", "--batch-size", "6"), "sizes do not divide by 4"),
    (("tests.targets:odd_rows", "--step", "--micro-batches", "4"), "sizes do not divide by 4"),
    # targets
    (("tests.targets",), "'tests.targets' names no factory. Write package.module:factory"),
    (("tests.targets:",), "names no factory"),
    ((":tensor_input",), "names no factory"),
    (("",), "names no factory"),
    ((":",), "names no factory"),
    (("tests.no_such_module:f",), "cannot import 'tests.no_such_module'"),
    (("no_such_package.module:f",), "cannot import 'no_such_package.module'"),
    (("tests/targets:tensor_input",), "cannot import 'tests/targets'"),
    (("tests.targets:tensor_inputs",), "did you mean 'tensor_input'?"),
    (("tests.targets:Nets.smal",), "did you mean 'small'?"),
    (("tests.targets:Nets.small.deeper",), "has no function 'Nets.small.deeper'"),
    (("nowhere/model.py:tiny",), "there is no file 'nowhere/model.py'"),
    (("tests/targets.py",), "names no factory"),
    (("tests/targets.py:tensor_inputs",), "did you mean 'tensor_input'?"),
    (("tests.targets:needs_arguments",), "needs arguments (width, depth)"),
    (("tests.targets:Raising.forward",), "needs arguments (self, x)"),
    (("tests.targets:raises",), "raised RuntimeError at"),
    (("tests.targets:raises",), "targets.py:"),
    (("tests.targets:raises_without_words",), "raised AssertionError at"),
    (("tests.targets:ready",), "is a Net that exists already, with memory"),
    (("tests.targets:number",), "is no function but int"),
    (("tests.targets:returns_none",), "the factory returned NoneType; it must return a module"),
    (("tests.targets:returns_class",), "the factory returned type"),
    (("tests.targets:returns_inputs_first",), "the factory returned tuple of (tuple, Net)"),
    (("tests.targets:returns_dict",), "the factory returned dict"),
    (("tests.targets:returns_three",), "the factory returned tuple of (Net, FakeTensor"),
    (("tests.targets:returns_four",), "the factory returned tuple of (Net, tuple, dict, int)"),
    (("tests.targets:returns_number_inputs",), "found int for the model's inputs"),
    (("tests.targets:returns_text_inputs",), "found str for the model's inputs"),
    (("tests.targets:returns_numbered_dict",), "a dict of inputs has names, not 0"),
    (("tests.targets:has_no_batch",), "no layer of it says what it reads"),
    (("tests.targets:bad_batches",), "BadBatches.example_inputs(2) raised ZeroDivisionError"),
    (("tests.targets:fixed_batches",), "takes 1 positional argument but 2 were given"),
    (("tests.targets:number_batches",), "found int for the model's inputs"),
    (("tests.targets:made_before",), "parameter layer.weight was made before the factory"),
    (("tests.targets:rows_made_before",), "input [0][0] was made before the factory"),
    # settings
    (options(""), "--options='' is no JSON"),
    (options("{"), "--options='{' is no JSON"),
    (options("[1]"), "--options='[1]' must be a JSON object"),
    (options("null"), "must be a JSON object"),
    (options("{'strict': true}"), "is no JSON"),
    (options('{"strict": True}'), "is no JSON"),
    (options('{"strict": true, "strict": false}'), "sets strict twice"),
    (options('{"bucket": {"cap_bytes": 1, "cap_bytes": 2}}'), "sets cap_bytes twice"),
    (options('{"prefech": {}}'), "did you mean 'prefetch'?"),
    (options('{"prefetch": {"distance": NaN}}'), "distance=nan must be a whole number"),
    (options('{"prefetch": {"distance": "2"}}'), "distance='2' must be a whole number"),
    (options('{"prefetch": 2}'), "options.prefetch takes a mapping of settings, not 2"),
    (options('{"lower_regions": "eager"}'), "options.lower_regions takes a mapping"),
    (options('{"lower_kernels": {"force": ["swiglu"]}}'), "force=['swiglu'] must be text"),
    (options('{"lower_kernels": {"force": "swiglo"}}'), "did you mean 'swiglu'?"),
    (options('{"cost": {"cluster": 3}}'), "cluster=3 must be text"),
    (options('{"cost": {"model": "measured"}}'), "needs real ranks; this process group is fake"),
    ((*options('{"cost": 3}'), "--cluster", "laptop"), "options.cost takes a mapping"),
    ((*options('{"cost": {"cluster": "dgx2"}}'), "--cluster", "laptop"), "'dgx2' differ"),
    # machines and files
    ((NET, "--cluster", "dgx_h10"), "did you mean 'dgx_h100'?"),
    ((NET, "--cluster", ""), "cost.cluster='' must be a name in conf/cluster"),
    ((NET, "--cluster", "nowhere.yaml"), "there is no such file"),
    ((NET, "--diff", ""), "no pass '' runs here"),
    ((NET, "--diff", "shard_parms"), "did you mean 'shard_params'?"),
    ((NET, "--json", "--diff", "nope"), "no pass 'nope' runs here"),
    ((NET, "--diff", "update"), "no pass 'update' runs here"),
    ((*STEP, "--diff", "release_saved"), "no pass 'release_saved' runs here"),
    ((NET, "--trace", "no/such/folder/step.json"), "there is no folder 'no/such/folder'"),
    ((NET, "--trace", "tests"), "--trace tests is a folder"),
]


def test_there_are_ninety() -> None:
    """All of them different."""
    assert len({arguments for arguments, _ in NO_ANSWER}) >= 90


@pytest.mark.parametrize(("arguments", "message"), NO_ANSWER, ids=lambda value: str(value)[:60])
def test_wrong_use_ends_with_2(arguments: tuple[str, ...], message: str) -> None:
    """A sentence on the standard error, no traceback, nothing on the standard output."""
    assert_sentence(call(*arguments), 2, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("device: [", "is no YAML that can be read"),
        ("device: {name: x\n", "is no YAML that can be read"),
        ("\tdevice: 1", "is no YAML that can be read"),
        ("device: ${nope}", "is no YAML that can be read"),
        ("[1, 2]", "must be a mapping"),
        ("laptop", "has no key 'laptop'"),
        ("", "device, intra, inter missing"),
        ("devize: {}", "no key 'devize': did you mean 'device'?"),
        ("device: 3", "expected a mapping, found 3"),
        ("{1: 2}", "has no key 1"),
    ],
    ids=repr,
)
def test_broken_clusters_end_with_2(tmp_path: Path, content: str, message: str) -> None:
    """The file, and what is wrong in it."""
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    assert_sentence(call(NET, "--cluster", str(path)), 2, message)


GOOD = """
device:
  {{name: x, peak_flops: {flops}, memory_bytes_per_s: {speed}, memory_bytes: 1e9, {more}}}
intra: {{bytes_per_s: {link}, latency_us: {latency}}}
inter: {{bytes_per_s: 1e9, latency_us: 10}}
devices_per_node: {devices}
"""
FINE = {"flops": "{fp32: 1e12}", "speed": "1e10", "link": "1e9", "latency": "5", "devices": "2"}


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    """The frame of the figures below is fine by itself."""
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.format(**FINE, more="launch_us: 3"))
    assert call(NET, "--cluster", str(path)).exit_code == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops": "1e12"}, "must be FLOP/s by dtype"),
        ({"flops": "{}"}, "must be FLOP/s by dtype, fp32 among them"),
        ({"flops": "{bf16: 1e12}"}, "fp32 among them"),
        ({"flops": "{fp32: 1e12, bf61: 1}"}, "has no 'bf61': did you mean 'bf16'?"),
        ({"flops": "{fp32: 0}"}, "device.peak_flops.fp32=0 must be positive"),
        ({"speed": "fast"}, "memory_bytes_per_s='fast' must be a number"),
        ({"speed": ".nan"}, "must be a finite number"),
        ({"speed": "true"}, "memory_bytes_per_s=True must be a number"),
        ({"speed": "null"}, "memory_bytes_per_s=None must be a number"),
        ({"link": "-1"}, "intra.bytes_per_s=-1 must be positive"),
        ({"link": ".inf"}, "must be a finite number"),
        ({"latency": "-2"}, "intra.latency_us=-2 must be 0 or more"),
        ({"devices": "1.5"}, "devices_per_node=1.5 must be a whole number"),
        ({"devices": "0"}, "devices_per_node=0 must be positive"),
        ({"more": "flops_efficiency: 70"}, "is a share of the peak, 1 at most"),
        ({"more": "attention_efficiency: 2"}, "is a share of a product's speed, 1 at most"),
        ({"more": "convolution_efficiency: 0"}, "device.convolution_efficiency=0 must be positive"),
        ({"more": "transcendental_per_s: -1"}, "transcendental_per_s=-1 must be 0 or more"),
        ({"more": "launch_us: -1"}, "device.launch_us=-1 must be 0 or more"),
        ({"more": "lunch_us: 1"}, "did you mean 'launch_us'?"),
    ],
    ids=str,
)
def test_figures_that_no_machine_has(tmp_path: Path, change: dict[str, str], message: str) -> None:
    """Times must come out positive and finite."""
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.format(**{**FINE, "more": "launch_us: 3", **change}))
    assert_sentence(call(NET, "--cluster", str(path)), 2, message)
