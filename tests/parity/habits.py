"""Habits of real training code: models and loops as people write them.

Each habit builds a model and says what happens around its steps. `tests/parity/test_habits.py`
runs it on two ranks, at every stage and through every door, against the same code in one
eager process: equal numbers, or an error of fxzero's on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 8, 6
ALL = ("eager", "compile", "step")


@dataclass
class Run:
    """One training run, of a sharded model or of its reference."""

    model: nn.Module
    forward: nn.Module
    """What is called: the model, or what torch.compile made of it."""
    optimizer: Optimizer
    extra: Any = None
    """What the habit keeps: an averaged model, say."""


@dataclass(frozen=True)
class Habit:
    """Something that people do."""

    build: Callable[[], nn.Module]
    """A model of (B, 6) inputs, or of what `batch` makes, that returns its loss."""
    before_shard: Callable[[nn.Module], Any] = lambda model: None
    """Done to the model before `shard`; what it returns is kept."""
    after_shard: Callable[[nn.Module], None] = lambda model: None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = lambda p: torch.optim.AdamW(p, 1e-2)
    loss: Callable[[Run, Tensor], Tensor] | None = None
    """The loss of a batch in an ordinary loop, where it is not the model's output."""
    after_backward: Callable[[Run], None] = lambda run: None
    after_step: Callable[[Run], None] = lambda run: None
    batch: Callable[[int], Tensor] = lambda seed: _normal(seed)
    doors: tuple[str, ...] = ALL
    refused: dict[str, str] = field(default_factory=dict)
    """What fxzero says where it refuses, by door, or by door and stage: ``"step 3"``. Where
    Dynamo stops before fxzero sees the graph, what Dynamo says."""
    rtol: float = 1e-12
    warns: str = ""
    """A warning of fxzero's that may come."""


def _normal(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def _tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 10, (ROWS, 5), generator=generator)


class Plain(nn.Module):
    """Two linear layers and a scale, in whose forward a habit has its place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.second = nn.Linear(7, 3)
        self.weight = nn.Parameter(torch.randn(7, 7) / 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def hidden(self, x: Tensor) -> Tensor:
        """(B, 6) to (B, 7)."""
        return torch.tanh(self.first(x)) @ self.weight

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) to a scalar."""
        return (self.second(self.hidden(x)) * self.scale).square().mean()


def habit(**settings: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Make a habit of a model's class."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        HABITS[cls.__name__] = Habit(cls, **settings)
        return cls

    return register


HABITS: dict[str, Habit] = {}

# -- parameters reached around their module


@habit()
class InATuple(Plain):
    """The tuple was filled before `shard`."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = (self.weight,)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) @ self.kept[0]


@habit()
class InATupleToo(InATuple):
    """The tuple and the module's property, in one forward."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) @ self.weight


@habit()
class InAPartial(Plain):
    """A functional bound in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.project = functools.partial(F.linear, weight=self.weight)

    def hidden(self, x: Tensor) -> Tensor:
        return self.project(torch.tanh(self.first(x)))


@habit()
class InAClosure(Plain):
    """A function that has closed over a parameter."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.weight
        self.project = lambda h: h @ weight

    def hidden(self, x: Tensor) -> Tensor:
        return self.project(torch.tanh(self.first(x)))


@habit()
class ByName(Plain):
    """A dictionary of named parameters, in the forward."""

    def hidden(self, x: Tensor) -> Tensor:
        named = dict(self.named_parameters())
        return torch.tanh(F.linear(x, named["first.weight"], named["first.bias"])) @ named["weight"]


@habit(warns="several graphs")  # the graph ends before the product
class ThroughTheDict(Plain):
    """``self._parameters``."""

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) @ self._parameters["weight"]


@habit()
class ByGetParameter(Plain):
    """``self.get_parameter``."""

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) @ self.get_parameter("weight")


@habit()
class Regularised(Plain):
    """A penalty on all parameters, in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * sum(p.square().sum() for p in self.parameters())


@habit()
class DtypeOfFirstParameter(Plain):
    """What transformers' ``self.dtype`` does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(next(self.parameters()).dtype))


@habit()
class ReadByAnother(Plain):
    """A parent computes with its child's weight."""

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.first.weight, self.first.bias)) @ self.weight


