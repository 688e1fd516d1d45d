"""Equal layers, traced once: the graph, the guards and the numbers are those of tracing each."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

import fxzero
from fxzero import _compat
from fxzero._compat import equal_layers, layer_copies
from fxzero.graph.modules import module_path
from fxzero.inspect.capture import fake_ranks
from tests.architectures.models import ARCHITECTURES
from tests.tiers import exhaustive, in_two_tiers

NUM_LAYERS = 4
COPIED = ["vit", *exhaustive("gpt2", "llama", "mixtral", "bert")]
"""Architectures that are compared here; `python -m tests.architectures` trains all of them."""
WITH_A_CACHE = ["gpt2", *exhaustive("mixtral", "t5")]
"""Of those whose forward makes one unless it is told not to; each layer writes to it."""


class Config:
    """What a model's layers share."""

    def __init__(self) -> None:
        self.scale = 2.0


class Layer(nn.Module):
    """A block with what blocks have: submodules, a buffer, settings, a choice."""

    shift: Tensor

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.0)
        self.act: Callable[[Tensor], Tensor] = torch.tanh
        self.register_buffer("shift", torch.full((8,), 0.5))
        self.reads_index = False
        self.other: Any = None

    def forward(self, x: Tensor, scale: float = 1.0, both: bool = False) -> Any:
        h = self.dropout(self.down(self.act(self.up(self.norm(x)))))
        if self.reads_index:
            h = h * self.index
        if self.other is self.config:
            h = h + 1
        y = x + scale * h * self.config.scale + self.shift
        return (y, h.mean()) if both else y


class Model(nn.Module):
    """Layers in a list, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer(self.config, i) for i in range(NUM_LAYERS))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


@dataclass
class Seen:
    """What Dynamo did."""

    copied: int = 0
    graphs: list[fx.GraphModule] = field(default_factory=list)

    def backend(self, module: fx.GraphModule, _: Any) -> Any:
        self.graphs.append(module)
        return module.forward


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Counts copied calls, and keeps graphs."""
    result = Seen()
    original = layer_copies.copy_call

    def counted(*args: Any) -> Any:
        result.copied += 1
        return original(*args)

    monkeypatch.setattr(equal_layers, "copy_call", counted)
    torch._dynamo.reset()
    return result


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process, so that parameters are DTensors that can be trained."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def traced(*, once: bool) -> Iterator[None]:
    torch._dynamo.reset()
    with contextlib.nullcontext() if once else equal_layers.tracing_every_layer():
        yield


def described(module: fx.GraphModule) -> list[Any]:
    """A graph without its values' names: what each node is, does, reads and lies in."""
    position = {node: i for i, node in enumerate(module.graph.nodes)}

    def number(node: fx.Node) -> str:
        return f"%{position[node]}"

    result = []
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        layout = None
        if isinstance(value, Tensor):
            layout = (type(value), value.shape, value.stride(), value.dtype, value.requires_grad)
        # In torch 2.11 every ``x.to_local()`` is a function of its own.
        target = "to_local" if _compat.is_plain_to_local(node) else node.target
        args = fx.node.map_arg((node.args, node.kwargs), number)
        result.append((node.op, target, repr(args), module_path(node), layout))
    return result


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("values", ["with_values", "without_values"])
def test_the_graph_is_the_one_of_tracing_each_layer(seen: Seen, values: str, zero: int) -> None:
    """Node by node, on two ranks, also where somebody only looks: targets, arguments, modules,
    values, sources."""
    looks = contextlib.nullcontext() if values == "with_values" else _compat.fake_tensors()
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        with looks:
            model = fxzero.shard(Model(), zero=zero, mesh=mesh)
            for once in (False, True):
                with traced(once=once):
                    torch.compile(model, backend=seen.backend)(torch.ones(2, 8))
    each, copied = map(described, seen.graphs)
    assert seen.copied == NUM_LAYERS - 1
    assert each == copied


