"""The model cards of the leaderboard's weights, made from the weights and the kept results."""

import itertools

from trident.leaderboard.results import read
from trident.leaderboard.rows import BOARDS, rows
from trident.learning.checkpoint import load_checkpoint
from trident.measuring.record import plus_minus
from trident.measuring.subject import protocol_in_words
from trident.nn.parameters import count
from trident.weights import model_card

LIMITS = (
    "Trained for a comparison of methods at one small budget, not to the best that the method can give. It always "
    "chooses one of the given classes, also for a picture that belongs to none."
)


def card_of(name: str) -> str:
    """The card that was written for these weights, or one that is made now."""
    if (written := model_card(name)) is not None:
        return written
    checkpoint = load_checkpoint(name)
    recipe, best = checkpoint.recipe, checkpoint.best
    about, counted = recipe.method.about, count(checkpoint.parameters)
    lines = [
        f"# {name}",
        "",
        f"{about.title} ({about.citation}): {recipe.summary}.",
        "",
        f"**Trained on** {checkpoint.provenance.get('dataset')}: `trident train {recipe.name}`, step {checkpoint.step} "
        f"of {recipe.training.steps:,} steps, chosen on validation classes. {counted:,} parameters.",
        "",
        "| figure | classes | Protocol | |",
        "|---|---|---|---|",
    ]
    if best:
        of = best["protocol"]
        protocol = protocol_in_words(of["dataset"], "val", recipe, of["tasks"], of["seed"])
        figure = plus_minus(best["accuracy"], best["ci95"])
        lines.append(f"| Accuracy, which chose these weights | validation | {protocol} | {figure} % |")
    results = {board: read(board.name) for board in BOARDS.values()}
    for row, (board, measured) in itertools.product(rows().values(), results.items()):
        for record in measured.get(row.name, {}).values() if row.weights_on(board) == name and not row.recipe else ():
            figure = f"{record.figure} %, ECE {record.calibration['validation'].ece:.4f}"
            lines.append(f"| **Accuracy**, ECE | test | {record.described} | {figure} |")
    temperatures = ", ".join(
        f"temperature {value:.3f} fitted on validation tasks ({pile})"
        for value, pile in zip(checkpoint.temperatures, ("many pictures", "a few", "each alone"), strict=True)
    )
    own = "A measured ECE has a temperature of its own, fitted in the same way."
    lines += ["", f"Probabilities of `trident predict`: {temperatures}. {own}"]
    lines += ["", f"**Intended use.** Comparison with other methods (`trident leaderboard`).\n\n**Limits.** {LIMITS}"]
    return "\n".join(lines)
