"""Stores and cached features: `trident data prepare`, `show` and `cache`."""

from pathlib import Path
from typing import Annotated

import typer

from trident.cli import options as opt
from trident.cli.app import data_app
from trident.data import READERS
from trident.errors import TridentError, one_line


@data_app.command()
def prepare(
    name: Annotated[str, typer.Argument(help=f"Name of the dataset: {', '.join(READERS)}.")],
    source: Annotated[Path, typer.Option("--from", help="The dataset's files; docs/data.md describes their layout.")],
    target: Annotated[Path, typer.Option("--to", help="The store file to write.")],
    image_size: Annotated[
        int | None, typer.Option(min=16, help="Pixels; by default 84 (Omniglot 28, CIFAR-FS 32).")
    ] = None,
    split_file: Annotated[Path | None, typer.Option(help="JSON with the classes of train, val and test.")] = None,
    features: Annotated[
        str | None,
        typer.Option(help="Store features of this backbone instead of images; 'trident backbones' lists them."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that decode images; by default one for each core. Unused with --features."),
    ] = None,
    device: opt.Device = "auto",
) -> None:
    """Decode and check a dataset, and write it to one store file that opens instantly.

    Images are decoded in several processes, and few of them are in memory at a time. After Ctrl-C or a kill, the same
    command goes on where it stopped; until then, hidden files beside the store keep what is done.
    """
    from trident.cli.console import Counter, say
    from trident.data.decoding_process import available_cores
    from trident.data.images import silence_pillow
    from trident.data.prepare import prepare as write

    silence_pillow()

    if features is not None:
        from trident.backbones.feature_store import prepare_features
        from trident.backbones.pretrained import find_backbone

        if image_size is not None:
            raise TridentError("--image-size and --features exclude each other: a backbone has its own image size")
        backbone = find_backbone(features, opt.device_of(device))
        with opt.stoppable(), Counter("images") as progress:
            store = prepare_features(name, source, target, backbone, split_file, progress, progress.resumed)
        count = f"features of {len(store.images)} images of {len(store.classes)} classes"
        say(f"wrote {target}: {count}, by {features}")
        return
    with opt.stoppable(), Counter("images") as progress:
        store = write(
            name,
            source,
            target,
            image_size=image_size,
            split_file=split_file,
            progress=progress,
            workers=workers or available_cores(),
            on_resume=progress.resumed,
        )
    say(f"wrote {target}: {len(store.images)} images of {len(store.classes)} classes")


@data_app.command()
def show(
    store: Annotated[str, typer.Argument(help="A store file, or 'glyphs'.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every pixel and compare checksums and fingerprint.")
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Print what a store holds."""
    from trident.data.store import describe, verify_fingerprint

    opened = opt.open_data(store)
    about = describe(opened)
    if verify and opened.checksums is not None:
        from trident.cli.console import Counter

        with Counter("blocks") as progress:
            opened.checksums.check_all(opened.images, progress)  # says which block is damaged
    if verify and not verify_fingerprint(opened):
        raise TridentError(f"{store} has changed since it was written: its pixels do not match its fingerprint")
    if as_json:
        opt.print_json(about)
        return
    if verify:
        print("verified             all images are as they were written")
    for key, value in about.items():
        if key != "splits":
            print(f"{key:20} {one_line(str(value))}")
    for split, counts in about["splits"].items():
        print(f"{one_line(split):20} {', '.join(f'{count} {what}' for what, count in counts.items())}")


@data_app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete all features in the cache.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show where the features of frozen backbones are cached and how large the cache is, or empty it.

    Features are kept so that the same picture need not be computed twice. The folder is ~/.cache/trident; set
    TRIDENT_CACHE to use another.
    """
    from trident.cli.console import say
    from trident.labelling.feature_cache import FeatureCache, cache_folder

    folder = cache_folder()
    features = FeatureCache(folder, say=lambda line: say(f"trident: {line}"))
    deleted, _ = features.size()
    if clear:
        features.clear()
    pictures, size = features.size()
    if features.problem is not None:
        raise TridentError(features.problem)
    if as_json:
        opt.print_json({"folder": str(folder), "pictures": pictures, "bytes": size, "limit": features.limit})
    elif clear:
        print(f"deleted the features of {deleted:,} pictures in {folder}")
    else:
        of = f"{size / 1e6:,.1f} MB of at most {features.limit / 1e6:,.0f} MB"
        print("\n".join(opt.aligned([("folder", str(folder)), ("pictures", f"{pictures:,}"), ("size", of)])))