class Heads(nn.Module):
    """Modules of one class whose last layers differ in length alone."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(Head(length) for length in lengths)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        return torch.stack([head(x) for head in self.heads]).sum()


class Head(nn.Module):
    """A mean of as many numbers as it has rows."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, length)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) → scalar."""
        return self.last(torch.tanh(self.first(x))).square().mean()


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_of_one_shape_are_no_parameters_of_one(rank: int, seen: Seen) -> None:
    """Of three rows and of four rank 0 of two has two each: guards see no difference."""
    with fake_ranks(2, rank):
        mesh = init_device_mesh("cpu", (2,))
        model = fxzero.shard(Heads(3, 4, 3, 4), zero=3, mesh=mesh)
        parts = {head.last.weight.to_local().shape for head in model.heads}  # type: ignore[union-attr, operator]
        assert len(parts) == 1 + rank
        for once in (False, True):
            with traced(once=once):
                torch.compile(model, backend=seen.backend)(torch.ones(2, 8))
    each, copied = map(described, seen.graphs)
    assert seen.copied == 2
    assert each == copied


@pytest.mark.parametrize("name", WITH_A_CACHE)
def test_graphs_of_transformers_models(name: str, seen: Seen) -> None:
    """Whatever their forward does, it is the graph of tracing each of their layers."""
    architecture = ARCHITECTURES[name]
    with fake_ranks(2):
        model = fxzero.shard(architecture.build(), zero=3)
        batch = architecture.batch(2, seed=0)
        for once in (False, True):
            with traced(once=once), _compat.lenient_tracing(model.modules()):
                torch.compile(model, backend=seen.backend)(**batch)
    half = len(seen.graphs) // 2
    for each, copied in zip(seen.graphs[:half], seen.graphs[half:], strict=True):
        assert described(each) == described(copied)


@pytest.mark.parametrize("name", COPIED)
def test_layers_of_transformers_models_are_copied(name: str, seen: Seen) -> None:
    """Their forward sets a global collector first, which no layer reads."""
    architecture = ARCHITECTURES[name]
    with fake_ranks(2):
        model = fxzero.shard(architecture.build(), zero=3)
        model.config.use_cache = False  # a cache is an object that each layer writes to
        assert not any(parameter._is_view() for parameter in model.parameters())  # Dynamo 2.11 asks
        batch = architecture.batch(2, seed=0)
        for once in (False, True):
            with traced(once=once), _compat.lenient_tracing(model.modules()):
                torch.compile(model, backend=seen.backend)(**batch)
    assert seen.copied == model.config.num_hidden_layers - 1
    half = len(seen.graphs) // 2
    for each, copied in zip(seen.graphs[:half], seen.graphs[half:], strict=True):
        assert described(each) == described(copied)


def compiled_by_fxzero(function: Any) -> Any:
    return torch.compile(
        function, backend="fxzero", options={"lower_regions": {"backend": "eager"}}
    )


def computed_as_traced(module: fx.GraphModule, _: Any) -> Any:
    """A backend for what is Dynamo's alone: changes that guards must see, or that a forward makes.

    What fxzero makes of layers that differ, other tests see.
    """
    return module.forward


def steps(model: nn.Module, call: Callable[..., Tensor]) -> list[Tensor]:
    """A loss and the gradients of the model's parameters."""
    model.zero_grad()
    x = torch.arange(16.0, dtype=torch.float64).view(2, 8) / 16
    loss = call(x).square().sum()
    loss.backward()
    grads = [p.grad if p.grad is not None else torch.zeros(()) for p in model.parameters()]
    return [loss.detach(), *grads]


def assert_like_eager(model: nn.Module, call: Callable[..., Tensor], eager: nn.Module) -> None:
    for found, expected in zip(steps(model, call), steps(eager, eager), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max() + 1))


