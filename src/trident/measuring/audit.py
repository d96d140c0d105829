"""Measures one model under every protocol, on the same tasks, to see how its accuracy depends on the protocol.

Each row changes one thing about the default protocol. The classes and support images of each task stay the same
(and the queries, except where their class counts change), so differences are paired and their intervals are narrow.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from trident.data.store import ImageStore
from trident.distributed.processes import ALONE, Processes
from trident.errors import NotFiniteError, TaskSizeError
from trident.measuring.evaluate import Evaluation, evaluate
from trident.measuring.record import plus_minus
from trident.measuring.subject import Measurable, Sample, Subject, subject_of
from trident.progress import StageProgress, part_of
from trident.settings import Protocol

DEFAULT = Protocol()
PROTOCOLS: dict[str, Protocol] = {
    "default": DEFAULT,
    "class-sorted queries": replace(DEFAULT, query_order="class_sorted"),
    "Dirichlet(2) class counts": replace(DEFAULT, balance="dirichlet", dirichlet_alpha=2.0),
    "one query at a time": replace(DEFAULT, queries_at_once="one"),
    "transductive batch norm": replace(DEFAULT, batch_norm="transductive"),
    "support batch norm": replace(DEFAULT, batch_norm="support"),
    "running batch norm": replace(DEFAULT, batch_norm="running"),
    "one latent sample": replace(DEFAULT, latents="sample"),
    "average of 10 samples": replace(DEFAULT, latents="average", latent_samples=10),
    "as the paper": replace(DEFAULT, query_order="class_sorted", latents="sample"),
}
SORTED = "class-sorted queries"
STANDARD_ERRORS = 3  # how far from zero a difference must be before we call it a dependence
ENOUGH_TASKS = 30  # with fewer, the standard error is too uncertain
NARROW = 2.0  # points: a wider interval around zero is inconclusive


@dataclass(frozen=True)
class AuditRow:
    name: str
    evaluation: Evaluation
    difference: float  # from the default protocol, in points, paired by task
    difference_ci95: float

    def describe_difference(self) -> str:
        return plus_minus(round(self.difference, 2) + 0.0, self.difference_ci95, sign="+")  # + 0.0: never -0.00

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **self.evaluation.to_json(),
            "difference": self.difference,
            "difference_ci95": self.difference_ci95,
        }


@dataclass(frozen=True)
class Audit:
    rows: tuple[AuditRow, ...]  # the default protocol first
    without_result: dict[str, str] = field(default_factory=dict)  # by protocol: why there is none

    def row(self, name: str) -> AuditRow | None:
        return next((row for row in self.rows if row.name == name), None)

    @property
    def depends_on_query_order(self) -> bool:
        row = self._sorted_on_enough_tasks()
        return row is not None and abs(row.difference) > STANDARD_ERRORS / 1.96 * row.difference_ci95

    @property
    def no_dependence_found(self) -> bool:
        row = self._sorted_on_enough_tasks()
        return row is not None and abs(row.difference) <= row.difference_ci95 <= NARROW

    def _sorted_on_enough_tasks(self) -> AuditRow | None:
        row = self.row(SORTED)
        return row if row and row.evaluation.tasks >= ENOUGH_TASKS else None

    def verdict(self) -> str:
        row, default = self.row(SORTED), self.rows[0].evaluation
        if row is None:
            return "Whether accuracy depends on query order was not measured: no protocol sorts the queries by class."
        figures = f"{row.describe_difference()} points"
        if not self.depends_on_query_order:
            change = f"sorting the queries by class changes accuracy by {figures}, on {row.evaluation.tasks} tasks"
            if not self.no_dependence_found:
                return f"Whether accuracy depends on query order is open: {change}. Measure more tasks to find out."
            return f"No dependence on query order found: {change}."
        meaning = (
            "The order tells this model the classes of the queries"
            if row.difference > 0
            else "The order misleads this model"
        )
        return (
            f"ACCURACY DEPENDS ON QUERY ORDER: {row.evaluation.accuracy:.2f} % when queries are sorted by class, "
            f"{default.accuracy:.2f} % when the same queries are shuffled, {figures}. {meaning}; only the shuffled "
            "figure holds for pictures whose classes are unknown."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "depends_on_query_order": self.depends_on_query_order,
            "verdict": self.verdict(),
            "rows": [row.to_json() for row in self.rows],
            "without_result": self.without_result,
        }


def audit(
    model: Measurable,
    store: ImageStore,
    protocols: dict[str, Protocol] | None = None,
    progress: StageProgress | None = None,
    processes: Processes = ALONE,
    **sample: Unpack[Sample],
) -> Audit:
    """Measure a model under each protocol, by default all of PROTOCOLS, and compare it with the first.

    Protocols that make no difference to the model are omitted, such as latent samples for a model without latents.
    Inner steps that were learned under one protocol may diverge under another, and a few methods cannot classify one
    query at a time. Such a row has no result; the other rows are kept, unless the verdict depends on it.
    """
    chosen = _distinct(subject_of(model), protocols)
    rows: list[AuditRow] = []
    without_result: dict[str, str] = {}
    for place, (name, protocol) in enumerate(chosen.items()):
        report = part_of(progress, name, place, len(chosen))
        # One engine for all rows: the fused engine does not support all protocols.
        try:
            result = evaluate(model, store, protocol, report, processes, **sample | {"engine": "plain"})
        except (NotFiniteError, TaskSizeError) as error:
            if not rows or name == SORTED:
                raise
            without_result[name] = str(error)
            continue
        rows.append(AuditRow(name, result, *result.points_above(rows[0].evaluation if rows else result)))
    return Audit(tuple(rows), without_result)


def default_protocol(model: Measurable) -> Protocol:
    """The default protocol, but with the batch norm that the model is meant for."""
    return replace(DEFAULT, batch_norm=subject_of(model).protocol.batch_norm)


def _distinct(subject: Subject, protocols: dict[str, Protocol] | None) -> dict[str, Protocol]:
    """The protocols that make a difference to the subject: of those given, or of PROTOCOLS with its own batch norm."""
    if not protocols:
        own = subject.protocol.batch_norm
        protocols = {
            name: protocol if name.endswith("batch norm") else replace(protocol, batch_norm=own)
            for name, protocol in PROTOCOLS.items()
        }
    names: dict[Protocol, str] = {}
    for name, protocol in protocols.items():
        if subject.episode.n_unlabelled and protocol.queries_at_once == "one":
            continue  # a query that is alone has no unlabelled images
        names.setdefault(subject.effective(protocol), name)
    return {name: protocols[name] for name in names.values()}
