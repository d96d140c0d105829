"""Measuring a trained model: `trident evaluate`."""

import json

from trident.cli.app import app
from trident.cli.options import (
    SETTINGS,
    Chunk,
    Data,
    Device,
    EngineName,
    Json,
    PrecisionName,
    RunPath,
    Seed,
    Settings,
    Split,
    StoreOn,
    Tasks,
    load_for_measuring,
    print_caution,
    sample_of,
)
from trident.cli.processes import on_processes


@app.command(context_settings=SETTINGS, short_help="Measure accuracy.")
def evaluate(
    run: RunPath,
    settings: Settings = None,
    data: Data = None,
    split: Split = "val",
    tasks: Tasks = 600,
    seed: Seed = 0,
    tasks_per_chunk: Chunk = None,
    device: Device = "auto",
    engine: EngineName = "auto",
    precision: PrecisionName = "auto",
    store_on: StoreOn = "auto",
    as_json: Json = False,
) -> None:
    """Measure accuracy, by default on tasks from the validation classes and with the settings of the run.

    Settings override those of the run, for example episode.n_shot=5, protocol.query_order=class_sorted,
    protocol.balance=dirichlet, protocol.queries_at_once=one or, for methods with inner steps, inner_steps=0.
    On several GPUs: torchrun --nproc-per-node 4 -m trident evaluate RUN.
    """
    from trident.cli.console import counting
    from trident.measuring.evaluate import evaluate as measure

    with on_processes(device) as here:
        checkpoint, store = here.measured(lambda: load_for_measuring(run, settings), data, store_on, split)
        sample = sample_of(split, tasks, seed, here.device, tasks_per_chunk, engine, precision)
        with counting("evaluating tasks") as progress:
            result = measure(checkpoint, store, progress=progress, **sample, processes=here.processes)
    if not here.processes.first:
        return
    print_caution(checkpoint, store, split)
    if as_json:
        print(json.dumps({**result.to_json(), "weights": checkpoint.summary()}, allow_nan=False))
    else:
        print(f"accuracy {result.accuracy:.2f} ± {result.ci95:.2f} %")
        print(f"({result.describe_protocol()}; {checkpoint.describe()})")