def sub(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    layer.dropout = Other()


def add_hook(layer: nn.Module) -> None:
    layer.up.register_forward_hook(lambda _, __, out: out * 3)


def add_pre_hook(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(lambda _, args: (args[0] * 3, *args[1:]))


def patch_forward(layer: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x * self.weight * 3 + self.bias

    layer.norm.forward = types.MethodType(forward, layer.norm)


def drop(layer: Any) -> None:
    layer.dropout.p = 1.0


def tie(layer: Any) -> None:
    layer.norm.weight = layer.norm.bias


CHANGES: dict[str, Callable[[Any], None]] = {
    "a setting of a submodule": lambda layer: setattr(layer.norm, "eps", 0.5),
    "a hook": add_hook,
    "a hook before it": add_pre_hook,
    "a forward of its own": patch_forward,
    "its activation": lambda layer: setattr(layer, "act", torch.sin),
    "a closure": lambda layer: setattr(layer, "act", (lambda k: lambda x: x * k)(3)),
    "another submodule": lambda layer: sub(layer, torch.sin),
    "its dropout": drop,
    "a choice": lambda layer: setattr(layer, "reads_index", True),
    "a frozen parameter": lambda layer: layer.up.weight.requires_grad_(False),
    "an object of its own": lambda layer: setattr(layer, "config", type("C", (), {"scale": 7.0})()),
    "one object in two places": lambda layer: setattr(layer, "other", layer.config),
    "a tied parameter": tie,
    "another buffer": lambda layer: setattr(layer, "shift", torch.full((8,), 2.0).double()),
    "a buffer of another shape": lambda layer: setattr(layer, "shift", torch.ones(1).double()),
}
SEEN_BY_GUARDS = ("a hook", "its activation", "a choice", "a frozen parameter", "a tied parameter")
"""By guards of different kinds, in every run."""


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("index", "change"),
    in_two_tiers([*itertools.product((2, 0), CHANGES.values())]),
    ids=[f"{index}-{name}" for index, name in itertools.product((2, 0), CHANGES)],
)
def test_a_layer_that_differs(change: Callable[[Any], None], index: int, seen: Seen) -> None:
    """One of the layers differs before it is compiled: its numbers are its own.

    Which of them is traced and which copied is Dynamo's part; fxzero's own folding of layers sees
    each change once.
    """
    eager = Model().double()
    change(eager.layers[index])
    model = fxzero.shard(copy.deepcopy(eager), zero=3)
    with traced(once=True):
        whole = compiled_by_fxzero(model)
        alone = torch.compile(model, backend=computed_as_traced)
        assert_like_eager(model, whole if index else alone, eager)
    assert seen.copied >= 1


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "change",
    [CHANGES[name] if name in SEEN_BY_GUARDS else exhaustive(CHANGES[name])[0] for name in CHANGES],
    ids=list(CHANGES),
)
def test_a_layer_that_changes(change: Callable[[Any], None], seen: Seen) -> None:
    """A copied layer's guards see what its own would have seen; then those of the traced one do."""
    eager = Model().double()
    model = fxzero.shard(copy.deepcopy(eager), zero=3)
    with traced(once=True):
        compiled = torch.compile(model, backend=computed_as_traced)
        assert_like_eager(model, compiled, eager)
        assert seen.copied == NUM_LAYERS - 1
        for index in (2, 0):
            for changed in (eager, model):
                change(changed.layers[index])  # type: ignore[index]
            assert_like_eager(model, compiled, eager)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("index", [2, *exhaustive(0)])
def test_a_layer_in_another_mode(index: int, seen: Seen) -> None:
    """``layer.eval()``, which torch's own reuse of traced layers does not see."""
    model = fxzero.shard(Model(), zero=3)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.dropout.p = 0.9
    with traced(once=True):
        compiled = compiled_by_fxzero(model)
        compiled(torch.ones(2, 8))
        assert seen.copied == NUM_LAYERS - 1
        model.eval()
        model.layers[index].train()  # type: ignore[index, union-attr]
        torch.manual_seed(1)
        first = compiled(torch.ones(2, 8))
        torch.manual_seed(2)
        assert not torch.equal(first, compiled(torch.ones(2, 8)))
        model.layers[index].eval()  # type: ignore[index, union-attr]
        assert torch.equal(compiled(torch.ones(2, 8)), compiled(torch.ones(2, 8)))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "shared",
    [
        lambda layers: setattr(layers[2].up, "weight", layers[0].up.weight),
        lambda layers: setattr(layers[2], "up", layers[1].up),
        lambda layers: setattr(layers[2].norm, "bias", layers[2].norm.weight),
        lambda layers: setattr(layers[3], "config", layers[2].norm),
    ],
    ids=["a weight", "a submodule", "a weight within", "an object"],
)
def test_layers_that_share(shared: Callable[[Any], None], seen: Seen) -> None:
    """What two layers have in common is one input of the graph, with the sum of its gradients."""
    eager = Model().double()
    for layer in eager.layers:
        layer.norm.scale = 1.5
    shared(eager.layers)
    model = fxzero.shard(copy.deepcopy(eager), zero=3)
    with traced(once=True):
        assert_like_eager(model, compiled_by_fxzero(model), eager)


