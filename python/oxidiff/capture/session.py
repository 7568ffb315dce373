"""One capture: trace at a few sizes, check that the graphs agree, solve their numbers, verify elsewhere.

A capture takes five traces: at the call's own sizes, at three more where every free size differs, and at a held-out one
(batch 1, other residues), which must be predicted. Where the guess about the sizes that are free fails, more of them find
out (:mod:`freeing`); what trials have traced is not traced again.
"""

from __future__ import annotations

from .checking import Checking
from .dim import Dim, Real
from .fit import denominators
from .graph import CapturedGraph, build_graph
from .guards import Ledger
from .points import candidates, counts_apart
from .reads import Asking
from .record import Trace
from .signature import with_answers
from .trials import Point

__all__ = ["Session"]


class Session(Checking):
    """One capture."""

    def run(self) -> CapturedGraph:
        """The graph of the call."""
        if not self.owner.dynamic:
            self.fix_all()
        for symbol in list(self.plan.symbols):
            values = next(candidates(symbol, self.order[symbol.name]), None)
            if values is None:
                # Next to a float as large as that there is nothing to try.
                self.fix(symbol)
            else:
                self.chosen[symbol.name] = values
        self.chosen.update(counts_apart(self.counts(), self.chosen))
        if not self.call.questions:
            self.asking = Asking(self.call.tensors, self.device, self.asks_sizes)
        base = self.base = self.trace_at(self.point())
        self.is_sized = base.is_sized
        if self.asking is not None and self.asking.questions:
            call = with_answers(self.call, self.asking.questions, self.asking.answers)
            return Session(self.owner, call, self.wanted, self.asks_sizes).run()
        self.asking = None
        self.limit = len(base.nodes)
        self.fix_counters(base)
        if self.lifted_symbols():
            self.copy()
        while True:
            self.plan.ordered = ()
            graph, points = self.solved_graph(base)
            is_right = self.hold_out(graph, points)
            if self.plan.areas and (self.is_narrow or not is_right):
                # Not that, or not that alone.
                self.drop_area()
            elif not is_right:
                if not (self.tie_sides(base) or self.fix_sides()):
                    self.fix_all()
            elif not self.pad_sides(base, graph) and (not self.is_narrow or not self.pad_area(base)):
                self.keep_order(graph)
                self.bound_ints(graph)
                self.bound_near(graph)
                self.try_ways(graph)
                break
        # Read by now, and longer than the rest of the trace.
        graph.template.ledger = Ledger()
        graph.traces = self.traces
        graph.fixed = tuple(self.fixed)
        graph.asks_sizes = self.asks_sizes
        return graph

    def solved_graph(self, base: Trace) -> tuple[CapturedGraph, list[Point]]:
        """A graph that is right at a few points, and these."""
        self.is_narrow = False
        records, points = self.agreeing_traces(base)
        forms = self.solve(base, records, points)
        while forms is None and (forms := self.solve_counting(base, records, points)) is None:
            self.fix_unsolved(base)
            records, points = self.agreeing_traces(base)
            forms = self.solve(base, records, points)
        used = {name for form in set(forms) if isinstance(form, Dim) for name in form.symbols()}
        for symbol in [s for s in self.lifted_symbols() if s.name not in used]:
            # No trace shows that it matters, or where: the graph is right for this value.
            self.fix(symbol)
            points = [{name: value for name, value in p.items() if name != symbol.name} for p in points]
        # A float need not come out whole, so it decides no residues.
        dims = [f for f in set(forms) if isinstance(f, Dim) and not isinstance(f, Real)]
        moduli = denominators(dims, self.plan.names())
        forms, points = self.without_units(forms, points, moduli)
        graph = build_graph(self.call, self.plan, self.labels, base, forms, moduli)
        graph.solve_uses(records, points)
        graph.lay_out(records, points)
        self.escaped = set()
        for point, record in zip(points, records, strict=True):
            self.confirm(graph, point, record)
        return graph, points
