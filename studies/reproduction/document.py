"""docs/reproduction.md and its page, from the kept results."""

from pathlib import Path

from studies.documents import introduction_before
from studies.reproduction.panels import Reproduction
from studies.reproduction.plots import all_plots, decoded_pictures, latent_captions
from studies.reproduction.results import FOLDER
from studies.reproduction.sections import Section, sections
from trident.grids.tables import markdown_table
from trident.report.figures import to_svg
from trident.report.page import render

HEADING = "## Each table and figure"
CAPTIONS = {
    "order": "Accuracy with queries sorted by class, and with the same queries shuffled.",
    "separation": "How well the latents separate the classes, before and after adaptation; means over many tasks.",
    "ablations": "The paper's ablations: published accuracy, and ours after shorter trainings.",
}


def introduction_of(path: Path) -> str:
    return introduction_before(HEADING, path, "The paper, run again", HEADING)


def whole_document(introduction: str, reproduction: Reproduction, folder: Path = FOLDER) -> str:
    """Everything after the introduction is made from the results."""
    parts = [introduction.rstrip("\n"), "", HEADING, "", "| | | state |", "|---|---|---|"]
    made = sections(reproduction, folder)
    parts += [f"| {one.panel.place} | [{one.panel.title}](#{one.panel.name}) | {one.state} |" for one in made]
    for one in made:
        parts += ["", f'<a id="{one.panel.name}"></a>', "", f"### {one.panel.place}: {one.panel.title}", *_body(one)]
        if one.panel.kind == "latents":
            captions = latent_captions(reproduction, folder)
            parts += [f"\n{caption}\n\n![{caption}](reproduction-{name}.svg)" for name, caption in captions.items()]
    return "\n".join([*parts, ""])


def _body(section: Section) -> list[str]:
    lines = []
    if section.command:
        lines += ["", f"`{section.command}`"]
    if section.rows:
        lines += ["", *markdown_table([section.headings, *section.rows])]
    if section.notes:
        lines += ["", *(f"- {note}" for note in section.notes)]
    return lines


def page(reproduction: Reproduction, folder: Path = FOLDER) -> str:
    captions = CAPTIONS | latent_captions(reproduction, folder)
    plots = [(to_svg(figure, name), captions[name]) for name, figure in all_plots(reproduction, folder).items()]
    return render(
        "page.html",
        Path(__file__).parent,
        sections=sections(reproduction, folder),
        plots=plots,
        pictures=decoded_pictures(reproduction, folder),
    )