class Calls(Model):
    """Calls its layers in a way of its own."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.way = way
        self.counts: list[int] = []
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.way(self, self.layers, self.first(x)))
        return result


def other_arguments(_: Any, layers: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        x = layer(x, scale=float(i))
    return x


def other_shapes(_: Any, layers: Any, x: Tensor) -> Tensor:
    x = layers[1](layers[0](x))
    return torch.cat([layers[2](x[:1]), layers[3](x[1:])])


def other_modes(_: Any, layers: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = layers[1](layers[0](x))
    return layers[3](layers[2](x))


def in_autocast(_: Any, layers: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in layers:
            x = layer(x)
    return x.float()


def several_results(_: Any, layers: Any, x: Tensor) -> Tensor:
    total = x.new_zeros(())
    for layer in layers:
        x, mean = layer(x, both=True)
        total = total + mean
    return x + total


def the_same_twice(_: Any, layers: Any, x: Tensor) -> Tensor:
    for layer in (*layers, *layers):
        x = layer(x)
    return x


def views(_: Any, layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x.t().contiguous().t()).view(2, 8)
    return x


def counted(model: Any, layers: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        model.config.scale = 1.0 + i  # which each layer reads
        x = layer(x)
    return x


def written(_: Any, layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x).add_(1).mul_(2)
    return x


def not_all(_: Any, layers: Any, x: Tensor) -> Tensor:
    for layer in (layers[3], layers[1], layers[2]):
        x = layer(x)
    return x


def penalised(model: Any, layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x + sum(p.square().mean() for p in model.parameters())  # which leaves out duplicates


def distinct(model: Any, layers: Any, x: Tensor) -> Tensor:
    results: list[Tensor] = []
    for layer in layers:
        x = layer(x)
        results += [x] if all(x is not other for other in results) else []
    parameters = [p for layer in layers for p in layer.parameters()]
    same = sum(a is b for a, b in itertools.product(parameters, parameters))
    return x * len(results) + same + len(set(parameters))


WAYS = [other_arguments, other_shapes, other_modes, several_results, written]
WAYS += [penalised, distinct]
WAYS += exhaustive(the_same_twice, views, counted, not_all)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_calls(way: Callable[..., Tensor], seen: Seen) -> None:
    """However a model calls its layers, it computes what it says."""
    check_calls(way, 3)


@pytest.mark.usefixtures("one_rank")
def test_all_parameters_where_each_is_a_plain_tensor(seen: Seen) -> None:
    check_calls(penalised, 0)
    assert seen.copied == NUM_LAYERS - 1


def check_calls(way: Callable[..., Tensor], zero: int) -> None:
    eager = Calls(way).double()
    model = fxzero.shard(copy.deepcopy(eager), zero)
    with traced(once=True):
        compiled = compiled_by_fxzero(model)
        assert_like_eager(model, compiled, eager)
        assert_like_eager(model, compiled, eager)


def in_a_batch_of_its_own(h: Tensor) -> Tensor:
    return torch.vmap(torch.tanh)(h)


def through_sparse(h: Tensor) -> Tensor:
    return h.to_sparse().to_dense().tanh()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("act", [in_a_batch_of_its_own, *exhaustive(through_sparse)])
def test_values_without_memory_of_their_own(act: Callable[[Tensor], Tensor], seen: Seen) -> None:
    """Such a layer is traced each time: Mamba's ends in a `torch.vmap`."""
    eager = Model().double()
    for layer in eager.layers:
        layer.act = act  # type: ignore[assignment]
    model = fxzero.shard(copy.deepcopy(eager), zero=3)
    with traced(once=True):
        assert_like_eager(model, compiled_by_fxzero(model), eager)
    assert seen.copied == 0


