"""Datasets made to do harm: sizes that are wrong, pickles that unfold without end, files from elsewhere."""

import io
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from test_data_cub import save_cub

from bounds import bounded
from commands import Trident_command, assert_one_line_error
from data_pictures import picture, png, refusal, save, save_class_folders
from trident.data.piles import tar_pictures
from trident.data.unpickle import load_pickle
from trident.errors import TridentError

MEBIBYTE = 2**20


def doubled(n: int) -> bytes:
    """A list of two references to a list of two references and so on: 2**n strings in a few hundred bytes."""
    steps = [b"q%c0](h%ch%ce" % (i, i, i) for i in range(n)]
    return b"]X\x01\x00\x00\x00aa" + b"".join(steps)


def doubled_tuples(n: int) -> bytes:
    return b")" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(n))


def labels_with_names(names: bytes) -> bytes:
    """A pickle of labels, whose class names are made by these instructions."""
    labels = b"X\x0e\x00\x00\x00label_specific](K\x00K\x00e"
    return b"\x80\x02}(" + labels + b"X\x12\x00\x00\x00label_specific_str" + names + b"u."


LONG_AND_EMPTY = (  # an array of shape (2**40, 0), which has no bytes
    b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR(K\x01\x8a\x06"
    + (2**40).to_bytes(6, "little")
    + b"K\x00\x86cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R\x89C\x00tb"
)
HANGING = {
    "a class name that unfolds": labels_with_names(b"]" + doubled(30) + b"a"),
    "a long array without content": labels_with_names(LONG_AND_EMPTY),
    "a key that unfolds": b"\x80\x02}" + doubled_tuples(34) + b"K\x00s.",
    "labels that unfold": b"\x80\x02}(X\x0e\x00\x00\x00label_specific" + doubled(28) + b"u.",
}


@pytest.mark.parametrize("content", HANGING.values(), ids=HANGING)
def test_small_pickles_that_unfold_are_refused_at_once(
    tmp_path: Path, trident: Trident_command, content: bytes
) -> None:
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}_images_png.pkl").write_bytes(pickle.dumps([png(picture(1, 84))]))
        (tmp_path / f"{split}_labels.pkl").write_bytes(content)
    # In a process of its own: some of these cannot be interrupted.
    answer = trident("data", "prepare", "tiered-imagenet", "--from", ".", "--to", "x.st", timeout=20)
    assert_one_line_error(answer, "train_labels.pkl")
    assert not (tmp_path / "x.st").exists()


COPIES = b"\x80\x02X" + struct.pack("<I", MEBIBYTE) + b"a" * MEBIBYTE + b"q\x000X\x06\x00\x00\x00latin1q\x010"
COPIES += b"c_codecs\nencode\nq\x020](" + b"h\x02h\x00h\x01\x86R" * 10_000 + b"e."
CALLS = b"\x80\x02X" + struct.pack("<I", MEBIBYTE) + b"a" * MEBIBYTE + b"q\x000X\x06\x00\x00\x00latin1q\x010"
CALLS += b"](" + b"(h\x00h\x01i_codecs\nencode\n" * 10_000 + b"e."
UNFOLDING = {
    "a member of a set": b"\x80\x04\x8f(" + doubled_tuples(34) + b"\x90.",
    "a member of a frozen set": b"\x80\x04(" + doubled_tuples(34) + b"\x91.",
    "a set by a call": b"\x80\x02c__builtin__\nset\n](" + doubled_tuples(34) + b"e\x85R.",
    "an ordered dict": b"\x80\x02ccollections\nOrderedDict\n]](" + doubled_tuples(34) + b"K\x00ea\x85R.",
    "a dict from the stack": b"\x80\x02(" + doubled_tuples(34) + b"K\x00d.",
    "keys from the stack": b"\x80\x02}(" + doubled_tuples(34) + b"K\x00u.",
    "copies of a text by calls": COPIES,
    "copies of a text by instances": CALLS,
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a list in a list in itself": b"\x80\x02]q\x00]h\x00aa.",
    "a tuple in itself": b"\x80\x02]q\x00h\x00\x85a.",
    "lists in lists": b"\x80\x02" + b"]" * 1000 + b"a" * 999 + b".",
}