@habit()
class Tied(Plain):
    """One tensor in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(7, 7, bias=False)
        self.third.weight = self.weight

    def hidden(self, x: Tensor) -> Tensor:
        return self.third(super().hidden(x))


def _tie(model: Any) -> None:
    model.third.weight = model.weight


@habit(after_shard=_tie, doors=("eager", "compile", "step"))
class TiedAfterShard(Plain):
    """``head.weight = embedding.weight`` when everything is built."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(7, 7, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        return self.third(super().hidden(x))


def _functional(run: Run, x: Tensor) -> Tensor:
    return torch.func.functional_call(run.forward, dict(run.model.named_parameters()), (x,))


HABITS["functional_call"] = Habit(Plain, loss=_functional, doors=("eager",))


def _penalty_outside(run: Run, x: Tensor) -> Tensor:
    penalty: Any = sum(p.square().sum() for p in run.model.parameters())
    return run.forward(x) + 0.01 * _plain(penalty)


def _plain(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


HABITS["penalty in the loop"] = Habit(Plain, loss=_penalty_outside, doors=("eager", "compile"))


class Headless(Plain):
    """Returns what a head outside of it computes with."""

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x)


def _head_outside(run: Run, x: Tensor) -> Tensor:
    hidden = run.forward(x)
    return F.linear(hidden, run.model.second.weight, run.model.second.bias).square().mean()


HABITS["head in the loop"] = Habit(Headless, loss=_head_outside, doors=("eager", "compile"))

# -- writes to parameters

_WRITES = "inside of a forward|changes .* in place"


class RenormalisedEmbedding(nn.Module):
    """``nn.Embedding(max_norm=…)`` writes to its weight in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, max_norm=0.5)
        self.rest = Plain()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rest(self.embedding(tokens).mean(1))


HABITS["RenormalisedEmbedding"] = Habit(
    RenormalisedEmbedding, batch=_tokens, refused=dict.fromkeys(ALL, _WRITES)
)


@habit(refused=dict.fromkeys(ALL, _WRITES))
class NormalisedByHand(Plain):
    """Weight normalisation in the forward, under no_grad."""

    def hidden(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().hidden(x)


@habit(refused=dict.fromkeys(ALL, _WRITES))
class TeacherInForward(Plain):
    """An exponential moving average of parameters, in parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Parameter(self.weight.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.mul_(0.9).add_(self.weight, alpha=0.1)
        return super().forward(x) + (self.hidden(x) @ self.teacher).square().mean()


def _clamp(run: Run) -> None:
    with torch.no_grad():
        run.model.scale.clamp_(max=1.4)  # type: ignore[operator, union-attr]
        run.model.first.weight.data.clamp_(-0.3, 0.3)  # type: ignore[union-attr, operator]


HABITS["clamped after the step"] = Habit(Plain, after_step=_clamp)  # CLIP's logit_scale


def _initialise(model: Any) -> None:
    torch.manual_seed(7)
    nn.init.normal_(model.first.weight, std=0.5)
    nn.init.kaiming_uniform_(model.second.weight)
    nn.init.zeros_(model.first.bias)
    with torch.no_grad():
        model.weight.uniform_(-0.1, 0.1)
        model.weight[2] = 0.0
        model.second.bias.copy_(torch.arange(3.0, dtype=torch.float64))


HABITS["initialised after shard"] = Habit(Plain, after_shard=_initialise)


def _average(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _follow(run: Run) -> None:
    """A moving average in the loop, which training then starts from."""
    if run.extra is None:
        run.extra = _average(run.model)
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            run.extra[name].lerp_(parameter, 0.1)
            parameter.copy_(parameter * 0.9 + run.extra[name] * 0.1)


HABITS["moving average in the loop"] = Habit(Plain, after_step=_follow)


def _decay_by_hand(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.sub_(0.01 * parameter)
            parameter.data.mul_(0.99)


HABITS["decay by hand"] = Habit(Plain, after_step=_decay_by_hand)

# -- optimizers and gradients


def _early(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


HABITS["optimizer made before shard"] = Habit(Plain, before_shard=_early)
HABITS["groups made before shard"] = Habit(
    Plain,
    before_shard=lambda model: torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2]},
        ],
        lr=0.1,
        momentum=0.9,
    ),
)


