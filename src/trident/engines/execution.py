"""The choice of device, engine and precision. It changes speed and rounding, not the method.

The plain engine uses torch's operations and autograd, on any device. The fused engine is hand-written for NVIDIA GPUs.
`auto` takes the fused engine wherever it can be used.
"""

import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from trident.engines.fused import why_not_fused
from trident.engines.learner import Learner
from trident.engines.learners import learners_of
from trident.errors import BadValueError, TridentError
from trident.importing import imported
from trident.nn.parameters import Parameters
from trident.recipes.recipe import Recipe

Engine = Literal["plain", "fused"]
Precision = Literal["fp32", "tf32", "fp16", "bf16"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
DEFAULT_PRECISION: dict[Engine, Precision] = {"plain": "fp32", "fused": "fp16"}


@dataclass(frozen=True)
class Execution:
    device: str = "cpu"
    engine: Engine = "plain"
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        if self.engine == "plain" and self.precision in ("fp16", "bf16"):
            raise TridentError(f"precision {self.precision} needs the fused engine: the plain one takes fp32 or tf32")
        if self.precision != "fp32" and torch.device(self.device).type == "cpu":
            raise TridentError(f"precision {self.precision} is for GPUs: a CPU computes in fp32")


def execution_for(device: torch.device | str, engine: str, precision: str, recipe: Recipe) -> Execution:
    """Replace `auto` by the best choice for the device and the recipe."""
    if engine not in ("auto", *ENGINES) or precision not in ("auto", *PRECISIONS):
        raise TridentError(
            f"engine '{engine}' with precision '{precision}' does not exist: engines are auto, {', '.join(ENGINES)}; "
            f"precisions auto, {', '.join(PRECISIONS)}"
        )
    device = str(device)
    reason = why_not_fused(device, recipe, precision)
    if engine == "fused" and reason is not None:
        raise TridentError(f"the fused engine cannot be used here: {reason}; give --engine plain, or auto")
    chosen = cast(Engine, ("fused" if reason is None else "plain") if engine == "auto" else engine)
    return Execution(device, chosen, DEFAULT_PRECISION[chosen] if precision == "auto" else cast(Precision, precision))


def make_learner(recipe: Recipe, execution: Execution, running: Parameters | None = None) -> Learner:
    """The recipe's learner, with its protocol's batch norm, on the engine and in the precision of `execution`."""
    kind = imported(learners_of(type(recipe.method))[execution.engine])
    return cast(Learner, kind(recipe.model, recipe.protocol.batch_norm, running, execution.precision))


def usable_device(name: str, local_rank: int | None = None) -> str:
    """Torch's name for the user's device, checked. `local_rank` picks the GPU of one of several processes."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and local_rank is not None:
        if 0 < torch.cuda.device_count() <= local_rank:
            raise BadValueError(
                f"there is no GPU for process {local_rank} of this machine: start {torch.cuda.device_count()} at most, "
                "or give --device cpu"
            )
        name = f"cuda:{local_rank}"
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise BadValueError(f"'{name}' is not a device: it must be auto, cpu, cuda or cuda:N")
    if name.startswith("cuda") and int(name[5:] or 0) >= torch.cuda.device_count():
        raise BadValueError(f"there is no {name} here: take auto or cpu")
    return name


def device_name(device: str) -> str:
    """The GPU, or the processor and its threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'' if threads == 1 else 's'}"


def _processor() -> str:
    """The CPU model if known, and the architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text("utf-8", "replace").splitlines() if file.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]} ({platform.machine()})" if models else f"{platform.machine()} CPU"
