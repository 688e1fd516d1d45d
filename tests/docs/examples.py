"""What pages of commands and passes show: the commands that are run for them.

A new command or pass has a page without being named here; a line here gives it examples.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

NETS = "examples.small_nets:"
ON = "--cluster dgx_h100"
"""Said each time, so that nothing depends on the machine that runs it."""


@dataclass(frozen=True)
class Example:
    """A command of a command's page."""

    line: str
    says: str
    exit_code: int = 0


EAGER_REGIONS: dict[str, Any] = {"lower_regions": {"backend": "eager"}}

COMMANDS: dict[str, tuple[Example, ...]] = {
    "inspect": (
        Example(
            f"fxzero inspect {NETS}two_layers {ON}",
            "The passes in their order, what travels, and what the step takes.",
        ),
        Example(
            f"fxzero inspect {NETS}two_layers {ON} --step --micro-batches 2 --diff clip_grads",
            "What one pass changed, as a diff of the graph. Every pass has a page with one.",
        ),
        Example(
            f"fxzero inspect {NETS}two_layers {ON} --code",
            "The scheduled graph as Python: pieces as functions, then the step that calls them. "
            "Node order is launch order.",
        ),
        Example(
            f"fxzero inspect examples.models:gpt_nano {ON} --lanes",
            "The simulated step as a picture: darker where a column's time is taken.",
        ),
        Example(
            f"fxzero inspect examples.models:gpt_nano {ON} --module 'blocks.*.mlp' | head -n 5",
            "The nodes of modules, once for layers that are alike, with lines of the model's code.",
        ),
        Example(
            f"fxzero inspect examples.models:gpt_nano {ON} --memory | tail -n 11",
            "What is kept for backward, what is repeated and what is gathered, by layer; the last "
            "line is what is held over time. [Memory](../concepts/memory.md) has it with a budget.",
        ),
        Example(
            f"fxzero inspect examples.models:gpt_nano {ON} --step --micro-batches 8 --mesh 4x1",
            "The same model as a pipeline of four ranks.",
        ),
    ),
    "estimate": (
        Example(
            f"fxzero estimate examples.models:gpt_nano --world-size 64 {ON} --zero 0 --zero 3",
            "Stages side by side, for ranks that are not there; without `--zero` all four.",
        ),
        Example(
            "fxzero estimate --params 7.5e9 --world-size 64",
            "From a number of parameters alone, by the formulas of the ZeRO paper.",
        ),
    ),
    "explain": (
        Example(
            f"fxzero explain examples.models:gpt_nano reduce.backward.0 {ON}",
            "A bucket: what it brings, when it is on the link, and what waits for it.",
        ),
        Example(
            f"fxzero explain examples.models:gpt_nano blocks.1.mlp.up.weight {ON}",
            "A parameter: its way through the step.",
        ),
        Example(
            f"fxzero explain {NETS}two_layers prefetch {ON}",
            "A pass: what it is for, what it did, and what it chose.",
        ),
    ),
    "diff": (
        Example(
            f"fxzero diff {NETS}two_layers {ON} --zero 2 --other-zero 3",
            "Two ZeRO stages of one model: they differ, so that it ends with 1.",
            exit_code=1,
        ),
    ),
    "bisect": (
        Example(
            f"fxzero bisect {NETS}two_layers --options '{json.dumps(EAGER_REGIONS)}' | tail -n 1",
            "The last line; before it there is a row for each graph that was run.",
        ),
    ),
    "import-deepspeed": (
        Example(
            "fxzero import-deepspeed examples/ds_config.json --world-size 2",
            "A line a key, then the settings. [DeepSpeed's JSON](../integrations/deepspeed.md) "
            "says how to train by them.",
        ),
    ),
    "options": (
        Example(
            "fxzero options | head -n 24",
            "The first settings. The whole text is `conf/fxzero/default.yaml`, too.",
        ),
    ),
}
"""By command; nothing that depends on the machine."""

EAGER = EAGER_REGIONS
"""torch's own operators one by one, which are easier to read than pieces."""
BY_LAYER: dict[str, Any] = {**EAGER, "bucket": {"min_bytes": 0}, "prefetch": {"distance": 1}}
"""A bucket for each layer, gathered one ahead: small layers would all travel together."""


@dataclass(frozen=True)
class Shown:
    """How a pass's page makes its diff."""

    net: str = "two_layers"
    """Of `examples.small_nets`, unless it has a colon."""
    options: dict[str, Any] = field(default_factory=lambda: EAGER)
    words: str = ""
    gloo: bool = False
    lines: int | None = None
    """How many lines of the diff are shown; None for all."""
    cluster: str = "dgx_h100"
    says: str = ""
    """What to look at."""

    def command(self, name: str) -> str:
        """The whole line."""
        target = self.net if ":" in self.net else NETS + self.net
        options = f" --options '{json.dumps(self.options)}'" if self.options else ""
        words = f" {self.words}" if self.words else ""
        line = f"fxzero inspect {target} --cluster {self.cluster}{words}{options} --diff {name}"
        return line if self.lines is None else f"{line} | head -n {self.lines}"


