"""Where and how numbers are computed: the device, the engine and the precision. None of it changes what is computed."""

from dataclasses import dataclass
from typing import Literal, get_args

from trident.adapt import Learner
from trident.errors import TridentError
from trident.model import Trident
from trident.nn.parameters import Parameters
from trident.settings import Recipe

Engine = Literal["plain", "fused"]
Precision = Literal["fp32", "tf32", "fp16", "bf16"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class Execution:
    device: str = "cpu"
    engine: Engine = "plain"
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        if self.engine == "plain" and self.precision in ("fp16", "bf16"):
            raise TridentError(f"precision {self.precision} needs the fused engine: the plain one takes fp32 or tf32")

    def describe(self) -> str:
        return f"{self.device}, {self.engine} engine, {self.precision}"


def execution_for(device: str, engine: str, precision: str, recipe: Recipe) -> Execution:
    """What was asked for, with `auto` replaced by what suits the device and the recipe."""
    engine = "plain" if engine == "auto" else engine
    precision = "fp32" if precision == "auto" else precision
    if engine not in ENGINES or precision not in PRECISIONS:
        raise TridentError(
            f"'{engine}' with '{precision}' is no way to compute: engines are auto, {', '.join(ENGINES)}; precisions "
            f"auto, {', '.join(PRECISIONS)}"
        )
    return Execution(device, engine, precision)


def make_learner(recipe: Recipe, execution: Execution, running: Parameters | None = None) -> Learner:
    """The recipe's learner, under its protocol's batch norm, computed as `execution` says."""
    if (execution.engine, execution.precision) != ("plain", "fp32"):  # better than another's numbers under its name
        raise TridentError(f"{execution.describe()}: only the plain engine in fp32 is there so far")
    model = Trident(recipe.model, recipe.episode)
    return Learner(model, recipe.objective, recipe.adaptation, recipe.protocol.batch_norm, running)
