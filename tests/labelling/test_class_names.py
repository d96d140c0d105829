"""What a class may be called: one rule, wherever the name comes from."""

import numpy as np
import pytest

from stand_in_backbone import NAME, picture
from trident.errors import BadValueError
from trident.labelling.class_names import LONGEST_NAME, check_one_class_each, class_name, is_none
from trident.labelling.classifier import TridentClassifier

BAD = ["", " \n", "none of these", "None_Of  These", "\ud800", "caf\udce9", "x" * 5_000_000, "a\x07", "a\u202eb", "a\0"]


@pytest.mark.parametrize(
    ("written", "name"),
    [("cafe\u0301", "café"), (" blue \t jay\n", "blue jay"), ("tv/monitor", "tv/monitor"), ("例 (1)", "例 (1)")],
)
def test_names_that_look_alike_are_one_class(written: str, name: str) -> None:
    assert class_name(written) == class_name(name) == name
    assert class_name("x" * LONGEST_NAME) == "x" * LONGEST_NAME


@pytest.mark.parametrize("name", BAD, ids=range(len(BAD)))
def test_what_no_class_can_be_called(name: str) -> None:
    with pytest.raises(BadValueError, match="a class cannot be called") as caught:
        class_name(name)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_none_of_these_in_other_forms() -> None:
    assert is_none("None_of_These") and not is_none("none")


def test_a_picture_belongs_to_one_class() -> None:
    check_one_class_each([(b"1", "red", "a"), (b"2", "blue", "b"), (b"1", "red", "c")])
    with pytest.raises(BadValueError, match=r"^a in class 'red' and d in class 'blue' are the same picture"):
        check_one_class_each([(b"1", "red", "a"), (b"2", "blue", "b"), (b"1", "blue", "d")])


def test_the_classifier_takes_a_picture_in_one_class() -> None:
    model = TridentClassifier(backbone=NAME, cache=False)
    with pytest.raises(ValueError, match="image 0 in class 'cat' and image 1 in class 'dog' are the same picture"):
        model.fit([picture("red", 0)] * 2, ["cat", "dog"])


@pytest.mark.parametrize(("labels", "words"), [(["", "b"], "1 to 200"), (["a", "a "], "differ only in their spaces")])
def test_labels_of_the_classifier(labels: list[str], words: str) -> None:
    model = TridentClassifier(backbone=NAME, cache=False)
    with pytest.raises(ValueError, match=words):
        model.fit([picture("red", 0), picture("blue", 0)], np.array(labels))