STEP = "--step --clip-grad-norm 0"

PASSES: dict[str, Shown] = {
    "stamp": Shown(says="Each node has its phase, lane, role and layer behind it."),
    "lower_kernels": Shown(
        "with_norm",
        {**EAGER, "lower_kernels": {"force": "rms_norm"}},
        says="A norm that its model writes out becomes one call in each phase.",
    ),
    "draw_masks": Shown("with_dropout", {}, says="The mask is drawn before the first layer."),
    "recompute": Shown("with_gelu", says="Backward computes the GELU again instead of reading it."),
    "tile_linear": Shown(
        options={**EAGER, "tile_linear": {"max_bytes": 512}},
        says="Both weights are 1024 bytes, which is twice what is allowed here: two blocks each.",
    ),
    "outline": Shown(options={}, says="The pieces that are called stand behind the graph."),
    "accumulate": Shown(
        words="--step --micro-batches 2 --clip-grad-norm 0",
        says="The second micro-batch, and the sums of both.",
    ),
    "shard_params": Shown(says="A gather, a wait, a part and a release for each phase that reads."),
    "shard_grads": Shown(says="A reduce-scatter instead of each marker."),
    "expand_layers": Shown(
        "deep", {}, lines=30, says="Layers in the middle of the chain, which were left out."
    ),
    "bucket": Shown(says="Both weights travel in one transfer now."),
    "clip_grads": Shown(words="--step", options=BY_LAYER, says="The norm of all gradients."),
    "update": Shown(
        words=STEP, options=BY_LAYER, says="Optimizer state is an input; gradients no output."
    ),
    "offload_shards": Shown(
        words="--offload", options=BY_LAYER, says="Copies up before gathers, down behind reduces."
    ),
    "offload_states": Shown(
        words=STEP,
        options={**BY_LAYER, "memory": "states_host"},
        says="Gradients go down, updates run on the host, and the next step finds the copies.",
    ),
    "offload_params": Shown(
        words=STEP,
        options={**BY_LAYER, "memory": "all_host"},
        says="A copy for each phase, instead of one for the step.",
    ),
    "offload_disk": Shown(
        words=STEP,
        options={**BY_LAYER, "memory": "infinity"},
        says="What an update needs is read and written in its own calls.",
    ),
    "offload_activations": Shown(
        "examples.models:gpt_nano",
        {"offload_activations": {"share": 1.0}},
        "--batch-size 64 " + STEP,
        lines=40,
        says="Only what has the time to go and to come back does. (The first lines.)",
    ),
    "prefetch": Shown(
        options=BY_LAYER, says="Gathers start one bucket ahead; the set of nodes stays."
    ),
    "join_copies": Shown(
        words="--offload",
        options=BY_LAYER,
        says="The second copy starts before the first is waited for.",
    ),
    "lower_transfers": Shown(
        options=BY_LAYER, gloo=True, says="Forward, then backward, each a graph of its own by now."
    ),
    "gather_ahead": Shown(
        words=STEP,
        options={**BY_LAYER, "gather_ahead": {"enabled": True}},
        gloo=True,
        cluster="pair_1gbit",
        says="The step takes what the one before has started, and starts what the next one needs.",
    ),
    "release_saved": Shown(
        "with_gelu", {}, "--batch-size 64", says="Nothing in forward; in backward a release."
    ),
    "lower_regions": Shown(options={}, says="Runs of compute are called as one callable each."),
    "slab": Shown(
        "deep",
        {"bucket": {"min_bytes": 0}, "prefetch": {"distance": 1}, "slab": {"enabled": True}},
        STEP,
        lines=30,
        says="Two places, in turn. (The first lines.)",
    ),
}
"""By pass; those of pipelines are below, as no option of `fxzero inspect` runs them."""

IN_STAGES = """\
import torch
from torch.distributed.device_mesh import init_device_mesh

import fxzero
from examples.small_nets import two_layers
from fxzero.compiler.compilation import observers
from fxzero.inspect.capture import fake_ranks

seen = []
observers.append(seen.append)
with fake_ranks(2):  # the first of two, which exist only in name
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shard"))
    net = fxzero.shard(two_layers(), mesh=mesh, stages={{"up": 0, "act": 0, "down": 1}})
    step = fxzero.compile_step(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1, fused=True),
        micro_batches=2,
        options={{"lower_regions": {{"backend": "eager"}}, "keep_text": True}},
    )
    step(torch.randn(4, 8))
observers.remove(seen.append)
(record,) = (record for record in seen[0].records if record.name == "{name}")
print(record.diff())
"""

STAGED: dict[str, str] = {
    "split_stages": "The first stage of two: what the second one computes is gone, and a message "
    "goes out and one comes back.",
    "order_micro_batches": "The first stage of two, with two micro-batches, by 1F1B.",
    "join_stages": "The loss is the last stage's, and every rank returns it.",
}
"""Passes of pipelines."""
