"""The command line: ``oxidiff doctor | bench | tune | cache | inspect``; ``oxidiff COMMAND --help`` says more."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence

import torch

import oxidiff
from oxidiff import advice, doctor, testing
from oxidiff import bench as benches
from oxidiff.store import bundle, cache_folder, read_artifact

__all__ = ["main"]

_INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Without the program's name; those of the process by default.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="oxidiff", description="A compile backend for PyTorch diffusion models.")
    parser.add_argument("--version", action="version", version=f"oxidiff {oxidiff.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("doctor", help="what was found on this machine, what is missing")
    check.add_argument("--model", choices=testing.names(), help="what bounds this model, and what would help")
    check.add_argument("--dtype", choices=_DTYPES, default="f32")
    check.add_argument("--batch", type=_count, default=1)
    check.add_argument("--size", type=_count, nargs="+", help="height and width, or tokens, of the model's own input")
    check.add_argument(
        "--device",
        help="ask about this GPU, which need not be here: "
        + ", ".join(device.name for device in advice.DEVICES.values()),
    )
    check.set_defaults(run=_doctor)
    bench = commands.add_parser(
        "bench",
        help="a model or a script, eager and compiled, in turns",
        description="Times a model of the zoo, or the modules that a script compiles; the script's arguments follow `--`.",
    )
    bench.add_argument(
        "subject", metavar="MODEL|SCRIPT", type=_subject, help=f"a file, or {', '.join(testing.names())}"
    )
    bench.add_argument("--tiny", action="store_true", help="the small model of the same structure")
    bench.add_argument("--dtype", choices=_DTYPES, default="f32")
    bench.add_argument("--batch", type=_count, default=1)
    bench.add_argument("--runs", type=_count, help="timed runs of each (5 of a model, 2 of a script)")
    bench.set_defaults(run=_bench)
    tune = commands.add_parser("tune", help="fill the tuning database for a model on this machine")
    tune.add_argument("model", metavar="MODEL", choices=testing.names(), help=", ".join(testing.names()))
    tune.add_argument("--tiny", action="store_true", help="the small model of the same structure")
    tune.add_argument("--dtype", choices=_DTYPES, default="f32")
    tune.add_argument("--batch", type=_count, default=1)
    tune.add_argument("--size", type=_count, nargs="+", help="height and width, or tokens, of the model's own input")
    tune.add_argument("--budget", type=_seconds, default=600.0, metavar="SECONDS", help="at most (%(default)s)")
    tune.set_defaults(run=_tune)
    inspect = commands.add_parser("inspect", help="what is in a saved program")
    inspect.add_argument("file", metavar="FILE", help="what save_graph wrote, or a file of the cache")
    inspect.add_argument("--program", action="store_true", help="the graphs themselves, as text")
    inspect.set_defaults(run=_inspect)
    cache = commands.add_parser("cache", help="the cache of compiled graphs and tuning choices")
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="what is in it")
    ls.add_argument("--choices", action="store_true", help="every tuning choice, with its times")
    ls.set_defaults(run=_cache_ls)
    actions.add_parser("clear", help="remove all of it").set_defaults(run=_cache_clear)
    for name, run, meaning in (
        ("export", _cache_export, "write all of it to one file"),
        ("import", _cache_import, "replace it by what is in a file"),
        ("merge", _cache_merge, "add what is in a file, or in another tuning database"),
    ):
        action = actions.add_parser(name, help=meaning)
        action.add_argument("file", metavar="FILE")
        action.set_defaults(run=run)
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if given[:1] == ["bench"] and "--" in given else len(given)
    chosen = parser.parse_args(given[:at])
    chosen.arguments = given[at + 1 :]
    try:
        status: int = chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it has seen enough. The interpreter is not to write the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("oxidiff: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (oxidiff.Error, OSError, ValueError) as error:
        print(f"oxidiff: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        # PyTorch has a class of its own for GPUs alone.
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "allocate" not in str(error):
            raise
        print(f"oxidiff: there is not enough memory for it: {error}", file=sys.stderr)
        return 1
    return status


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return count


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return seconds


def _tune(chosen: argparse.Namespace) -> int:
    dtype = _DTYPES[chosen.dtype]
    before = {row[:4] for row in bundle.entries()}

    def measured() -> list[bundle.Row]:
        return [row for row in bundle.entries() if row[:4] not in before]

    try:
        compiled = oxidiff.compile(
            testing.build(chosen.model, dtype=dtype, tiny=chosen.tiny), tune="full", tune_budget_s=chosen.budget
        )
        size = None if chosen.size is None else tuple(chosen.size)
        inputs = testing.example_inputs(chosen.model, batch=chosen.batch, size=size, dtype=dtype, tiny=chosen.tiny)
        oxidiff.warmup(compiled, **inputs)
    except KeyboardInterrupt:
        kept = f"{len(measured())} choices measured until then are kept in {bundle.database_path()}"
        print(f"oxidiff: interrupted: {kept}", file=sys.stderr)
        return _INTERRUPTED
    rows = measured()
    for op, bucket, _, _, choice, seconds, default_seconds, *_ in rows:
        print(f"{op}, {bucket}: {choice}, {seconds * 1e3:.2f} ms of {default_seconds * 1e3:.2f} ms")
    print(f"{len(rows)} choices measured in {oxidiff.report(compiled).tune_s:.1f} s, kept in {bundle.database_path()}")
    return 0


def _inspect(chosen: argparse.Namespace) -> int:
    artifact = read_artifact(chosen.file)
    print(artifact.text())
    if chosen.program:
        for graph in artifact.graphs:
            print(graph.program)
    return 0


def _cache_ls(chosen: argparse.Namespace) -> int:
    print(bundle.list_cache(chosen.choices))
    return 0


def _cache_clear(_: argparse.Namespace) -> int:
    print(f"{bundle.clear()} files removed from {cache_folder()}")
    return 0


def _cache_export(chosen: argparse.Namespace) -> int:
    count = bundle.export(chosen.file, lambda what: print(f"oxidiff: {what}", file=sys.stderr))
    print(f"{count} entries written to {chosen.file}")
    return 0


def _cache_import(chosen: argparse.Namespace) -> int:
    print(f"{bundle.replace(chosen.file)} entries from {chosen.file} are what is in {cache_folder()} now")
    return 0


def _cache_merge(chosen: argparse.Namespace) -> int:
    print(f"{bundle.merge(chosen.file)} entries added from {chosen.file} to {cache_folder()}")
    return 0


def _doctor(chosen: argparse.Namespace) -> int:
    if chosen.model is not None or chosen.device is not None:
        model, dtype = chosen.model or "sd15-unet", _DTYPES[chosen.dtype]
        print(doctor.advice_text(model, dtype, chosen.device, chosen.batch, chosen.size))
        return 0
    lines, is_fine = doctor.text()
    print(lines)
    return 0 if is_fine else 1


def _subject(name: str) -> str:
    if name not in testing.names() and not os.path.isfile(name):
        raise argparse.ArgumentTypeError(f"{name!r} is neither a file nor one of {', '.join(testing.names())}")
    return name


def _bench(chosen: argparse.Namespace) -> int:
    if chosen.subject in testing.names():
        print(benches.of_model(chosen.subject, chosen.tiny, _DTYPES[chosen.dtype], chosen.batch, chosen.runs or 5))
    else:
        print(benches.of_script(chosen.subject, chosen.arguments, chosen.runs or 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
