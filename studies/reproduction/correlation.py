"""Whether the published trends hold: our ablations beside the published ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from studies.reproduction.panels import AblationRow, Panel, Reproduction
from studies.reproduction.paper_results import PaperResult
from studies.reproduction.results import ORDER_NAMES, ORDERS, ModelResults, read
from trident.importing import needed

FEWEST_ROWS = 5  # for a correlation


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of our accuracies with the published ones."""

    order: str
    rho: float
    rows: int

    def describe(self) -> str:
        return f"queries {ORDER_NAMES[self.order]}: {self.rho:+.2f} ({self.rows} rows)"


def ablation_rows(
    reproduction: Reproduction, panel: Panel, folder: Path
) -> Iterator[tuple[AblationRow, ModelResults | None]]:
    for row in reproduction.ablation(panel):
        yield row, read(row.model.name, folder)


def published_and_ours(
    reproduction: Reproduction, panels: list[Panel], folder: Path, order: str
) -> list[tuple[PaperResult, float]]:
    """The rows of ablations that have both figures, each model once."""
    pairs: dict[str, tuple[PaperResult, float]] = {}
    for panel in panels:
        for row, kept in ablation_rows(reproduction, panel, folder):
            found = kept.measured.get(row.model.data[0]) if kept else None
            if row.paper is not None and found is not None and order in found.orders:
                pairs[row.model.name] = (row.paper, found.orders[order].accuracy)
    return list(pairs.values())


def correlations(reproduction: Reproduction, panels: list[Panel], folder: Path) -> list[Correlation]:
    """Over the rows with one shot, with sorted and with shuffled queries; none with too few rows."""
    found = []
    for order in ORDERS:
        pairs = published_and_ours(reproduction, panels, folder, order)
        pairs = [(printed, ours) for printed, ours in pairs if printed.n_shot == 1]
        if len(pairs) >= FEWEST_ROWS:
            rho = _spearman([printed.value for printed, _ in pairs], [ours for _, ours in pairs])
            found.append(Correlation(order, rho, len(pairs)))
    return found


def _spearman(one: list[float], other: list[float]) -> float:
    stats = needed("scipy.stats", "rank correlations need scipy")
    return float(stats.spearmanr(one, other).statistic) if len(set(other)) > 1 else 0.0