def _clip_values(run: Run) -> None:
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.01)


HABITS["clip_grad_value_"] = Habit(Plain, after_backward=_clip_values, doors=("eager", "compile"))


def _scale_gradients(run: Run) -> None:
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
            parameter.grad.data.add_(parameter.detach(), alpha=0.01)


HABITS["gradients changed in place"] = Habit(
    Plain, after_backward=_scale_gradients, doors=("eager", "compile")
)


def _norms(run: Run) -> None:
    norms = [float(_plain(p.norm())) for p in run.model.parameters()]
    largest = [float(_plain(p.abs().max())) for p in run.model.parameters()]
    run.extra = torch.tensor(norms + largest, dtype=torch.float64)


HABITS["norms logged"] = Habit(Plain, after_step=_norms)


def _freeze(run: Run) -> None:
    run.model.first.requires_grad_(not run.model.first.weight.requires_grad)  # type: ignore[operator, union-attr, arg-type]


HABITS["frozen and thawed"] = Habit(
    Plain, after_step=_freeze, optimizer=lambda p: torch.optim.SGD(p, 0.1)
)


def _to_same(model: nn.Module) -> None:
    model.to("cpu").double().to(torch.float64)


HABITS["to the same device"] = Habit(Plain, after_shard=_to_same)


def _half(model: nn.Module) -> None:
    model.half()


HABITS["half after shard"] = Habit(
    Plain, after_shard=_half, refused={f"{d} {z}": "cannot become" for d in ALL for z in range(4)}
)


def _new_weight(model: Any) -> None:
    model.second.weight = nn.Parameter(torch.zeros(3, 7, dtype=torch.float64))


HABITS["a new parameter after shard"] = Habit(
    Plain,
    after_shard=_new_weight,
    refused={f"{d} {z}": "assigned a new tensor" for d in ALL for z in range(4)},
)

# -- forwards


@habit()
class Checkpointed(Plain):
    """`torch.utils.checkpoint` around a function that reads parameters itself."""

    def hidden(self, x: Tensor) -> Tensor:
        return checkpoint(super().hidden, x, use_reentrant=False)


@habit()
class CheckpointedLayers(nn.Module):
    """Equal layers, each checkpointed, as transformers does it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.rest = Plain()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda h, layer=layer: torch.tanh(layer(h)), x, use_reentrant=False)
        return self.rest(x)


class _Constant(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * torch.tensor([1.0, 0.5, 0.25, 2.0, 3.0, 1.5]).to(x)


@habit()
class EqualLayersWithConstants(nn.Module):
    """``torch.tensor([…])`` in layers that are traced once, and another one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Constant(i) for i in range(3))
        self.rest = Plain()

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).to(x)
        for layer in self.layers:
            x = layer(x)
        return self.rest(x)


@habit()
class WithABatchNorm(nn.Module):
    """Running statistics are rank 0's, as in DDP; the loss does not depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False, affine=True)
        self.rest = Plain()

    def forward(self, x: Tensor) -> Tensor:
        # Statistics of half a batch are not those of a batch: take them out of the numbers.
        return self.rest(F.batch_norm(x, x.mean(0).detach() * 0, x[0].detach() * 0 + 1) * 1.0)


@habit(warns="several graphs")
class Recurrent(nn.Module):
    """nn.LSTM, which keeps its weights in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.rest = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.lstm(x[:, None])[0][:, 0])


# The gradient of the keys' bias is zero but for rounding, which Adam would blow up.
@habit(optimizer=lambda p: torch.optim.SGD(p, 0.1))
class Attentive(nn.Module):
    """nn.MultiheadAttention reads its child's weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.rest = Plain()

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 2, WIDTH)
        return self.rest(self.attention(x, x, x, need_weights=False)[0].reshape(-1, WIDTH))


@habit()
class WeightNormalised(nn.Module):
    """`torch.nn.utils.parametrizations.weight_norm`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.rest = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.linear(x))