class Holder:
    """An object outside of the model that a forward changes."""

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale
        self.values = {"scale": scale}


HOLDER = Holder()


def change_what_nobody_reads(model: Any) -> None:
    HOLDER.scale = HOLDER.scale + 1
    model.note = "seen"


def change_what_each_reads(model: Any) -> None:
    model.config.scale = 5.0


def change_what_one_reads(model: Any) -> None:
    model.layers[2].config.scale = 5.0


def change_what_one_is(model: Any) -> None:
    model.layers[1].reads_index = True


def change_a_submodule(model: Any) -> None:
    model.layers[3].norm.eps = 0.5


def change_what_a_closure_reads(_: Any) -> None:
    HOLDER.scale = 5.0


def change_what_a_dict_holds(_: Any) -> None:
    HOLDER.values["scale"] = 5.0


def own_config(model: Any) -> None:
    model.layers[2].config = Config()


def read_by_one(model: Any) -> None:
    model.layers[2].act = lambda x: x * HOLDER.scale


def read_by_all(model: Any) -> None:
    for layer in model.layers:
        layer.act = lambda x: x * HOLDER.scale


def read_through_vars(model: Any) -> None:
    for layer in model.layers:
        layer.act = lambda x: x * vars(HOLDER)["scale"]


def read_if_there(model: Any) -> None:
    for layer in model.layers:
        layer.act = lambda x: x * getattr(HOLDER, "late", 1.0)


def set_late(_: Any) -> None:
    HOLDER.late = 3.0  # type: ignore[attr-defined]


def read_from_a_dict(model: Any) -> None:
    for layer in model.layers:
        layer.act = lambda x: x * HOLDER.values["scale"]


def nothing(_: Any) -> None:
    pass


CHANGED_FIRST = [
    (nothing, change_what_nobody_reads, NUM_LAYERS - 1),
    (nothing, change_what_each_reads, 0),
    (own_config, change_what_one_reads, NUM_LAYERS - 2),
    (nothing, change_what_one_is, NUM_LAYERS - 2),
    (nothing, change_a_submodule, NUM_LAYERS - 2),
    (read_by_one, change_what_a_closure_reads, NUM_LAYERS - 2),
    (read_by_all, change_what_a_closure_reads, 0),
    (read_through_vars, change_what_a_closure_reads, 0),
    (read_if_there, set_late, 0),
    (read_from_a_dict, change_what_a_dict_holds, 0),
]
WHEN = ("before the layers", "after the first")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("when", "prepare", "change", "copied"),
    in_two_tiers(
        [(when, *case) for case in CHANGED_FIRST for when in WHEN],
        always=[(WHEN[0], own_config, change_what_one_reads, NUM_LAYERS - 2)],
    ),
    ids=[f"{when}-{f.__name__}-{g.__name__}" for f, g, _ in CHANGED_FIRST for when in WHEN],
)
def test_a_forward_that_changes_objects(
    prepare: Callable[[Any], None],
    change: Callable[[Any], None],
    copied: int,
    when: str,
    seen: Seen,
) -> None:
    """What the compiled function has changed is not there yet for guards; layers that read it are
    traced one by one, and those that do not are copied."""

    def way(model: Any, layers: Any, x: Tensor) -> Tensor:
        if when == "before the layers":
            change(model)
        for i, layer in enumerate(layers):
            x = layer(x)
            if i == 0 and when == "after the first":
                change(model)
        return x

    def like_new() -> None:
        vars(HOLDER).clear()
        vars(HOLDER).update(vars(Holder()))

    eager = Calls(way).double()
    prepare(eager)
    model = fxzero.shard(copy.deepcopy(eager), zero=3)
    with traced(once=True):
        compiled = torch.compile(model, backend=computed_as_traced)
        for call in range(2):
            like_new()
            found = steps(model, compiled)
            like_new()
            for value, expected in zip(found, steps(eager, eager), strict=True):
                limit = 1e-12 * float(expected.abs().max() + 1)
                assert torch.allclose(value, expected, rtol=0, atol=limit)
            if when == "before the layers" and call == 0:
                assert seen.copied == copied


