"""One run of a module on meta tensors: everything in place for it, the run, and everything as it was before.

Invariant: whatever happens inside ``forward``, the module, its caches and the interpreter are afterwards as before.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import pickle
import random
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..autocast import State, autocast_as
from ..errors import CaptureError, Error, from_native, is_interrupt, replaced_interrupt
from .failures import CHANGED, ChangedError, LongerError
from .flex import uncompiled
from .following import LOCK, claiming, following_modules
from .leftovers import Before, Change, Content, KeptError, Leaks, LeftError
from .pretence import (
    RealDevice,
    following_functions,
    following_lengths,
    own_spaces,
    past_caches,
    past_dynamo,
    reached_spaces,
    refusing_seeds,
    telling_inference,
    telling_transformers,
)
from .record import Trace
from .recorder import Reader, Recorder
from .rewritten import Rewritten
from .unread import DRAW, NUMPYS, PYTHONS, drawn_and_unread, refusal
from .weights import WeightIndex
from .writes import Cells

__all__ = ["generator_states", "trace"]

_C = torch._C


def trace(
    call: Callable[[], Any],
    inputs: list[tuple[Tensor, str]],
    weights: WeightIndex,
    device: torch.device,
    scalars: Sequence[float] = (),
    limit: int | None = None,
    reader: Reader | None = None,
    has_doubles: bool = False,
    autocast: State = (),
    thread_modes: tuple[bool, bool] = (False, False),
    *,
    is_own: bool = True,
) -> Trace:
    """Runs ``call`` once and records it.

    Args:
        call: Calls the module on ``inputs``.
        inputs: The meta tensors that are the graph's arguments, in order, with a label for messages.
        weights: The module's tensors.
        device: What the program is to believe its tensors live on.
        scalars: The Python floats among the arguments.
        limit: Of a trial, which may fail: most nodes of a trace that can be of use. A program that makes more, of each
            token one say, is stopped.
        reader: Who answers what the program reads out of tensors, if anyone can.
        has_doubles: Whether a number stands for one of numpy's, of which torch makes tensors of another dtype.
        autocast: What autocast is on for in the call.
        thread_modes: Whether gradients are enabled there, and inference mode, as far as the program may ask.
        is_own: Whether it is at the sizes of a call, which may set up what it finds missing.

    Raises:
        CaptureError: If the program cannot be written down as a graph, or raised an exception itself.
    """
    with LOCK:
        collecting = gc.isenabled()
        try:
            gc.disable()
            call = functools.partial(_cast, call, autocast) if autocast else call
            call = functools.partial(_asking, call, *thread_modes) if any(thread_modes) else call
            run = functools.partial(
                _run, call, inputs, weights, device, scalars, limit, reader, has_doubles, bool(autocast)
            )
            settled = functools.partial(_settled, run, is_own, weights)
            # What it sets variables of contexts to goes with the context.
            whole = functools.partial(_without_draws, settled, weights) if weights.outer.may_draw else settled
            return contextvars.copy_context().run(whole)
        finally:
            if collecting:
                gc.enable()


def _cast(call: Callable[[], Any], autocast: State) -> Any:
    """The call with autocast as its caller has it."""
    with autocast_as(autocast):
        return call()


def _asking(call: Callable[[], Any], is_grad_enabled: bool, is_inference: bool) -> Any:
    """The call with modes as its caller has them. Nothing that is traced needs gradients."""
    with torch.set_grad_enabled(is_grad_enabled), telling_inference(is_inference):
        return call()


def _without_draws(run: Callable[[], Trace], weights: WeightIndex) -> Trace:
    """A run in which nothing is drawn from the generators of Python and numpy: what it drew would be a constant.

    They belong to all threads. What another one drew meanwhile is mostly not drawn in a second run as well. The last one
    draws nothing: those before have shown that ``forward`` keeps nothing for later calls, among which numbers could be.
    """
    first = before = generator_states()
    try:
        for at in range(_DRAWN):
            weights.hides_draws = weights.hides_draws or at == _DRAWN - 1
            record = run()
            after = generator_states()
            known = {name: state for name, state, _, _ in before}
            # One that was imported meanwhile may have been made for this run.
            drawn = [name for name, state, _, _ in after if known.get(name, state) != state]
            if not drawn:
                if at and any(node[0] is DRAW for node in record.nodes):
                    # The program draws what those before drew.
                    _put_back(first)
                return record
            before = after
    except BaseException:
        weights.hides_draws = False
        _put_back(first)
        raise
    weights.hides_draws = False
    _put_back(first)
    raise refusal(drawn[0])


_DRAWN = 3
"""Runs until draws are taken for those of ``forward``."""

_Generator = tuple[str, Any, Callable[[Any], Any], Any]
"""Whose it is, its state in a form that can be compared, what sets it, and the state."""


def generator_states() -> list[_Generator]:
    """The generators that are nobody's own, as they are now."""
    state: Any = random.getstate()
    found: list[_Generator] = [(PYTHONS, state, random.setstate, state)]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and hasattr(numpy, "get_state"):
        state = numpy.get_state()
        found.append((NUMPYS, pickle.dumps(state), numpy.set_state, state))
    return found


