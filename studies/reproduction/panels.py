"""What is run for each table and figure of the paper, read from `panels.toml` or from a file of the same form."""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from studies.reproduction.paper_results import PaperResult, paper_table, paper_training
from trident.errors import did_you_mean, errors_in
from trident.recipes.files import read_toml
from trident.recipes.loading import formatted, load_recipe, setting_of
from trident.recipes.plain_values import checked
from trident.recipes.recipe import Recipe
from trident.settings import require

FILE = Path(__file__).with_name("panels.toml")
TRAINED_ON = "mini-imagenet"  # in all ablations that are run
SORTED = "protocol.query_order=class_sorted"

KINDS = ("drawing", "accuracy", "parameters", "calibration", "ablation", "latents", "reconstructions", "training")


@dataclass(frozen=True)
class Model:
    """Included weights, or a training. It is trained on the first of its datasets, and measured on all."""

    data: list[str]
    weights: str = ""
    recipe: str = ""
    settings: list[str] = field(default_factory=list)
    steps: int = 0
    remark: str = ""  # for the table: how its training differs from the paper's
    name: str = ""  # of its file of results

    def __post_init__(self) -> None:
        require(bool(self.weights) != bool(self.recipe), "a model needs either 'weights' or 'recipe'")
        require(bool(self.recipe) == (self.steps > 0), "a model with a recipe needs 'steps', one with weights has none")
        require(bool(self.data), "a model needs 'data': the datasets it is measured on")

    @property
    def made_from(self) -> str:
        """The weights, or the recipe with its settings, in words."""
        return f"weights {self.weights}" if self.weights else " ".join([f"recipe {self.recipe}", *self.settings])

    def asked_steps(self, budget: float) -> int:
        return max(1, round(self.steps * budget)) if self.recipe else 0

    def run_name(self, budget: float) -> str:
        """The folder of its training. Other budgets have other folders."""
        return self.name if budget == 1 else f"{self.name}-{self.asked_steps(budget)}-steps"

    def trained_recipe(self, budget: float = 1.0) -> Recipe:
        """The recipe of a training, with its settings and its steps."""
        steps = self.asked_steps(budget)
        quarter = max(1, steps // 4)  # the best of four weights on validation classes is measured
        settings = [*self.settings, f"training.steps={steps}", f"training.validate_every={quarter}"]
        return replace(load_recipe(self.recipe, settings), dataset=self.data[0])


@dataclass(frozen=True)
class Panel:
    """One table or figure of the paper."""

    name: str
    place: str  # in the paper
    title: str
    kind: str
    paper: str = ""  # table of `paper_results.toml`
    models: list[str] = field(default_factory=list)
    dataset: str = ""  # which the panel shows, if only one
    more: list[list[str]] = field(default_factory=list)  # settings of rows that the paper does not have
    steps: int = 0  # of the trainings of an ablation
    note: str = ""

    def __post_init__(self) -> None:
        require(self.kind in KINDS, f"the kind of panel {self.name} is '{self.kind}'{did_you_mean(self.kind, KINDS)}")
        require(self.kind != "ablation" or self.steps > 0, f"panel {self.name} needs 'steps'")
        single = self.kind in ("calibration", "latents", "reconstructions")
        require(bool(self.dataset) == single, f"panel {self.name} {'needs' if single else 'takes no'} 'dataset'")

    def datasets_of(self, model: Model) -> list[str]:
        return [self.dataset] if self.dataset else model.data


@dataclass(frozen=True)
class AblationRow:
    """One row of an ablation: a model, and the paper's figure for it."""

    settings: tuple[str, ...]
    n_shot: int
    model: Model
    paper: PaperResult | None


@dataclass(frozen=True)
class Reproduction:
    """All panels, and the models that several of them may share."""

    panels: list[Panel]
    models: dict[str, Model]
    tasks: dict[str, int]  # to measure on, by dataset

    def __post_init__(self) -> None:
        names = [panel.name for panel in self.panels]
        for name in names:
            require(names.count(name) == 1, f"two panels are called {name}")
        for dataset, tasks in self.tasks.items():
            require(tasks >= 2, f"tasks.{dataset} is {tasks}: an interval needs at least 2 tasks")
        for panel in self.panels:
            for model in self.models_of(panel):
                for dataset in panel.datasets_of(model):
                    require(dataset in self.tasks, f"panel {panel.name} needs a number of tasks: tasks.{dataset}")
        ablated = {row.model.name for panel in self.panels if panel.kind == "ablation" for row in self.ablation(panel)}
        for name in self.models:
            require(name not in ablated, f"models.{name} has the name of a row of an ablation: choose another")

    def panel(self, name: str) -> Panel:
        names = [panel.name for panel in self.panels]
        require(name in names, f"no table or figure of the paper is called '{name}'{did_you_mean(name, names)}")
        return self.panels[names.index(name)]

    def models_of(self, panel: Panel) -> list[Model]:
        if panel.kind == "ablation":
            return [row.model for row in self.ablation(panel)]
        unknown = [name for name in panel.models if name not in self.models]
        require(not unknown, f"panel {panel.name} names the unknown models {', '.join(unknown)}")
        return [replace(self.models[name], name=name) for name in panel.models]

    def ablation(self, panel: Panel) -> list[AblationRow]:
        """The rows of the paper's table on miniImageNet, and those that the paper does not have."""
        printed = [result for result in paper_table(panel.paper).results if result.train_dataset == TRAINED_ON]
        rows: list[AblationRow] = []
        for one in printed:
            assert one.n_shot is not None
            rows.append(AblationRow(one.settings, one.n_shot, _trained(one.settings, one.n_shot, panel.steps), one))
        return rows + [AblationRow(tuple(more), 1, _trained(tuple(more), 1, panel.steps), None) for more in panel.more]


@cache
def _trained(settings: tuple[str, ...], n_shot: int, steps: int) -> Model:
    """The model of a row. Settings that are the recipe's own are left out, so that equal models have equal names."""
    recipe = next(run.recipe for run in paper_training() if (run.train_dataset, run.n_shot) == (TRAINED_ON, n_shot))
    own = load_recipe(recipe)
    changed = [
        text for text in settings if formatted(setting_of(own, text.partition("=")[0])) != text.partition("=")[2]
    ]
    parts = [text.partition(".")[2].replace("=", "-") for text in changed]
    return Model(
        data=[TRAINED_ON],
        recipe=recipe,
        settings=[SORTED, *changed],
        steps=steps,
        name="-".join([recipe, *parts]),
    )


def load_panels(path: Path = FILE) -> Reproduction:
    values = read_toml(path)
    with errors_in(path):
        found: Reproduction = checked(Reproduction, values)
        return found
