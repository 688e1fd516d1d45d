"""ZeRO-3 for a two-layer net, pass by pass.

    python examples/tour.py

Read it from top to bottom, beside what it prints. The net is written as for one device. Step by
step its training becomes that of four ranks, each of which holds a quarter of every parameter. The
passes are those that run in training; the ranks exist only in name, so one process is enough.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

import fxzero
from fxzero.compiler.run import PassRecord, run_passes
from fxzero.cost import AnalyticCosts, load_cluster
from fxzero.errors import VerificationError
from fxzero.graph import StepGraph
from fxzero.graph.cut import cut
from fxzero.graph.verify import verify
from fxzero.inspect import Analysis, capture, joint_graph
from fxzero.inspect.capture import fake_ranks
from fxzero.passes import (
    Bucket,
    Context,
    ExpandLayers,
    Fact,
    Pass,
    Prefetch,
    Recompute,
    ShardGrads,
    ShardParams,
    StampNodes,
)
from fxzero.schedule.simulate import simulate, simulate_memory
from fxzero.transfer import TransferKind

RANKS = 4

# ## The net
#
# Two linear layers with a ReLU between them, and a loss. Nothing here knows of ranks. What
# travels will be counted in `P`, the number of parameters. The batch wants a gradient, as the
# input of a layer in the middle of a model does.


class TwoLayers(nn.Module):
    """Rows (B, width) → a scalar loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of what comes out."""
        return self.down(self.up(x).relu()).square().mean()


def two_layers(width: int = 8, rows: int = 8) -> tuple[nn.Module, tuple[Tensor]]:
    """The net and a batch."""
    return TwoLayers(width), (torch.randn(rows, width, requires_grad=True),)


P = sum(parameter.numel() for parameter in TwoLayers().parameters())
print(f"P = {P}")

# ## Mark
#
# `fxzero.shard` replaces each parameter by a `DTensor` that holds this rank's rows. The net still
# says `self.up.weight`: reading it now returns `fxzero::unshard(shard)`, an operator that means
# "here the full parameter is needed". What that costs, and when, is not decided yet.

with fake_ranks(RANKS):
    model = fxzero.shard(TwoLayers(), zero=3, mesh=init_device_mesh("cpu", (RANKS,)))
    for name, parameter in model.named_parameters():
        here = tuple(parameter.to_local().shape)
        print(f"{name}: {tuple(parameter.shape)}, of which this rank has {here}")

# ## Capture
#
# Forward and backward are traced into one graph. A line is a node: its name, its dtype and shape,
# and what it calls. Look for the operators that `shard` brought: `unshard` where a weight is
# read, and `reshard_grad` where its gradient is done. The rest is the net as its author wrote it,
# and its derivative. There is no collective yet.

graph = joint_graph(two_layers, zero=3, world_size=RANKS)
print(graph.text())

# ## Stamp
#
# A pass is a frozen dataclass that rewrites a graph. `run_passes` sees that what it requires is
# true of the graph (a `Fact`), runs it, verifies the result, and returns a record of what was
# done. What passes share, such as the costs by which they decide, is in a `Context`.

context = Context(costs=AnalyticCosts(load_cluster("dgx_h100")), fuses=False)
facts: set[Fact] = set()


def apply(one: Pass) -> PassRecord:
    """Run a pass on the graph, and print what it noted."""
    (record,) = run_passes([one], graph, context, given=facts, keep_text=True)
    facts.update(one.provides)
    print(f"{record.name}: {record.notes}")
    return record


# The first pass reads the graph's structure once, and writes it on each node: its phase, the lane
# that it runs on, its role, its layer. Passes behind it read stamps and never guess. What
# backward only prepares moves down to its first use, so that it holds no memory before.

apply(StampNodes())
print(graph.text())

# ## Decide what backward repeats
#
# `recompute` chooses what backward computes again instead of reading it from forward. A view
# costs nothing: here backward gets a transpose of its own, for if it read forward's, the full
# weight would have to live until then.

print(apply(Recompute()).diff())

# ## Gather parameters, and release them
#
# This is ZeRO-3. Each `unshard` becomes a gather that starts, a wait that ends it, the part of
# its result that is this weight, and a release behind its last use in the phase. Backward gathers
# again: that is the price of holding full weights only while they are used.

print(apply(ShardParams()).diff())

# ## Reduce gradients
#
# Each `reshard_grad` becomes a reduce-scatter. Every rank sends the full gradient of its own rows
# of the batch, and receives its quarter of the mean over all of them.

print(apply(ShardGrads()).diff())


def elements(of: StepGraph) -> int:
    """Elements of the full tensors that collectives move; an all-reduce moves them twice."""
    return sum(
        transfer.record.full_bytes
        // transfer.record.dtype.itemsize
        * (2 if transfer.record.kind is TransferKind.ALL_REDUCE else 1)
        for transfer in of.transfers()
    )


# Gathered in forward, gathered in backward, reduced: each parameter travels three times.

print(f"on the wire: {elements(graph)} elements = {elements(graph) / P:g} P")
assert elements(graph) == 3 * P

# ## Break it
#
# The verifier ran behind each pass. It knows what must be true of any graph, whoever wrote the
# pass. Let us release the first weight as soon as it is there:

broken = graph.clone()
release = next(n for n in broken.nodes() if n.target is torch.ops.fxzero.release.default)
release.args[0][0].append(release)
try:
    verify(broken, facts, after="our own")
except VerificationError as error:
    print(error)
else:
    raise AssertionError("a weight is read after its release")

# ## Join what travels together
#
# A bucket is what one transfer carries. By cost, two weights as small as these would travel in
# one, as a message takes longer to start than to send. To see more, each layer has its own here.
# (Between the two, `expand_layers` puts back equal layers, which are traced once; here there are
# none.)

apply(ExpandLayers())
apply(Bucket(min_bytes=0))
for transfer in graph.transfers():
    record = transfer.record
    print(f"{transfer.stamp.bucket}: {record.kind.value} of {record.full_bytes} bytes")

# ## Start transfers early
#
# The order of nodes is the order in which they are launched. `prefetch` chooses it: here each
# gather starts one bucket ahead of its use, and a reduce is waited for when the next one is due.
# Look at the second gather, which now stands in front of the first product.

print(apply(Prefetch(distance=1)).diff())

# ## The step
#
# Nothing else is needed for ZeRO-3. Read from top to bottom, the graph says what runs, what is on
# its way meanwhile, and how long every full weight lives.

print(graph.text())

# ## Cut
#
# `torch.compile` calls forward and backward apart, so the graph is cut where its phases meet.
# What crosses is saved in between. No full weight may be among it, or stage 3 would hold what
# stage 2 does.

saved = cut(graph.clone(), private=set()).saved
for node in saved:
    print(f"saved: {node.name} {tuple(node.meta['val'].shape)}")
assert not {"up_weight", "down_weight"} & {node.name for node in saved}

# ## How long it takes
#
# A graph can be simulated: when each node runs by the figures of a cluster, and what is held
# meanwhile. So that there is something to hide, the net is 8192 wide here, which takes no memory,
# as its tensors are fake. Where each transfer is waited for at once compute stands still. One
# bucket ahead hides part of it. By cost, `prefetch` searches for the fastest order within a
# budget of bytes, and may let backward read what forward gathered.

wide = joint_graph(lambda: two_layers(8192, 512), zero=3, world_size=RANKS)
before = [StampNodes(), Recompute(), ShardParams(), ShardGrads(), ExpandLayers(), Bucket()]
orders = {
    "waiting at once": Prefetch(distance=0, reduce_distance=0),
    "one bucket ahead": Prefetch(distance=1),
    "by cost": Prefetch(),
}
waiting = []
for words, prefetch in orders.items():
    scheduled = wide.clone()
    run_passes([*before, prefetch], scheduled, context)
    simulated = simulate(scheduled, context.costs, fuses=False)
    peak_bytes = simulate_memory(scheduled, fuses=False).peak_bytes
    waiting.append(simulated.exposed_us)
    print(
        f"{words}: {simulated.makespan_us / 1e3:.1f} ms, of which compute waits "
        f"{simulated.exposed_us / 1e3:.1f} ms; at most {peak_bytes / 2**30:.1f} GiB"
    )
assert waiting[0] > waiting[1] >= waiting[2]

# ## The stages of ZeRO
#
# A stage says how long full things live, and so how often they travel. `capture` compiles a whole
# step with its optimizer, by the same passes in their usual order. Counted over all four stages,
# with k micro-batches, that is the table of ZeRO: 2 P, 2 P, (k + 1) P and 3 k P. A real batch
# wants no gradient, so that backward never reads the first weight: at stage 3 that is a gather
# less for each micro-batch.


def training() -> tuple[nn.Module, tuple[Tensor]]:
    """The net and a batch that wants no gradient."""
    model, (batch,) = two_layers()
    return model, (batch.detach(),)


k = 2
first = P // 2
for zero, expected in enumerate([2 * P, 2 * P, (k + 1) * P, 3 * k * P - k * first]):
    captured = capture(
        training,
        zero=zero,
        world_size=RANKS,
        step=True,
        micro_batches=k,
        clip_grad_norm=None,
        options={"prefetch": {"keep": False}, "cost": {"cluster": "dgx_h100"}},
    )
    moved = Analysis.of(captured).wire_elements()
    print(f"ZeRO-{zero}: {moved} elements = {moved / P:g} P")
    assert moved == expected

# ## Run it
#
# Last, without fake ranks: the two lines that a training script has. A single process has nobody
# to send to, so the same passes find no collective to make. The gradients are eager's, bit by
# bit, as torch's own kernels compute them (`backend="eager"`; by default Inductor fuses them).

torch.manual_seed(0)
plain, compiled = TwoLayers(), TwoLayers()
compiled.load_state_dict(plain.state_dict())
batch = torch.randn(8, 8)
plain(batch).backward()

compiled = fxzero.shard(compiled, zero=3)
step = torch.compile(compiled, backend="fxzero", options={"lower_regions": {"backend": "eager"}})
loss = step(batch)
loss.backward()

for (name, ours), theirs in zip(compiled.named_parameters(), plain.parameters(), strict=True):
    gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
    assert torch.equal(gradient, theirs.grad)
    print(f"{name}: the gradient is eager's, its norm {gradient.norm():.4f}")

# Where a script has these two lines, `torchrun --nproc-per-node 4` makes the ranks real: that is
# how `examples/train.py` trains a GPT. For a model of your own, `fxzero inspect` shows the same
# passes, diffs and times.