def _put_back(generators: Sequence[_Generator]) -> None:
    """Sets generators to what they were, if they are not: eager draws the numbers then that it would have drawn."""
    now = {name: state for name, state, _, _ in generator_states()}
    for name, before, put, state in generators:
        if now.get(name) != before:
            put(state)


def _settled(
    run: Callable[..., tuple[Trace, list[Change | Content], Leaks]], is_own: bool, weights: WeightIndex
) -> Trace:
    """A run that changes nothing. What a first call sets up once (lazily installed hooks, say) a second run finds as it is;
    it has to do what the first one did, or the call that is captured would get the results of the next. At sizes that
    nobody called with, nothing is set up. Tensors that each call puts into attributes without a look at what was there are
    results."""
    record, changes, leaked = run()
    if not (changes or leaked):
        return record
    if not leaked and (rewritten := Rewritten.of(changes, weights)) is not None:
        setting = _setting(run, rewritten, record)
        if setting is not None:
            return setting
    has_others = threading.active_count() > 1
    if any(change.is_outside or (has_others and change.is_inside) for change in changes):
        # Once more, to see which module does it, which takes longer than all else, and whether it was ``forward`` at all.
        again = run(is_looking=True)[1]
        labels = {change.label for change in again}
        foreign = [one for one in changes if one.is_inside and one.label not in labels]
        if foreign and has_others:
            for one in foreign:
                one.redo()
            raise ChangedError(CHANGED)
        changes = again or changes
    # What a container holds may be another thing at each size, as what follows from sizes is. And Dynamo, which would find
    # the parts of such a forward, loses what functions that are attributes write into variables around them.
    lasting = [c for c in changes if isinstance(c, Change) and not (c.is_item or c.is_sized or c.is_outside)]
    lasting = [c for c in lasting if not isinstance(c.table, Cells)]
    if changes and weights.modules and getattr(type(weights.modules[0][1]), "passes_all", False):
        # What is passed to it decides what it sets.
        error = _kept(f"changes the attribute {changes[0].label}", changes, changes[0])
        error.pass_on(changes)
        raise error
    for change in changes:
        if change.holds_tensor:
            raise _kept(f"keeps a tensor in the attribute {change.label}", changes, change)
        if not is_own or not any(change is one for one in lasting):
            raise _kept(f"changes {change.label}, which later calls see", changes, change)
    for one in lasting:
        one.redo()
    settled = False
    try:
        second, again, leaked = run()
        for change in again:
            if type(change.after) is int:
                # Of which Dynamo compiles each value anew.
                raise _kept(f"changes the attribute {change.label}", again, change)
        if again:
            raise LeftError(f"forward changes the attribute {again[0].label}", again)
        if leaked:
            raise KeptError("a tensor made in forward outlived it, so forward keeps state between calls", leaks=leaked)
        if changes and not second.is_as(record):
            raise _kept(f"changes the attribute {changes[0].label}, which decides what it does", changes, changes[0])
        settled = True
        return second
    finally:
        if not settled:
            for change in changes:
                change.undo()


def _setting(
    run: Callable[..., tuple[Trace, list[Change | Content], Leaks]], rewritten: Rewritten, record: Trace
) -> Trace | None:
    """A run that gives what it sets attributes to, and is else as one before; ``None`` if what was there matters to it."""
    try:
        rewritten.hide()
        second, others, leaked = run(rewritten=rewritten)
    except ChangedError:
        raise
    except CaptureError:
        return None
    finally:
        rewritten.show()
    is_as_before = second.nodes[:-1] == record.nodes[:-1]
    return second if is_as_before and rewritten.is_right() and not (others or leaked) else None


def _kept(what: str, changes: Sequence[Change | Content], change: Change | Content) -> KeptError:
    where = f"in {change.module}: " if change.module else ""
    return KeptError(f"{where}forward {what}", changes, module=change.module)