@habit(warns="several graphs")
class BreaksTheGraph(Plain):
    """A branch on a value, the same on all ranks."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if float(self.scale) > 100:
            h = h * 2
        return h


class ReturnsADict(Plain):
    """A mapping with a loss, as transformers' models return."""

    def forward(self, x: Tensor) -> Any:
        return {"loss": super().forward(x), "hidden": self.hidden(x)}


HABITS["ReturnsADict"] = Habit(ReturnsADict, loss=lambda run, x: run.forward(x)["loss"])


@habit()
class DoesNotUseAll(Plain):
    """A parameter that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


@habit()
class UsesNoGrad(Plain):
    """A part of the forward under no_grad."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.hidden(x) * 0.1
        return super().forward(x) + (self.hidden(x) - target).square().mean()


@habit()
class Detaches(Plain):
    """A stopped gradient of a parameter itself."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) @ self.weight.detach().t()


@habit()
class Transposes(Plain):
    """Views of parameters: ``.t()``, ``.T``, slices."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) @ self.weight.T @ self.weight[:, :7].t()


@habit()
class KeepsAnAverage(Plain):
    """A buffer that follows a parameter, in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(7, 7))

    def hidden(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(self.weight, alpha=0.1)
        return super().hidden(x) + 0.1 * (self.first(x) @ self.average)


def _hooked(model: Any) -> None:
    model.first.register_forward_hook(lambda module, args, output: output * 1.5)
    model.second.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


HABITS["forward hooks"] = Habit(Plain, before_shard=_hooked)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


@habit()
class OwnFunction(Plain):
    """A custom `autograd.Function` that gets a parameter."""

    def hidden(self, x: Tensor) -> Tensor:
        return _Square.apply(torch.tanh(self.first(x)), self.weight)


@habit()
class ListOfParameters(Plain):
    """nn.ParameterList and nn.ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ParameterList(nn.Parameter(torch.randn(7, 7) / 3) for _ in range(2))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(7))})

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        for weight in self.more:
            h = torch.tanh(h @ weight)
        return h + self.named["a"]


class UsedTwice(Plain):
    """The same module twice in a forward, and two forwards before a backward."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(torch.tanh(self.first(x))[:, :WIDTH])


HABITS["UsedTwice"] = Habit(
    UsedTwice,
    loss=lambda run, x: run.forward(x) + run.forward(x * 0.5),
    doors=("eager", "compile"),
)


@habit()
class TransposedParameter(nn.Module):
    """A parameter whose memory is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 9).t())
        self.rest = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest((x @ self.weight.t()) @ self.weight)


@habit()
class ChannelsLast(nn.Module):
    """Convolutions in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.rest = Plain()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.reshape(-1, 2, 1, 3).expand(-1, 2, 2, 3))
        return self.rest(y.reshape(-1, 8)[:, :WIDTH])


@habit(warns="several graphs")
class MasksRows(Plain):
    """``x[mask]``: how many rows there are depends on the values."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], dtype=torch.bool) & (x[:, 0] < 1e9)
        return super().forward(x[mask])


@habit(warns="several graphs")
class Prints(Plain):
    """Somebody is debugging."""

    def hidden(self, x: Tensor) -> Tensor:
        print("hidden", x.shape)
        return super().hidden(x)


class SparseEmbedding(nn.Module):
    """nn.Embedding(sparse=True)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, sparse=True)
        self.rest = Plain()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rest(self.embedding(tokens).mean(1))


HABITS["SparseEmbedding"] = Habit(
    SparseEmbedding,
    batch=_tokens,
    optimizer=lambda p: torch.optim.SGD(p, 0.1),
    refused=dict.fromkeys(ALL, "sparse"),
)


# -- more habits: adapters, averages, hooks, several optimizers


@habit()
class WithAnAdapter(Plain):
    """LoRA: a frozen base and a low-rank product, merged in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(7, 2))
        self.up = nn.Parameter(torch.randn(2, 7) / 5)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) @ (self.weight + self.down @ self.up)


@dataclass
class _Holder:
    weight: nn.Parameter


