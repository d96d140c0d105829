"""Reports as HTML: one file, no network access, with a light and a dark theme."""

import base64
import importlib.metadata
import importlib.util
import io
import platform
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import trident
from trident.data.store import describe
from trident.errors import TridentError
from trident.recipes.loading import formatted, setting_help, setting_of
from trident.report import figures
from trident.report.content import Comparison, Report


def report_page(report: Report) -> str:
    checkpoint, evaluation = report.checkpoint, report.calibration.evaluation
    curves = [line for line in report.log if line["kind"] == "train"]
    decoded, recipe = report.reconstructions, checkpoint.recipe
    spec, tasks = recipe.episode, recipe.training.validation_tasks
    return render(
        "report.html",
        report=report,
        evaluation=evaluation,
        chance=100 / evaluation.subject.episode.n_way,
        curves=figures.to_svg(figures.learning_curves(report.log), "curves") if curves else None,
        audit_chart=figures.to_svg(figures.audit_chart(report.audit), "audit"),
        reliability=figures.to_svg(figures.reliability_diagram(report.calibration.panels()), "reliability"),
        calibrations=[report.calibration.plain, report.calibration.scaled, report.fitted_as_paper],
        latents=report.decoupling
        and figures.to_svg(figures.latent_plot(report.panels, report.decoupling.shown.labels[0]), "latents"),
        curves_protocol=f"{spec.describe()}, {recipe.describe_protocol()}, {tasks} tasks, 95 % interval",
        pairs=decoded and _data_uri(figures.reconstruction_pairs(decoded, columns=5)),
        swaps=decoded and _data_uri(figures.swap_grid(decoded)),
        total_parameters=sum(report.parameters.values()),
        settings=[(key, formatted(setting_of(recipe, key)), meaning) for key, meaning in setting_help(recipe).items()],
        environment=_environment(checkpoint.provenance),
        data=describe(report.store),
    )


def comparison_page(comparison: Comparison) -> str:
    return render(
        "comparison.html",
        comparison=comparison,
        curves=figures.to_svg(
            figures.compared_curves([(run.name, run.log) for run in comparison.runs]), "compared-curves"
        ),
        settings=comparison.differing_settings(),
    )


def check_extras() -> None:
    """Check before long work that all needed packages are installed."""
    missing = [name for name in ("jinja2", "matplotlib", "sklearn", "umap") if importlib.util.find_spec(name) is None]
    if missing:
        raise TridentError(f"reports need {', '.join(missing)}: pip install 'trident-fewshot[analysis]'")


def render(template: str, further: Path | None = None, **values: Any) -> str:
    """Fill a template of this package, or one in the folder `further`, which may build on those of this package."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([Path(__file__).parent / "templates", *([further] if further else [])])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(version=trident.__version__, **values)


def _data_uri(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(figures.picture(pixels)).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _environment(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    """Where the run was started, and where this page was made."""
    training = [(key, str(value)) for key, value in provenance.items() if key not in ("data", "dataset", "fingerprint")]
    here = f"trident {trident.__version__}, torch {importlib.metadata.version('torch')}, "
    here += f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return [*training, ("page made with", here)]