def _run(
    call: Callable[[], Any],
    inputs: list[tuple[Tensor, str]],
    weights: WeightIndex,
    device: torch.device,
    scalars: Sequence[float],
    limit: int | None,
    reader: Reader | None,
    has_doubles: bool,
    is_autocast: bool,
    is_looking: bool = False,
    rewritten: Rewritten | None = None,
) -> tuple[Trace, list[Change | Content], Leaks]:
    """One run; also the attributes that it changed, and what tensors it left elsewhere: both are undone."""
    recorder = Recorder(weights, device, scalars, limit, reader)
    recorder.has_doubles = has_doubles
    recorder.is_autocast = is_autocast
    try:
        run = functools.partial(_run_noting, call, inputs, weights, recorder, reader, is_looking, rewritten)
        found: tuple[Trace, list[Change | Content], Leaks] = claiming(recorder, run)
        return found
    except CaptureError as error:
        if recorder.is_trial:
            error.trail = recorder.trail()
        raise
    finally:
        recorder.close()


def _run_noting(
    call: Callable[[], Any],
    inputs: list[tuple[Tensor, str]],
    weights: WeightIndex,
    recorder: Recorder,
    reader: Reader | None,
    is_looking: bool,
    rewritten: Rewritten | None,
) -> tuple[Trace, list[Change | Content], Leaks]:
    before = Before(weights)
    recorder.held = before.held
    if is_looking:
        recorder.look_outside = before.look_outside
    if reader is not None:
        reader.begin()
    try:
        return _recorded(call, inputs, before, recorder, rewritten)
    except BaseException as error:
        if not isinstance(error, Error):
            # An interrupt, perhaps in the middle of this.
            before.restore(recorder)
        raise


def _called(call: Callable[[], Any], inputs: list[tuple[Tensor, str]], recorder: Recorder) -> Any:
    spaces = reached_spaces(own_spaces(module for _, module in recorder.weights.modules))
    with (
        torch.no_grad(),
        _C._AutoDispatchBelowAutograd(),
        telling_transformers(),
        refusing_seeds(recorder),
        past_caches(recorder.weights),
        past_dynamo(),
        following_lengths(spaces),
        following_functions(spaces),
        uncompiled(recorder.device),
        drawn_and_unread(recorder) if recorder.weights.hides_draws else contextlib.nullcontext(),
        recorder,
        RealDevice(recorder),
    ):
        for tensor, label in inputs:
            recorder.add_input(tensor, label)
        return call()


def _finished(
    call: Callable[[], Any], inputs: list[tuple[Tensor, str]], recorder: Recorder, rewritten: Rewritten | None
) -> Trace:
    """The trace. Results are of this frame alone, of which an error is cleared: nothing else would hold them."""
    result = following_modules(recorder, functools.partial(_called, call, inputs, recorder))
    if recorder.failure is not None:
        raise recorder.failure
    recorder.drawn.check()
    return recorder.finish(result if rewritten is None else rewritten.added_to(result))


def _recorded(
    call: Callable[[], Any],
    inputs: list[tuple[Tensor, str]],
    before: Before,
    recorder: Recorder,
    rewritten: Rewritten | None,
) -> tuple[Trace, list[Change | Content], Leaks]:
    outer = sys.exc_info()[1]
    try:
        record = _finished(call, inputs, recorder, rewritten)
    except BaseException as error:
        if is_interrupt(error):
            raise
        if (interrupt := replaced_interrupt(error, outer)) is not None:
            raise interrupt from None
        # `sys.exit()` in forward, too: eager may never get there, at another size.
        before.restore(recorder)
        # The frames of the tracebacks hold what forward made, also of what the error was raised from.
        chained: BaseException | None = error
        while chained is not None:
            traceback.clear_frames(chained.__traceback__)
            if recorder.is_trial:
                # Nobody sees where it failed, and what closures hold, no frame can be cleared of.
                chained.__traceback__ = None
            chained = chained.__cause__ or chained.__context__
        before.forget(recorder)
        if recorder.is_disturbed:
            raise ChangedError(CHANGED) from None
        if isinstance(error, Error):
            raise
        if isinstance(error, MemoryError):
            if recorder.is_trial:
                raise LongerError(str(recorder.error("forward does more than memory holds at another size"))) from None
            raise from_native(error) from error
        found, failure = recorder.raised(error), recorder.failure
        if failure is not None and str(failure) != str(found):
            # What `forward` made of it.
            raise failure from None
        raise found from error
    changes = before.restore(recorder)
    if rewritten is not None:
        changes = rewritten.others(changes)
    if recorder.is_disturbed:
        before.forget(recorder)
        raise ChangedError(CHANGED)
    # Tensors that changed attributes hold are not leaks: they went with the attributes.
    forgot = before.forget(recorder)
    leaked = Leaks((forgot | before.paths) if before.keepers or not changes else frozenset(), before.keepers)
    if not (changes or leaked):
        recorder.check_others()
    return record, changes, leaked