@habit()
class InADataclass(Plain):
    """A configuration object that holds a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = _Holder(self.weight)
        self.by_name = {"weight": self.weight}

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) @ self.holder.weight @ self.by_name["weight"]


@habit()
class ThroughAProperty(Plain):
    """A property of the module that returns a parameter."""

    @property
    def kernel(self) -> Tensor:
        """(7, 7)."""
        return self.weight

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) @ self.kernel


class InAnAutocast(Plain):
    """bf16 in a part of the forward."""

    def hidden(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):  # which leaves float64 alone
            return (h @ self.weight.float()).to(x.dtype)


HABITS["InAnAutocast"] = Habit(InAnAutocast, rtol=1e-2, optimizer=lambda p: torch.optim.SGD(p, 0.1))


def _assign_data(model: Any) -> None:
    model.first.weight.data = torch.full((7, WIDTH), 0.1, dtype=torch.float64)
    model.weight.data = model.weight * 0.5


HABITS["data assigned"] = Habit(Plain, after_shard=_assign_data)


def _apply_init(model: nn.Module) -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.constant_(module.bias, 0.1)
            module.weight.data[0] = 0.5

    torch.manual_seed(3)
    model.apply(initialise)


HABITS["apply(init) after shard"] = Habit(Plain, after_shard=_apply_init)


def _load_full(model: nn.Module) -> None:
    torch.manual_seed(9)
    model.load_state_dict(Plain().double().state_dict())


HABITS["a full state loaded after shard"] = Habit(Plain, after_shard=_load_full)


def _hook(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)


HABITS["gradient hooks"] = Habit(
    Plain, after_shard=_hook, refused={"step": "gradient hook"}, warns="several graphs"
)


def _momentum_by_hand(run: Run) -> None:
    if run.extra is None:
        run.extra = {name: torch.zeros_like(p) for name, p in run.model.named_parameters()}
    for name, parameter in run.model.named_parameters():
        if parameter.grad is not None:
            run.extra[name].mul_(0.9).add_(parameter.grad)
            parameter.grad.copy_(run.extra[name])


HABITS["momentum by hand"] = Habit(
    Plain, after_backward=_momentum_by_hand, doors=("eager", "compile")
)


def _vector(run: Run) -> None:
    """Every parameter shrunk, as one loop over tensors of the same kind."""
    parameters = list(run.model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.99)


HABITS["foreach over parameters"] = Habit(Plain, after_step=_vector)


def _grow(model: nn.Module) -> Optimizer:
    """Groups that are added one by one, before `shard`."""
    first, *others = list(model.parameters())
    optimizer = torch.optim.AdamW([first], lr=1e-2)
    for parameter in others:
        optimizer.add_param_group({"params": [parameter], "lr": 5e-3})
    return optimizer


HABITS["add_param_group before shard"] = Habit(Plain, before_shard=_grow)


class GradientPenalty(Plain):
    """Uses the gradient of its inputs."""


def _input_gradient(run: Run, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    loss = run.forward(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    # A rank's loss is the mean over its rows: its rows' gradients are as many times larger.
    rows = gradient * x.shape[0]
    return loss + rows.square().sum(1).mean()


HABITS["GradientPenalty"] = Habit(GradientPenalty, loss=_input_gradient, doors=("eager",))


@habit(warns="several graphs")
class ChoosesByConfiguration(Plain):
    """A module picked by a number that is the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(7, 7), "b": nn.Linear(7, 7)})
        self.calls = 0

    def hidden(self, x: Tensor) -> Tensor:
        return self.heads["a" if self.calls == 0 else "b"](super().hidden(x))


@habit()
class Scans(Plain):
    """A Python loop over time steps with one weight."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        for _ in range(4):
            h = torch.tanh(h @ self.weight + self.first(x))
        return h


@habit()
class Einsum(Plain):
    """Higher-dimensional parameters, in products by index."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 7, 7) / 3)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        gate = torch.softmax(h[:, :3], -1)
        return torch.einsum("bi,eij,be->bj", h, self.experts, gate)


@habit()
class Indexes(Plain):
    """Rows of a parameter by a tensor of indices, and by a slice."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        rows = self.weight[(x[:, 0] > 0).long() * 3]
        return h * rows + self.weight[2:3]


@habit()
class CountsItsCalls(Plain):
    """Sets attributes of a module that has parameters, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.last_shape: tuple[int, ...] = ()

    def hidden(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.last_shape = tuple(x.shape)
        return super().hidden(x)
