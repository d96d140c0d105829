"""Devices, FIFOs and files without end are refused, wherever a file is read."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from studies.documents import introduction_before
from trident.backbones.pretrained import find_backbone
from trident.data.piles import TarPicture, find_pile, tar_pictures
from trident.data.readers import read_split_file
from trident.data.unpickle import load_pickle
from trident.errors import TridentError
from trident.files import UnopenedError, open_regular, read_regular, short_digest
from trident.learning.weights_header import check_file
from trident.recipes.files import read_toml
from trident.web.service import chosen_token

READERS: list[Callable[[Path], object]] = [
    lambda path: read_regular(path, 100),
    short_digest,
    lambda path: find_backbone(f"onnx:{path}"),
    read_split_file,
    check_file,
    read_toml,
    chosen_token,
]


def test_ordinary_files_up_to_a_size(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    path.write_bytes(bytes(100))
    link.symlink_to(path)
    with open_regular(link, 100) as file:
        assert file.read() == bytes(100) == read_regular(path, 100)
    assert short_digest(path) == hashlib.sha256(bytes(100)).hexdigest()[:12]
    with pytest.raises(
        UnopenedError, match=rf"^cannot read {path}: it has more than 99 bytes, the most that can be read$"
    ):
        open_regular(path, 99)
    with pytest.raises(TridentError, match=r"^cannot read /proc/self/status: it has more than 9 bytes"):
        read_regular(Path("/proc/self/status"), 9)  # says that it has none
    for other, why in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(OSError, match=f"^cannot read {other}: {why}"):
            open_regular(other, 100)


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "sparse"])
@pytest.mark.parametrize("read", READERS)
def test_all_else_is_refused_at_once(tmp_path: Path, read: Callable[[Path], object], kind: str) -> None:
    path = tmp_path / kind  # the second is an absolute path
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(2**34)
    with pytest.raises(TridentError, match=r"not an ordinary file|more than [0-9]+ bytes"):
        read(path)


def test_archives_that_are_no_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a.tar", "b.parquet"):
        os.mkfifo(tmp_path / name)
    assert find_pile(tmp_path) == ([], {})
    _, unread = tar_pictures([tmp_path / "a.tar"])
    assert "it is not an ordinary file" in unread[str(tmp_path / "a.tar")]
    for read in (load_pickle, lambda path: TarPicture(path, "a.png", 0, 1).content()):
        with pytest.raises(TridentError, match="not an ordinary file"):
            read(tmp_path / "a.tar")


def test_a_large_list_and_a_large_document(tmp_path: Path) -> None:
    for name in ("list.txt", "document.md"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**33)
    for read in (find_pile, lambda path: introduction_before("", path, "", "")):
        with pytest.raises(TridentError, match=r"more than [0-9]+ bytes"):
            read(tmp_path / ("list.txt" if read is find_pile else "document.md"))
