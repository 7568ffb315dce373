"""`oxidiff doctor`: what was found on this machine, what is missing, one line each."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence

import torch
from packaging.version import Version

from . import _native, advice, testing
from .capture import Capturer
from .device import device_of
from .dispatch import follow_threads
from .errors import UnsupportedError

__all__ = ["Finding", "advice_text", "examine", "text"]

_OLDEST_TORCH = "2.9"

Finding = tuple[bool, str, str]
"""``(is_fine, subject, what was found)``."""


def examine() -> Iterator[Finding]:
    """Looks at everything that this package uses."""
    yield True, "oxidiff", _native.__version__
    yield True, "python", f"{platform.python_version()} ({platform.platform()})"
    is_new = Version(torch.__version__).release >= Version(_OLDEST_TORCH).release
    yield is_new, "torch", torch.__version__ + ("" if is_new else f": {_OLDEST_TORCH} or newer is needed")
    has_exchange = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    yield True, "tensors", "by the DLPack C exchange API" if has_exchange else "by attributes (torch >= 2.10 is faster)"
    is_watched = _native.Watch.is_available()
    how = "as they are made" if is_watched else "by comparing everything, milliseconds a call, in this Python or torch"
    yield is_watched, "changes of a module", f"noticed {how}"
    follow_threads()
    target = ", ".join(f"{name} {value}" for name, value in _native.target().items())
    yield True, "cpu", f"{target}; torch uses {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            try:
                device = device_of(torch.device("cuda", index))
            except UnsupportedError as error:
                yield False, f"cuda:{index}", f"{torch.cuda.get_device_name(index)}: modules there run eager: {error}"
            else:
                assert device is not None, "only the CPU has none"
                figures = advice.gpu_of(device.backend)
                yield (
                    True,
                    f"cuda:{index}",
                    f"{device.name}: modules there are compiled, for {figures.name}: "
                    f"{figures.half_flops / 1e12:.0f} TFLOP/s in 16 bits, {figures.bandwidth / 1e9:.0f} GB/s",
                )
    else:
        yield True, "cuda", "no device"
    if torch.version.cuda is not None:
        findings = _native.cuda_findings(os.path.dirname(torch.__file__))
        # What is missing is a problem only where there is a driver, whether torch gets on with it or not.
        has_driver = torch.cuda.is_available() or not any("no NVIDIA driver" in found for _, _, found in findings)
        for subject, is_there, found in findings:
            yield is_there or not has_driver, subject, found
    for name, purpose in (
        ("diffusers", "pipelines"),
        ("transformers", "text encoders"),
        ("peft", "LoRA adapters"),
        ("accelerate", "offloading"),
    ):
        try:
            yield True, name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield True, name, f"not installed ({purpose})"
    knobs = _native.knobs()
    for name, default, meaning, complaint in knobs:
        value = os.environ.get(name)
        said = f"{meaning} [{default}]" if value is None else f"{meaning}: set to {value!r}"
        yield complaint is None, name, complaint or said
    known = {name for name, *_ in knobs}
    for name in sorted(os.environ):
        if name.startswith("OXIDIFF_") and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            yield False, name, "there is no such variable" + "".join(f": is {other} meant?" for other in near)


def text() -> tuple[str, bool]:
    """The findings, a line each, and whether all is fine."""
    findings = list(examine())
    width = max(len(subject) for _, subject, _ in findings)
    lines = [f"{'ok' if fine else '!!'}  {subject.ljust(width)}  {found}" for fine, subject, found in findings]
    return "\n".join(lines), all(fine for fine, _, _ in findings)


def advice_text(
    model: str, dtype: torch.dtype, device: str | None, batch: int = 1, size: Sequence[int] | None = None
) -> str:
    """What bounds a model of the zoo on a device; no weights are made and nothing runs.

    Args:
        model: Its name.
        dtype: Of weights and inputs.
        device: The name of a GPU, or ``None`` for this processor.
        batch: Images, or texts.
        size: As :func:`oxidiff.testing.example_inputs` takes it; the usual one by default.

    Raises:
        ValueError: There is no profile of that device, or the model takes other sizes.
    """
    target = advice.device_of(device)
    with torch.device("meta"):
        module = testing.build(model, tiny=False, dtype=dtype)
    capturer = Capturer(module)
    call = capturer.call((), testing.example_inputs(model, batch=batch, size=size, tiny=False, dtype=dtype))
    graph, lowered = capturer.lowered(call, _native.GraphBuilder)
    differences: list[str] = []
    if device is None:
        program, _ = _native.compile(lowered.builder)
    else:
        program, differences = advice.compiled_for(lowered, target, "auto")
    at = graph.plan.complete({symbol.name: symbol.value for symbol in graph.plan.symbols})
    values = {name: int(value) for name, value in at.items()}
    batches = [s.name for s in graph.plan.symbols if s.role == "batch" and s.name in lowered.symbols]
    dims = [values[name] for name in lowered.symbols]
    spatial = [s.name for s in graph.plan.symbols if s.role == "spatial" and s.name in lowered.symbols]
    facts = {
        "is_half": dtype != torch.float32,
        "spatial_at": [lowered.symbols.index(name) for name in spatial],
        "channels_last": (),
        "fast_bytes": advice.fast_bytes(lowered, dims, "auto") if device is None else None,
        "batch_at": lowered.symbols.index(batches[0]) if batches else None,
        "weight_bytes": sum(p.numel() * p.element_size() for p in module.parameters()),
    }
    sizes = ", ".join(f"{s.label} {s.name} = {s.value}" for s in graph.plan.symbols)
    lines = advice.sentences(program, dims, target, facts) + differences
    return "\n".join([f"{model}, {str(dtype).removeprefix('torch.')}, {sizes}", *(f"  {line}" for line in lines)])
