"""AdamW, Adagrad and Muon in plain tensors: every hyper-parameter and step count is a 0-d tensor, filled in place.

A Python number in a compiled update is a constant of its graph: a new learning rate would be a new graph. A 0-d tensor
is an input, so that the update of all parameters is one graph. A schedule fills tensors, as torch's own schedulers do:
`optimizer.param_groups[i]["lr"].fill_(value)`.

A, B the two sides of a matrix, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from launch.dist.shards import gathered, local, part_of
from launch.policies import Backend
from model.layers import widen
from model.moe import MoEBlock

# Five quintic steps x <- a x + b x^3 + c x^5 (Polar Express, Amsel et al. 2025, arXiv 2505.16932; safety factor 2e-2).
# Composed, they map every singular value from [1e-3, 1] / 1.01 into POLAR_BOUNDS.
POLAR_STEPS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
POLAR_NORM_MARGIN = 1.01
POLAR_BOUNDS = (0.85, 1.15)

Named = dict[str, Tensor]


def adamw_(p: Tensor, g: Tensor, state: Named, hyper: Named) -> None:
    """One AdamW step of p, in place; decoupled weight decay, moments and arithmetic in fp32 or wider.

    Source: Loshchilov & Hutter 2019.
    """
    beta1, beta2, lr = hyper["beta1"], hyper["beta2"], hyper["lr"]
    step = state["step"].add_(1)
    g, w = g.to(state["mean"].dtype), widen(p)
    mean = state["mean"].mul_(beta1).add_(g * (1 - beta1))
    square = state["square"].mul_(beta2).add_(g * g * (1 - beta2))
    scale = (square / (1 - beta2**step)).sqrt() + hyper["eps"]
    w = w * (1 - lr * hyper["weight_decay"])
    p.copy_(w - lr / (1 - beta1**step) * (mean / scale))


def adagrad_(p: Tensor, g: Tensor, state: Named, hyper: Named) -> None:
    """One Adagrad step of p, in place; weight decay is an L2 term of the gradient. Source: Duchi et al. 2011."""
    rate = hyper["lr"] / (1 + state["step"] * hyper["lr_decay"])
    state["step"].add_(1)
    w = widen(p)
    g = g.to(w.dtype) + hyper["weight_decay"] * w
    total = state["total"].add_(g * g)
    p.copy_(w - rate * (g / (total.sqrt() + hyper["eps"])))


def polar(x: Tensor) -> Tensor:
    """Move the singular values of x (..., A, B) near 1; singular vectors and dtype are kept. Zero stays zero."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / (norm * POLAR_NORM_MARGIN).clamp(min=torch.finfo(x.dtype).tiny)
    for a, b, c in POLAR_STEPS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def muon_(batch: list[tuple[Tensor, Tensor, Named, Named]]) -> None:
    """One Muon step, in place, of parameters of one shape (A,B) or (E,A,B): orthogonalized momentum at AdamW's scale.

    0.2 sqrt(max(A,B)) gives the update the RMS of AdamW's (Moonlight, arXiv 2502.16982). Weight decay is cautious: only
    where the step already shrinks the weight. The product chain runs on the stacked parameters, in bf16 if the device
    has matrix units for it. Of a sharded matrix, the momentum is gathered and each rank applies its part.
    """
    ahead = []
    for p, g, state, hyper in batch:
        mu = hyper["momentum"]
        fresh = widen(local(g).to(p.dtype)) * (1 - mu)
        momentum = local(state["momentum"]).mul_(mu).add_(fresh)
        ahead.append(gathered(fresh + momentum * mu, p))  # Nesterov
    stack = torch.stack(ahead)
    units = stack.device.type in ("cuda", "xla") and stack.dtype == torch.float32
    directions = polar(stack.bfloat16() if units else stack).to(stack.dtype).unbind()
    for (p, _, _, hyper), direction in zip(batch, directions):
        w, direction = widen(local(p)), part_of(direction, p)
        decay = torch.where(direction * w > 0, hyper["weight_decay"] * w, 0.0)
        local(p).copy_(w - hyper["lr"] * (direction * (0.2 * max(p.shape[-2:]) ** 0.5) + decay))


