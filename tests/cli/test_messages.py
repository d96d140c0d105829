"""What commands say about misspelt names and after Ctrl-C, and what is read from logs that a kill cut off."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ablation_grids import Answer
from studies.reproduction.running import training_seconds
from trident.errors import TridentError
from trident.labelling.inputs import new_classes
from trident.learning.checkpoint import load_checkpoint
from trident.tasks.source import TaskSource


def test_classes_that_corrections_add_are_named_with_a_similar_one() -> None:
    known = ["073.Blue_Jay", "wren"]
    assert new_classes(["wren", "none of these"], known) == ""
    assert new_classes(["Blue Jay"], known) == "; new classes: Blue Jay (there is 073.Blue_Jay too)"
    assert new_classes(["Wren", "owl"], known) == "; new classes: Wren (there is wren too), owl"


def test_misspelt_weights_get_a_hint() -> None:
    with pytest.raises(TridentError, match="did you mean 'mini-ensemble'"):
        load_checkpoint("mini-ensembel")
    with pytest.raises(TridentError, match=r"does not list it$"):
        load_checkpoint("runs/nowhere")


def test_the_time_of_a_training_is_that_of_its_complete_lines(tmp_path: Path) -> None:
    line = '{"step": %d, "kind": "train", "seconds": %g, "accuracy": 20.0, "losses": {}}\n'
    assert training_seconds(tmp_path) is None
    half = '{"step": 30, "kind": "tr'  # left by a kill
    (tmp_path / "log.jsonl").write_text(line % (10, 0.5) + line % (20, 0.25) + half)
    assert training_seconds(tmp_path) == 10 * 0.5 + 10 * 0.25


@pytest.mark.parametrize("also", [[], ["--also", "audit"]])
def test_a_command_says_that_ctrl_c_stopped_it(
    also: list[str], trident_here: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TaskSource, "batch", interrupted)
    monkeypatch.setattr(TaskSource, "prefetch", interrupted)
    answer = trident_here("evaluate", "glyphs-protonet", *also)
    assert (answer.returncode, answer.stderr.strip().splitlines()[-1:]) == (130, ["trident: stopped"])