class Book(dict[str, float]):
    """A dict that is an object as well."""

    note = ""


BOOK = Book(scale=2.0)


@pytest.mark.usefixtures("one_rank")
def test_a_forward_that_changes_a_dict_with_attributes(seen: Seen) -> None:
    """An attribute of it before the layers, and what it holds between two of them."""

    def way(model: Any, layers: Any, x: Tensor) -> Tensor:
        BOOK.note = "seen"
        for i, layer in enumerate(layers):
            x = layer(x)
            BOOK["scale"] = 3.0 + i
        return x

    eager = Calls(way).double()
    for layer in eager.layers:
        layer.act = lambda x: x * BOOK["scale"]
    model = fxzero.shard(copy.deepcopy(eager), zero=3)
    with traced(once=True):
        BOOK["scale"] = 2.0
        found = steps(model, compiled_by_fxzero(model))
        BOOK["scale"] = 2.0
        for value, expected in zip(found, steps(eager, eager), strict=True):
            limit = 1e-12 * float(expected.abs().max() + 1)
            assert torch.allclose(value, expected, rtol=0, atol=limit)
    assert seen.copied == 0


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "entry", ["no_grad", "autocast inside", *exhaustive("inference_mode", "autocast")]
)
def test_a_model_in_another_mode(entry: str, seen: Seen) -> None:
    """It trains, is read in a mode of torch, or has one of its own, and trains on."""
    eager = Calls(in_autocast if entry == "autocast inside" else not_all)
    model = fxzero.shard(copy.deepcopy(eager), zero=3)
    x = torch.randn(2, 8)
    mode: Any = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "autocast inside": contextlib.nullcontext,
    }[entry]
    with traced(once=True):
        compiled = compiled_by_fxzero(model)
        for context in (contextlib.nullcontext, mode, contextlib.nullcontext, mode):
            with context():
                ours, theirs = compiled(x), eager(x)
            rounded = entry.startswith("autocast")
            near = 0.05 if rounded else 1e-5  # a fused region does not round between operators
            assert (ours - theirs).abs().max() <= near * theirs.abs().max()
            if ours.requires_grad:
                ours.sum().backward()
        assert all(parameter.grad is not None for parameter in model.layers[1].parameters())
    if entry == "autocast inside":
        assert seen.copied


@pytest.mark.usefixtures("one_rank")
def test_given_parameters_are_not_those_of_another_layer(seen: Seen) -> None:
    """``functional_call`` gives each layer tensors of which no guard of the layer knows."""
    eager = Model().double()
    given = {n: p.detach() * (1 + i) for i, (n, p) in enumerate(eager.named_parameters())}
    model = fxzero.shard(copy.deepcopy(eager), zero=3)

    def call(x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(model, given, (x,))
        return result

    x = torch.ones(2, 8, dtype=torch.float64)
    expected = torch.func.functional_call(eager, given, (x,))
    with traced(once=True):
        found = compiled_by_fxzero(call)(x)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.usefixtures("one_rank")
def test_what_was_compiled_does_not_keep_a_model_alive(seen: Seen) -> None:
    """The guards that layers share hold on to none of them."""
    model = fxzero.shard(Model(), zero=3)
    with traced(once=True):
        compiled = torch.compile(model, backend=seen.backend)
        compiled(torch.ones(2, 8))
    assert seen.copied == NUM_LAYERS - 1
    seen.graphs.clear()
    alive = [weakref.ref(model.layers[i]) for i in range(NUM_LAYERS)]  # type: ignore[index]
    del model, compiled
    gc.collect()
    assert [layer() for layer in alive] == [None] * NUM_LAYERS


def test_models_that_are_not_sharded_are_traced_as_ever(seen: Seen) -> None:
    fxzero.shard(nn.Linear(2, 2), zero=0)
    torch.compile(Model(), backend=seen.backend)(torch.ones(2, 8))
    assert seen.copied == 0