@pytest.mark.parametrize("content", UNFOLDING.values(), ids=UNFOLDING)
def test_what_a_pickle_can_make_is_bounded(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.pkl"
    path.write_bytes(content)
    with bounded(most_bytes=2**29), pytest.raises(TridentError, match="refused") as raised:
        load_pickle(path)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("content", [b"\x80\x02" + b"N0" * 2**13 + b"N.", b"\x80\x04" + b"\x8f0" * 2**10 + b"N."])
def test_instructions_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    (tmp_path / "data.pkl").write_bytes(content)
    assert load_pickle(tmp_path / "data.pkl") is None
    monkeypatch.setattr("trident.data.unpickle._MOST_INSTRUCTIONS", 2**14)
    with pytest.raises(TridentError, match="more than 16384 instructions"):
        load_pickle(tmp_path / "data.pkl")


def test_shared_parts_come_through(tmp_path: Path) -> None:
    row = list(range(100))
    (tmp_path / "data.pkl").write_bytes(pickle.dumps([row] * 1000))
    assert load_pickle(tmp_path / "data.pkl") == [row] * 1000


@pytest.mark.parametrize("name", [[1], None, 2**70, 1.5, {}])
def test_names_of_classes_are_text(tmp_path: Path, name: object) -> None:
    for split in ("train", "val", "test"):
        labels = {"label_specific": [0], "label_specific_str": [name]}
        (tmp_path / f"{split}_labels.pkl").write_bytes(pickle.dumps(labels))
        (tmp_path / f"{split}_images_png.pkl").write_bytes(pickle.dumps([]))
    assert "the name of a class is a" in refusal("tiered-imagenet", tmp_path)


@pytest.mark.parametrize("labels", [5, None, "00", [[0], [0, 1]], [{}], {0: 1}])
def test_labels_are_whole_numbers(tmp_path: Path, labels: object) -> None:
    for split in ("train", "val", "test"):
        content = {"data": np.zeros((2, 32, 32, 3), np.uint8), "labels": labels}
        (tmp_path / f"CIFAR_FS_{split}.pickle").write_bytes(pickle.dumps(content))
    assert "its labels are not a list of whole numbers" in refusal("cifar-fs", tmp_path)


def with_false_size(path: Path, content: bytes) -> None:
    """A zip file with a drawing that is larger than it states."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for alphabet in "ABC":
            archive.writestr(f"images_background/{alphabet}/one/1.png", png(picture(1, 105)).tobytes())
        archive.writestr("images_background/A/one/2.png", content)
    whole = path.read_bytes()
    size = struct.pack("<I", len(content))
    assert whole.count(size) == 2  # beside the drawing, and in the table of contents
    path.write_bytes(whole.replace(size, struct.pack("<I", 1000)))


def test_the_size_that_a_zip_file_states_is_not_trusted(tmp_path: Path) -> None:
    with_false_size(tmp_path / "images_background.zip", png(picture(1, 105)).tobytes() + bytes(120_000_000))
    with bounded(seconds=5, most_bytes=100 * MEBIBYTE):
        assert "images_background/A/one/2.png" in refusal("omniglot", tmp_path / "images_background.zip")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_files_that_can_be_unpacked_as_a_whole_only(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "omniglot.zip", "w", method) as archive:
        for alphabet in "ABC":
            archive.writestr(f"images_background/{alphabet}/one/1.png", png(picture(1, 105)).tobytes())
    assert "deflate" in refusal("omniglot", tmp_path / "omniglot.zip")


def test_a_tar_file_whose_header_is_huge(tmp_path: Path) -> None:
    member = tarfile.TarInfo("pax")
    member.type, member.size = tarfile.XHDTYPE, 300_000_000
    with (tmp_path / "pile.tar").open("wb") as file:
        file.write(member.tobuf())
        file.truncate(400_000_000)
    with bounded(seconds=5, most_bytes=100 * MEBIBYTE):
        pictures, unread = tar_pictures([tmp_path / "pile.tar"])
    assert not pictures
    assert "a header of 300000256 bytes" in unread[str(tmp_path / "pile.tar")]


@pytest.mark.parametrize("name", ["../../secret.png", "/secret.png", "001.Bird_1/../../../secret.png"])
def test_the_lists_of_cub_name_files_in_its_folder_only(tmp_path: Path, name: str) -> None:
    root = save_cub(tmp_path / "CUB_200_2011", [1, 2, 4])
    save(tmp_path / "secret.png", picture(1, 84))
    lines = (root / "images.txt").read_text().splitlines()
    name = name if name[0] != "/" else str(tmp_path / name[1:])
    (root / "images.txt").write_text("\n".join([f"1 {name}", *lines[1:]]))
    assert "lies outside the folder" in refusal("cub", root)


def test_numbers_of_thousands_of_digits_in_lists(tmp_path: Path) -> None:
    root = save_cub(tmp_path / "CUB_200_2011", [1, 2, 4])
    (root / "image_class_labels.txt").write_text(f"1 1\n2 2\n3 {'9' * 5000}\n")
    assert "image 3 has class 999" in refusal("cub", root)
    (root / "image_class_labels.txt").write_text(f"{'9' * 5000} 1\n")
    assert "expected a number and a name" in refusal("cub", root)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    root = save_class_folders(tmp_path / "data", {"a": 2, "b": 2, "c": 2})
    elsewhere = save_class_folders(tmp_path / "elsewhere", {"d": 2})
    (root / "a" / "inside.png").symlink_to(next((root / "b").iterdir()))
    link = root / "d"
    link.symlink_to(elsewhere / "d")
    assert "leads out of" in refusal("folder", root)
    link.unlink()
    (root / "a" / "outside.png").symlink_to(next((elsewhere / "d").iterdir()))
    assert "outside.png leads out of" in refusal("folder", root)


def test_links_to_the_folder_itself_and_within_it_are_fine(tmp_path: Path) -> None:
    from trident.data.prepare import prepare

    root = save_class_folders(tmp_path / "data", {"a": 2, "b": 2, "c": 2})
    (root / "a" / "again.png").symlink_to(next((root / "b").iterdir()))
    (tmp_path / "link").symlink_to(root)
    assert len(prepare("folder", tmp_path / "link", tmp_path / "x.st", image_size=16).images) == 7


def test_a_list_that_is_a_link_to_elsewhere(tmp_path: Path) -> None:
    root = save_cub(tmp_path / "CUB_200_2011", [1, 2, 4])
    (root / "images.txt").rename(tmp_path / "images.txt")
    (root / "images.txt").symlink_to(tmp_path / "images.txt")
    assert "leads out of" in refusal("cub", root)


def test_a_list_without_end(tmp_path: Path) -> None:
    root = save_cub(tmp_path / "CUB_200_2011", [1, 2, 4])
    with (root / "images.txt").open("ab") as file:
        file.truncate(2**31)  # takes no room on the disk
    with bounded(seconds=5, most_bytes=200 * MEBIBYTE):
        assert "the most that can be read" in refusal("cub", root)


def test_a_zip_file_of_odd_bytes(tmp_path: Path) -> None:
    with_content = io.BytesIO()
    with zipfile.ZipFile(with_content, "w") as archive:
        archive.writestr("images_background/A/one/1.png", png(picture(1, 105)).tobytes())
    whole = with_content.getvalue()
    for place in range(len(whole) - 100, len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        (tmp_path / "omniglot.zip").write_bytes(damaged)
        refusal("omniglot", tmp_path / "omniglot.zip")