class GroupRule(NamedTuple):
    """Contents of a group of this rule: hyper-parameters, and the state tensors with the shape of each parameter."""

    hyper: tuple[str, ...]
    state: tuple[str, ...]


RULES = {
    "adamw": GroupRule(("lr", "beta1", "beta2", "eps", "weight_decay"), ("mean", "square")),
    "adagrad": GroupRule(("lr", "lr_decay", "eps", "weight_decay"), ("total",)),
    "muon": GroupRule(("lr", "momentum", "weight_decay"), ("momentum",)),
}


def update(work: list[tuple[str, Tensor, Tensor, Named, Named]]) -> None:
    """Update all parameters; items are (rule, parameter, gradient, state, hyper-parameters). One graph if compiled."""
    matrices: dict[Any, list[tuple[Tensor, Tensor, Named, Named]]] = {}
    for rule, p, g, state, hyper in work:
        if rule == "adamw":
            adamw_(p, g, state, hyper)
        elif rule == "adagrad":
            adagrad_(p, g, state, hyper)
        else:
            matrices.setdefault((p.shape, p.dtype), []).append((p, g, state, hyper))
    for batch in matrices.values():
        muon_(batch)


class TensorOptimizer(torch.optim.Optimizer):
    """Base class of the three optimizers. Each group names its `rule`; its hyper-parameters become 0-d tensors.

    They and the step counts are on the CPU, or with `capturable` on the parameters' device, as CUDA graphs and XLA
    require. Their dtype is fp32, fp64 only for fp64 parameters: of a 0-d fp64 CPU tensor Dynamo compiles twice.

    compile: turn the update into one graph.
    backend: of torch.compile.
    options: the hyper-parameters of DEFAULTS. Raises TypeError on another one.
    """

    RULE: str
    DEFAULTS: Mapping[str, Any]

    def __init__(
        self,
        params: Iterable[Any],
        *,
        compile: bool = False,
        capturable: bool = False,
        backend: Backend = "inductor",
        **options: Any,
    ) -> None:
        if unknown := sorted(options.keys() - self.DEFAULTS.keys()):
            raise TypeError(f"unknown option {unknown[0]!r}: expected one of {', '.join(self.DEFAULTS)}")
        chosen: dict[str, Any] = {"rule": self.RULE, **self.DEFAULTS, **options}
        if "betas" in chosen:
            chosen["beta1"], chosen["beta2"] = chosen.pop("betas")
        self.capturable = capturable
        super().__init__(params, chosen)
        graph = {"fullgraph": True, "dynamic": False, "backend": backend}
        self._update = torch.compile(update, **graph) if compile else update

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; raises ValueError on an unknown rule, or on Muon for a parameter that is not a matrix."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["rule"] not in RULES:
            raise ValueError(f"unknown rule {group['rule']!r}: expected one of {', '.join(RULES)}")
        if group["rule"] == "muon" and any(p.ndim not in (2, 3) for p in group["params"]):
            raise ValueError("muon takes matrices (A,B) and stacks of them (E,A,B); give the others to adamw")
        for name in RULES[group["rule"]].hyper:
            group[name] = self._scalar(float(group[name]), group["params"][0])

    def _scalar(self, value: float, p: Tensor) -> Tensor:
        wide = torch.promote_types(p.dtype, torch.float32)
        return torch.tensor(value, dtype=wide, device=p.device if self.capturable else "cpu")

    def hyper(self, group: dict[str, Any]) -> Named:
        """Return the group's hyper-parameters for the update. Raises TypeError if one is no longer a tensor."""
        found = {name: group[name] for name in RULES[group["rule"]].hyper}
        for name, value in found.items():
            if not isinstance(value, Tensor):
                raise TypeError(f'{name} must stay a tensor: group["{name}"].fill_({value}), no assignment')
        return found

    def _state(self, rule: str, p: Tensor) -> Named:
        """Return the parameter's state; zeros at its first step and after a reset."""
        state = self.state[p]
        if not state:
            wide = torch.promote_types(p.dtype, torch.float32)
            for name in RULES[rule].state:
                state[name] = torch.zeros_like(p, dtype=wide, memory_format=torch.preserve_format)
            if rule != "muon":
                state["step"] = self._scalar(0.0, p)
            if rule == "adagrad":
                state["total"].fill_(self.defaults["initial_total"])
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Takes no closure."""
        work = []
        for group in self.param_groups:
            hyper, rule = self.hyper(group), group["rule"]
            for p in group["params"]:
                if p.grad is not None:
                    state = self._state(rule, p)
                    parts: tuple[Any, ...] = p, p.grad, state
                    if rule != "muon":  # elementwise: each rank updates its part
                        parts = local(p), local(p.grad), {name: local(t) for name, t in state.items()}
                    work.append((rule, *parts, hyper))
        self._update(work)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load exactly the saved values into new tensors: torch's version casts fp32 state to 16 bits or aliases it."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            like = group["params"][0]
            for name in RULES[group["rule"]].hyper:
                group[name] = self._scalar(float(saved[name]), like)
            for p, index in zip(group["params"], saved["params"]):
                for name, value in state_dict["state"].get(index, {}).items():
                    own = self._scalar(0.0, p) if name == "step" else torch.empty_like(p, dtype=value.dtype)
                    local(own).copy_(part_of(value, own))
                    self.state[p][name] = own


class AdamW(TensorOptimizer):
    """AdamW, equal to torch.optim.AdamW."""

    RULE = "adamw"
    DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class Adagrad(TensorOptimizer):
    """Adagrad, equal to torch.optim.Adagrad; initial_total is torch's initial_accumulator_value."""

    RULE = "adagrad"
    DEFAULTS = {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_total": 0.0, "eps": 1e-10}


class Muon(TensorOptimizer):
    """Muon for matrices; groups with rule="adamw" take AdamW in the same step and the same graph."""

    RULE = "muon"
    DEFAULTS = {"lr": 3e-3, "momentum": 0.95, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


def group_of(owner: nn.Module, path: str, p: Tensor) -> str:
    """Return the group of parameter `path`, a direct parameter of `owner`.

    embedding  lookup tables: gradients are sparse by row, and a row is not a direction of a linear map
    matrix     linear maps of hidden vectors, one (A,B) or a stack of experts (E,A,B)
    vector     0-D and 1-D: gains, biases, decays
    other      everything else: the head and its MTP block, routers (with Muon, they dropped twice as many tokens
               over 100 steps of narrow nam12: 33 % against 18 %), convolution taps, per-head tables, tables of
               features, recurrent matrices (an identity at start)
    """
    if isinstance(owner, nn.Embedding):
        return "embedding"
    if p.ndim < 2:
        return "vector"
    if path.startswith("head.") or "router" in path.split("."):
        return "other"
    linear = isinstance(owner, nn.Linear) and p.ndim == 2 and min(p.shape) > 1
    experts = isinstance(owner, MoEBlock) and p.ndim == 3
    return "matrix" if linear or experts else "other"


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups {name, rule, params [(path, parameter)], and weight_decay 0 if exempt} for Muon.

    Raises AssertionError unless every parameter of the model is in exactly one group.
    """
    names = ("matrix", "embedding", "vector", "other")
    found: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in names}
    seen: set[int] = set()
    for prefix, owner in model.named_modules():
        for name, p in owner.named_parameters(prefix, recurse=False):
            if id(p) not in seen:  # a tied weight belongs to its first owner
                seen.add(id(p))
                found[group_of(owner, name, p)].append((name, p))
    placed = sorted(id(p) for params in found.values() for _, p in params)
    assert placed == sorted(id(p) for p in model.parameters()), "each parameter must be in exactly one group"
    return [
        {"name": name, "params": params, "rule": "muon" if name == "matrix" else "adamw"}
        | ({} if name == "matrix" else {"weight_decay": 0.0})
        for name, params in found.items()
        if params
    ]


OPTIMIZERS: dict[str, type[TensorOptimizer]] = {"adamw": AdamW, "adagrad": Adagrad, "muon": Muon}


def build_optimizer(model: nn.Module, name: str, lr: float, **options: Any) -> TensorOptimizer:
    """Build the named optimizer over the model's groups; only Muon treats matrices differently. Raises ValueError."""
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: expected one of {', '.join(OPTIMIZERS)}")
    groups = parameter_groups(model)
    if name != "muon":
        groups = [group | {"rule": name} for group in groups]
    return OPTIMIZERS[name](groups, lr=lr, **options)
