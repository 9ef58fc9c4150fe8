"""Find the compiler stage that makes a model wrong: Dynamo, AOTAutograd or Inductor.

    python -m launch.ablation --preset nam12

The same weights and batches run eagerly in fp64, eagerly in fp32, and under backends that each add one stage. The
first backend that fails, or whose loss or gradients lose more accuracy than eager fp32, identifies its stage.
Prints one line. Exit codes: 0 no faulty stage, 1 a faulty stage, 2 usage, 3 contract refused.

B batch, T tokens.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from launch import environment

if __name__ == "__main__":
    environment.enter()  # before torch is imported, the only time it reads its environment

import torch
from torch import Tensor

from launch.contract import Contract, ContractError, apply_dynamo, load
from launch.data import SyntheticBatches
from launch.policies import POLICIES, apply
from model import Hybrid, HybridConfig, preset
from model.presets import NAMES, SIZES

# Backend -> the stage it adds to the previous one: capture; joint graph; decompositions and partition; generated code.
STAGES = {
    "eager": "dynamo",
    "aot_eager": "aot",
    "aot_eager_decomp_partition": "aot",
    "inductor": "inductor",
}
# The worst group of correct compilers measured 3; a lost digit is 10 (suites/numerics/test_compiled_gradients.py).
FACTOR = 10.0
FLOOR = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class AblationResult:
    """stage: "dynamo", "aot", "inductor", or "" for none. backend: the last one that ran.

    worst: the gradient group (or "loss") farthest from fp64, `ratio` times as far as eager fp32; or `error`.
    """

    stage: str
    backend: str
    worst: str = ""
    ratio: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        far = f"{self.worst} is {self.ratio:.3g} times as far from fp64 as eager fp32 (at most {FACTOR:g})"
        return f"{self.stage or 'no stage at fault'}: backend {self.backend}: {self.error or far}"


def results(
    call: Callable[[Tensor], Tensor], model: Hybrid, batches: Iterable[Tensor]
) -> dict[str, list[Tensor]]:
    """Map "loss" and each parameter's name to one fp64 tensor per batch, the loss or the gradient."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for ids in batches:
        model.zero_grad(set_to_none=True)
        loss = call(ids)
        loss.backward()
        found["loss"].append(loss.detach().double())
        for name, p in model.named_parameters():
            found[name].append(torch.zeros_like(p).double() if p.grad is None else p.grad.double())
    return found


def group_errors(found: Mapping[str, list[Tensor]], exact: Mapping[str, list[Tensor]]) -> dict[str, float]:
    """Map each group (one parameter in all layers) to the root of its tensors' squared relative errors."""
    squared: dict[str, float] = defaultdict(float)
    for name, tensors in found.items():
        for tensor, oracle in zip(tensors, exact[name]):
            apart = (tensor - oracle).norm() / oracle.norm().clamp(min=1e-30)
            squared[re.sub(r"\d+", "*", name)] += float(apart.nan_to_num(torch.inf)) ** 2
    return {group: error**0.5 for group, error in squared.items()}


def worst_group(errors: Mapping[str, float], limits: Mapping[str, float]) -> tuple[str, float]:
    """Return the group whose error is the largest multiple of its limit, and the multiple; NaN is the largest."""
    ratios = {g: e / limits[g] if math.isfinite(limits[g]) else math.nan for g, e in errors.items()}
    # Python's max would drop a NaN that is not first.
    worst = max(ratios, key=lambda group: (math.isnan(ratios[group]), ratios[group]))
    return worst, ratios[worst]


def attribute(
    config: HybridConfig, batches: list[Tensor], policy: str, contract: Contract, device: str = "cpu"
) -> AblationResult:
    """Run `batches` of ids (B,T) with at least two lengths T, so that a wrongly reused graph is detected.

    Raises ValueError on an unknown policy.
    """
    torch.manual_seed(0)
    weights = Hybrid(config).state_dict()

    def model(dtype: torch.dtype) -> Hybrid:
        made = Hybrid(config)
        made.load_state_dict(weights)
        return made.to(device, dtype)

    exact, plain = (results(m, m, batches) for m in (model(torch.float64), model(torch.float32)))
    limits = {group: max(error, FLOOR) for group, error in group_errors(plain, exact).items()}
    finding = AblationResult("", "")
    for backend, stage in STAGES.items():
        compiled = apply(made := model(torch.float32), policy, contract, backend)
        try:
            errors = group_errors(results(compiled, made, batches), exact)
        except Exception as error:  # any exception is the stage's fault: the same batches ran eagerly
            line = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            return AblationResult(stage, backend, error=line)
        worst, ratio = worst_group(errors, limits)
        if not ratio <= FACTOR:
            return AblationResult(stage, backend, worst, ratio)
        if ratio >= finding.ratio:
            finding = AblationResult("", backend, worst, ratio)
    return finding


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m launch.ablation", description=__doc__)
    add = p.add_argument
    add("--preset", choices=NAMES, required=True)
    add("--size", choices=SIZES, default="narrow")
    add("--policy", choices=[p for p in POLICIES if p != "eager"], default="regional")
    add("--layers", default="", metavar="LETTERS", help="other layers than the preset's, such as AEM")
    add("--batch", type=int, default=2)
    add("--device", default="cpu")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code; argparse itself exits with 2."""
    o = (p := parser()).parse_args(arguments)
    layers = {"layer_pattern": o.layers, "depth": len(o.layers)} if o.layers else {}
    try:
        config = preset(o.preset, o.size, **layers)
    except ValueError as error:
        p.error(str(error))
    lengths = (config.seq_len, config.seq_len // 2)
    batches = [
        next(SyntheticBatches(config.vocab_size, o.batch, T, 0, config.bos_id)).to(o.device) for T in lengths
    ]
    try:
        environment.check(contract := load())
        apply_dynamo(contract)
    except ContractError as error:
        print(f"refused: {error}", file=sys.stderr)
        return environment.REFUSED
    print(finding := attribute(config, batches, o.policy, contract, o.device))
    return 1 if finding.stage else 0


if __name__ == "__main__":
    raise SystemExit(main())
